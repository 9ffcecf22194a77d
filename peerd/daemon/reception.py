"""Passes calls about a stage to the current seat. Between two seats it refuses them, and the callers ask other peers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, cast

from peerd.audit.auditor import Auditor
from peerd.errors import WrongStateError
from peerd.policy.inference.paths import TextOffer
from peerd.policy.step.evidence import Evidence
from peerd.policy.step.receipts import SentOn, SignedPass
from peerd.policy.step.roster import Roster
from peerd.stage.executor import Priority
from peerd.table.record import AverageId, PeerId, Phase, RawRecord
from peerd.wire.chunks import CutFile
from peerd.wire.deliveries import Lending
from peerd.wire.handlers import Frames, Progress, Receive, Tell
from peerd.wire.messages import (
    Average,
    Beat,
    Call,
    CallResult,
    Frame,
    ProposalAnswer,
    Snapshot,
    StateRequest,
    TensorBytes,
    ToldMoves,
    ToldSketch,
    Verified,
)
from peerd.wire.text_messages import Extended, TextCall

if TYPE_CHECKING:
    from peerd.daemon.seat import Seat

NOT_JOINING = PeerId("")
"""Stands for all that ask for sketches and do not join the stage, as far as is known here: together they have the turns of one."""


class Reception:
    """The handler of all stage services while the daemon runs."""

    def __init__(self) -> None:
        self._seat: Seat | None = None
        self._calls: set[asyncio.Task[object]] = set()
        self._turned_away: set[asyncio.Task[object]] = set()

    def open(self, seat: Seat) -> None:
        """Pass calls to this seat from now on."""
        self._seat = seat

    def close(self) -> None:
        """Refuse calls from now on, including those under way."""
        self._seat = None
        for call in self._calls:
            self._turned_away.add(call)
            call.cancel()

    @property
    def slots(self) -> int:
        """How many microbatches the present seat holds at once."""
        return self._seat.service.slots if self._seat is not None else 1

    async def backpropagate(self, caller: PeerId, call: Call, receive: Receive, progress: Progress) -> CallResult:
        with self._served() as seat:
            return await seat.service.backpropagate(caller, call, receive, progress)

    def absorb(self, caller: PeerId, records: Sequence[RawRecord]) -> None:
        self._present().service.absorb(caller, records)

    def cancel(self, caller: PeerId, call_id: bytes) -> None:
        if self._seat is not None:
            self._seat.service.cancel(caller, call_id)

    def mates(self) -> Iterable[PeerId]:
        return self._present().rounds.mates()

    async def propose(self, caller: PeerId, roster: Roster) -> ProposalAnswer:
        with self._served() as seat:
            return await seat.rounds.propose(caller, roster)

    async def give(self, caller: PeerId, average_id: AverageId, frames: Frames, tell: Tell) -> None:
        with self._served() as seat:
            await seat.rounds.give(caller, average_id, frames, tell)

    async def take(self, caller: PeerId, average_id: AverageId, words: AsyncGenerator[Verified]) -> AsyncGenerator[Frame]:
        async with contextlib.aclosing(self._present().rounds.take(caller, average_id, words)) as frames:
            async for frame in frames:
                yield frame

    def beat(self, caller: PeerId, beat: Beat) -> Beat:
        return self._present().rounds.beat(caller, beat)

    def abort(self, caller: PeerId, average_id: AverageId, left_out: PeerId, reason: str) -> None:
        if self._seat is not None:
            self._seat.rounds.abort(caller, average_id, left_out, reason)

    async def get_average(self, stage: int, step: int, section: int | None) -> tuple[Average, CutFile, bool]:
        with self._served() as seat:
            return await seat.rounds.kept.get_average(stage, step, section)

    async def get_tied(self, step: int, wanted: AverageId) -> tuple[bytes, CutFile]:
        with self._served() as seat:
            found = await seat.rounds.kept.get_tied(step, wanted)
            return found.checksum, found

    async def get_moves(self, incarnation: int, first: int) -> ToldMoves:
        with self._served() as seat:
            return await seat.executor.run(Priority.LEDGER, lambda: seat.state.moves_since(incarnation, first))

    async def snapshot(self, caller: PeerId, wanted: StateRequest) -> tuple[Snapshot, Lending]:
        with self._served() as seat:
            return await seat.snapshots.snapshot(caller, wanted)

    async def sketch(self, caller: PeerId, stage: int, seed: bytes, previous: bool) -> ToldSketch:
        with self._served() as seat:
            record = seat.peer.membership.find(caller)
            joins = record is not None and record.stage == stage and record.phase is Phase.JOINING
            return await seat.snapshots.sketch(caller if joins else NOT_JOINING, stage, seed, previous)

    def offer_text(self, caller: PeerId, stage: int) -> TextOffer:
        return self._present().texts.offer(stage)

    async def extend_text(self, caller: PeerId, call: TextCall, receive: Receive) -> Extended:
        with self._served() as seat:
            return await seat.texts.extend(caller, call, receive)

    async def forget_text(self, caller: PeerId, text: bytes) -> None:
        with self._served() as seat:
            await seat.texts.forget(caller, text)

    def receipts(self, stage: int, step: int, known: Collection[bytes]) -> tuple[Sequence[Evidence], Sequence[SignedPass]]:
        return self._auditor().receipts(stage, step, known)

    def sent_on(self, stage: int, step: int, known: Collection[bytes]) -> Sequence[SentOn]:
        return self._auditor().sent_on(stage, step, known)

    def kept_pass(self, signed: bytes) -> tuple[TensorBytes, TensorBytes, TensorBytes | None]:
        return self._auditor().kept_pass(signed)

    async def hear(self, evidence: Evidence) -> Evidence | None:
        with self._served():
            return await self._auditor().hear(evidence)

    def _auditor(self) -> Auditor:
        auditor = self._present().auditor
        if auditor is None:
            raise WrongStateError("peers of this run do not audit each other")
        return auditor

    def _present(self) -> Seat:
        if self._seat is None:
            raise WrongStateError("this peer serves no stage now")
        return self._seat

    @contextlib.contextmanager
    def _served(self) -> Iterator[Seat]:
        """Give the seat to one call. Raises WrongStateError if the seat closes before the call is done."""
        seat, call = self._present(), cast("asyncio.Task[object]", asyncio.current_task())
        self._calls.add(call)
        try:
            yield seat
        except asyncio.CancelledError:
            if call not in self._turned_away:
                raise
            call.uncancel()
            raise WrongStateError("this peer has left the stage") from None
        finally:
            self._calls.discard(call)
            self._turned_away.discard(call)
