"""Rounds: butterfly all-reduce over a roster: rules 7 (propose) and 8 (exchange) of docs/protocol.md.

The accumulators are cut into as many slices as there are members. Member k collects everyone's part of slice k, adds
them up in roster order, and answers each with the sum, so all members end with the same bits. Every part and slice
carries the round's average id; a part whose ledger is not the roster's is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import structlog
from torch import Tensor

from peerd.averaging.codec_choice import RoundCodec
from peerd.averaging.compression import Compression
from peerd.averaging.exchange import Round, elements_of, own_part, part_for, reduce, whole_of
from peerd.averaging.handover import finite, unpacked
from peerd.averaging.host import RoundHost
from peerd.averaging.kept import KeptAverages
from peerd.averaging.log import AverageLog
from peerd.background import INTERNAL_ERRORS, Tasks, start
from peerd.config.codec import Codec
from peerd.errors import BadMessageError, PeerGoneError, RemoteError, WrongStateError
from peerd.policy.step.roster import ROUNDS_BEFORE_VOID, Roster, whom_to_void, why_not_adopt
from peerd.stage.executor import Executor, Priority
from peerd.stage.results import HeldAverage
from peerd.stage.state import StageState
from peerd.table.record import NO_RECORD, AverageId, PeerId, RawRecord
from peerd.timeline.spans import SpanKind, SpanRing
from peerd.wire.clients import AveragingClient
from peerd.wire.messages import Average, Part
from peerd.wire.services import Receive
from peerd.wire.tensors import decode_flat

MAX_DEAD_ROUNDS = 64
ABORT_TIMEOUT_S = 2.0
MOST_OWN_ERRORS = 3
"""So many rounds in a row may fail by a bug at this member; then it does not lead another."""
LOG = structlog.get_logger()


class Rounds:
    """Opens, runs and closes rounds; answers the averaging service."""

    def __init__(
        self,
        state: StageState,
        executor: Executor,
        client: AveragingClient,
        log: AverageLog,
        averaging_s: float,
        clock: Callable[[], float],
        host: RoundHost,
        spans: SpanRing | None = None,
    ) -> None:
        self._state = state
        self._executor = executor
        # Where steps overlap, sums are made beside the next step's passes: to wait for one of those at each turn takes long.
        self._arithmetic = Executor("averaging") if state.record.next_ledger_no else executor
        self._kept = KeptAverages(state, executor, self._arithmetic, log)
        self._client = client
        self._averaging_s = averaging_s
        self._clock = clock
        self.compression = Compression(state.weight_codecs, state.accumulator.flat.dtype, state.accumulator.shapes)
        self._round_codec = RoundCodec(state.weight_codecs)
        self._work: asyncio.Task[None] | None = None
        self._opened = asyncio.Event()
        self._dead: deque[AverageId] = deque(maxlen=MAX_DEAD_ROUNDS)
        self._tasks = Tasks()
        self._own_errors: list[Exception] = []
        """Bugs that ended rounds at this member since the last average was applied."""
        self.open: Round | None = None
        self.failed = 0
        self.num_applied = 0
        self.missed: Counter[PeerId] = Counter()
        """Rounds of this step that I led and that failed for want of a member."""
        self._host = host
        self._spans = spans or SpanRing(0)

    # As leader

    async def lead(self, roster: Roster) -> str:
        """Propose my own round to the others while I open it. Returns why it failed, empty when everyone joined.

        Raises what is unexpected, also where it ended my earlier rounds: the others leave out a member that fails, but not a leader.
        """
        if len(self._own_errors) >= MOST_OWN_ERRORS:
            raise self._own_errors[-1]
        roster = replace(roster, codec=self._round_codec.codec(self._state.accumulator.flat.numel()))
        others = [peer for peer in roster.peers if peer != self._state.record.peer]
        proposals = [start(self._propose_to(peer, roster)) for peer in others]
        try:
            reason = await self._join(roster)
            answers = [reason] if reason else await asyncio.gather(*proposals)
        except Exception as error:
            self._spread_abort(roster)
            await self.close(roster.average_id, f"internal error: {error!r}")
            raise
        finally:
            for proposal in proposals:
                proposal.cancel()
        refusals = [answer for answer in answers if answer]
        if refusals:
            self._spread_abort(roster)
            await self.close(roster.average_id, refusals[0])
            return refusals[0]
        return ""

    async def _propose_to(self, peer: PeerId, roster: Roster) -> str:
        try:
            joined, reason, record = await self._client.propose(peer, roster, self._averaging_s)
        except RemoteError as error:
            self._host.report_failure(peer)
            if self.open is not None and self.open.roster is roster:
                self.open.silent.append(peer)
            return f"{peer}: {error.message}"
        if joined:
            return ""
        if self.open is not None and self.open.roster is roster:
            self.open.refused = True
        with contextlib.suppress(BadMessageError):  # it has refused all the same
            self._host.learn(record)
        return f"{peer}: {reason}"

    def _spread_abort(self, roster: Roster) -> None:
        """To all members as their leader; as a member to the leader, who then tells the others."""
        me = self._state.record.peer
        for peer in roster.peers if roster.leader == me else (roster.leader,):
            if peer != me:
                self._tasks.start(self._abort_at(peer, roster.average_id))

    async def _abort_at(self, peer: PeerId, average_id: AverageId) -> None:
        try:
            await self._client.abort(peer, average_id, ABORT_TIMEOUT_S)
        except RemoteError:
            return  # its own timer closes the round

    # As member

    async def propose(self, caller: PeerId, roster: Roster) -> tuple[bool, str, RawRecord]:
        """Whether I have joined; if not, why, and my record as it is now."""
        if caller != roster.leader:
            raise BadMessageError("a roster is proposed by its leader")
        if roster.average_id in self._dead:
            return False, "this round is closed", self._host.own_record()
        # Not to be cut short by a leader that takes its proposal back: the state would be averaging without an open round.
        reason = await asyncio.shield(self._tasks.start(self._join(roster), expects=(RemoteError,)))
        return (False, reason, self._host.own_record()) if reason else (True, "", NO_RECORD)

    async def _join(self, roster: Roster) -> str:
        codec = self.compression.codec_of(roster.codec)
        if codec is None:
            return f"this run's gradients do not travel as {roster.codec}"
        reason, accumulator = await self._executor.run(Priority.CONTROL, lambda: self._state.open_round(roster))
        if accumulator is None:
            return reason
        try:
            return self._begin(roster, codec, accumulator)
        finally:
            if self.open is None:
                await self._executor.run(Priority.CONTROL, self._state.close_round)

    def _begin(self, roster: Roster, codec: Codec, accumulator: Tensor) -> str:
        if roster.average_id in self._dead:
            return "this round is closed"  # its leader has given it up meanwhile
        mine = roster.peers.index(self._state.record.peer)
        slices = self.compression.slices(accumulator.numel(), len(roster.entries), codec)
        self.open = Round(roster, mine, accumulator, slices, progress_s=self._clock())
        opened, self._opened = self._opened, asyncio.Event()
        opened.set()
        self._work = self._tasks.start(self._run(self.open))
        self._host.round_opened()
        return ""

    async def _run(self, current: Round) -> None:
        """Exchange slices until the average is whole. A failed call closes the round at once; one that hangs is left to rule 4 (close)."""
        try:
            await self._finish(current)
        except RemoteError as error:
            await self.close(current.roster.average_id, error.message)
        except Exception as error:  # a bug
            await self._fail(current, error)

    async def _finish(self, current: Round) -> None:
        began_s = self._clock()
        await self._fetch_slices(current)
        if len(current.roster.entries) > 1:
            self._round_codec.exchanged(current.slices_of[0].codec, self._clock() - began_s)
        if self.open is not current:
            return
        self.open = None
        if self._arithmetic is not self._executor:
            await self._arithmetic.run(Priority.CONTROL, lambda: whole_of(current))
        await self._executor.run(Priority.CONTROL, lambda: self._state.take_average(current.roster, whole_of(current)))
        self._host.announce()

    async def _fail(self, current: Round, error: Exception) -> None:
        """A bug at this member ends the round. No other member is to blame for it."""
        roster = current.roster
        INTERNAL_ERRORS.report("averaging round", error, step=roster.step, leader=roster.leader)
        self._own_errors.append(error)
        current.refused = True
        if self.open is current:
            self._spread_abort(roster)
        elif self.open is None and roster.average_id not in self._dead:
            self.open = current  # the exchange was done, but the state has not taken the average
        await self.close(roster.average_id, f"internal error: {error!r}")

    async def _fetch_slices(self, current: Round) -> None:
        """All slices at once; the first failure ends the others."""
        slices = [self._fetch_slice(current, number, peer) for number, peer in enumerate(current.roster.peers)]
        tasks = [start(work, expects=(RemoteError,)) for work in slices]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _fetch_slice(self, current: Round, number: int, peer: PeerId) -> None:
        if number == current.mine:
            await self._add_part(current, peer, lambda: own_part(current, self.compression))
            current.slices[number] = (await asyncio.shield(current.reduced)).total
            return
        encode = partial(part_for, current, number, self.compression)
        encoded = self.compression.allowed.is_lossy  # else it goes out as it lies in memory
        part = await self._arithmetic.run(Priority.CONTROL, encode) if encoded else encode()
        size = sum(len(chunk) for chunk in part)
        header = Part(current.roster.average_id, number, current.roster.entries[current.mine].done, size)
        began_s = time.monotonic()
        try:
            chunks = await self._client.reduce(peer, header, part, 2 * self._averaging_s)
        except RemoteError:
            self._host.report_failure(peer)
            raise
        self._spans.add(SpanKind.EXCHANGE, began_s, current.roster.step, -1, peer, 2 * size)
        current.progress_s = self._clock()
        where, place = elements_of(current, number)
        self.compression.count(where.codec, size)
        current.slices[number] = await self._arithmetic.run(Priority.CONTROL, lambda: self.compression.received(chunks, where, into=place))

    # As reducer

    async def reduce(self, caller: PeerId, part: Part, receive: Receive) -> Sequence[memoryview]:
        current = await self._round_of(part.average_id)
        entry = current.roster.entry_of(caller)
        where = current.slices_of[current.mine]
        size = self.compression.num_bytes(where)
        if entry is None or entry.done != part.ledger or part.slice_index != current.mine or part.num_bytes != size:
            raise BadMessageError("this part is not what the roster says")
        chunks = await receive()
        try:
            await self._add_part(current, caller, lambda: self.compression.received(chunks, where))
        except RemoteError:
            raise
        except Exception as error:  # a bug; the caller may end this call meanwhile, but not what is done about it
            self._tasks.start(self._fail(current, error))
        try:
            async with asyncio.timeout(2 * self._averaging_s):
                reduced = await asyncio.shield(current.reduced)
        except TimeoutError:
            raise PeerGoneError("the round did not come together") from None
        self.compression.count(where.codec, size)
        return reduced.chunks

    async def _add_part(self, current: Round, peer: PeerId, made: Callable[[], Tensor]) -> None:
        """Make a part and, where it is the last one, the sum: one job, for each handing over costs as much as a small slice."""

        loop = asyncio.get_running_loop()

        def add() -> None:
            if current.complete:  # a part sent twice must not be added up twice
                return
            current.parts[peer] = made()
            current.complete = len(current.parts) == len(current.roster.entries)
            if current.complete:  # whoever sent the last part may have given up: the others get the sum
                loop.call_soon_threadsafe(current.made, reduce(current, self.compression))

        await self._arithmetic.run(Priority.CONTROL, add)
        current.progress_s = self._clock()

    async def _round_of(self, average_id: AverageId) -> Round:
        """The open round of this id; a part may come before its PROPOSE and waits for it."""
        try:
            async with asyncio.timeout(self._averaging_s):
                while self.open is None or self.open.roster.average_id != average_id:
                    if average_id in self._dead:
                        raise WrongStateError("this round is closed")
                    await self._opened.wait()
        except TimeoutError:
            raise WrongStateError("no such round is open") from None
        return self.open

    # Closing, adopting

    async def close(self, average_id: AverageId, reason: str = "the round was closed") -> None:
        """Parts of this id are dead for ever; the ledger is kept."""
        self._dead.append(average_id)
        current = self.open
        if current is None or current.roster.average_id != average_id:
            return
        self.open = None
        self.failed += 1
        LOG.debug("round closed", step=current.roster.step, leader=current.roster.leader, reason=reason)
        if current.roster.leader == self._state.record.peer:
            await self._count_missed(current)
        if not current.reduced.done():
            current.reduced.set_exception(PeerGoneError(reason))
            current.reduced.exception()  # seen, should nobody wait for it
        work = self._work
        if work is not None and work is not asyncio.current_task():
            work.cancel()
        await self._executor.run(Priority.CONTROL, self._state.close_round)
        self._host.announce()

    async def _count_missed(self, current: Round) -> None:
        """Hole 19: after some rounds that failed for want of a member, I leave it out of this step."""
        if current.refused:
            return
        absent = [peer for number, peer in enumerate(current.roster.peers) if number not in current.slices]
        self.missed.update(current.silent or [peer for peer in absent if peer != current.roster.leader])
        void = whom_to_void(current.roster, self.missed)
        if void is not None:
            LOG.warning("member left out of this step's rounds: it cannot reach another", member=void.peer, step=void.step)
            self.missed = Counter({void.peer: ROUNDS_BEFORE_VOID - 1})
            await self._executor.run(Priority.CONTROL, lambda: self._state.void(void))

    def abort(self, caller: PeerId, average_id: AverageId) -> None:
        """The leader's word closes a round early at every member; at the leader a member's word does, which counts as its absence."""
        current = self.open
        if current is None or current.roster.average_id != average_id:
            self._dead.append(average_id)
        elif current.roster.leader == caller:
            self._tasks.start(self.close(average_id))
        elif current.roster.leader == self._state.record.peer and current.roster.entry_of(caller) is not None:
            current.silent.append(caller)
            self._spread_abort(current.roster)
            self._tasks.start(self.close(average_id, f"{caller} gave the round up"))

    async def fetch(self, peer: PeerId, step: int) -> HeldAverage:
        """A mate's finished average of my stage, checked, with what it applied to a tied weight if it has finished the step.

        WrongStateError when it is not one for me.
        """
        received = await self._client.get_average(peer, self._state.record.stage, step, 2 * self._averaging_s)
        reason = why_not_adopt(self._state.record, step, received[0].lineage)
        if reason is not None:
            raise WrongStateError(reason)
        return await self._arithmetic.run(Priority.CONTROL, lambda: unpacked(received, self._state, step))

    async def fetch_tied(self, peer: PeerId, step: int, wanted: AverageId) -> Tensor:
        """Gradients of a tied weight by their id, checked: [num_tied] on the CPU."""
        dtype, length = self._state.accumulator.flat.dtype, self._state.accumulator.num_tied
        began_s = time.monotonic()
        chunks = await self._client.get_tied(peer, step, wanted, length * dtype.itemsize, 2 * self._averaging_s)
        self._spans.add(SpanKind.EXCHANGE, began_s, step, -1, peer, length * dtype.itemsize)
        return await self._arithmetic.run(Priority.CONTROL, lambda: finite(decode_flat(chunks, dtype)))

    async def get_average(self, stage: int, step: int) -> tuple[Average, bytes, Sequence[bytes]]:
        return await self._kept.get_average(stage, step)

    async def get_tied(self, step: int, wanted: AverageId) -> tuple[bytes, Sequence[bytes]]:
        return await self._kept.get_tied(step, wanted)

    def applied(self, held: HeldAverage) -> None:
        """Log an average for mates that missed it, when the torch thread has nothing better to do."""
        length = held.flat_sum.numel()
        self.missed.clear()
        self._own_errors.clear()
        self.num_applied += 1
        self._round_codec.applied(self._clock())
        if self.compression.allowed.is_lossy:  # on its own thread, before any sum of the next round
            self._tasks.start(self._arithmetic.run(Priority.CONTROL, lambda: self.compression.applied(held.roster.average_id, length)))
        self._host.applied(held.roster)
        if self._kept.hold(held):
            self._tasks.start(self._kept.write(held))

    def shut(self) -> None:
        self._tasks.cancel()
        if self._arithmetic is not self._executor:
            self._arithmetic.close()
