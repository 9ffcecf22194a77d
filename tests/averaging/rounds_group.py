"""A stage's peers in one process: each the real Rounds over a real StageState, without a wire between them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import torch

from peerd.averaging.log import AverageLog
from peerd.averaging.rounds import Rounds
from peerd.config.manifest import Manifest, WireConfig
from peerd.errors import BadMessageError, PeerGoneError
from peerd.policy.step.roster import Roster, entry_of
from peerd.stage.executor import Executor
from peerd.stage.state import StageState
from peerd.table.record import AverageId, PeerId, PeerRecord, Phase
from peerd.table.view import LiveView
from peerd.wire.chunk_streams import Offer
from peerd.wire.chunks import CutFile
from peerd.wire.clients import AveragingClient
from peerd.wire.deliveries import Lending
from peerd.wire.messages import Average, Beat, Frame, ProposalAnswer, Verified
from tests.paper_host import PaperHost
from tests.tiny_run import replace_train, tiny_manifest
from tests.wire.lent import Lent

AVERAGING_S = 20.0
MICROBATCHES = 6
MANIFEST = tiny_manifest(microbatches_per_step=MICROBATCHES, accumulate="float64")


def compressed(codec: str) -> Manifest:
    """The run with this codec for averages; one that needs local steps has those."""
    is_local = codec.startswith("sparse")
    return replace(replace_train(MANIFEST, local_batch=1 if is_local else 0), wire=WireConfig(weight_gradients=codec))


Fault = Callable[[str, PeerId, PeerId], Awaitable[None]]
"""Called with the kind of message, its sender and its receiver before it is handed over; may wait or raise.

Kinds are the calls, and "chunk" and "taken": a chunk that goes over a call of its sender, or of its receiver.
"""


async def no_fault(_kind: str, _sender: PeerId, _receiver: PeerId) -> None:
    return


Forge = Callable[[PeerId, PeerId, Frame], Frame]
"""Called with the sender of a chunk, its receiver and the chunk: what arrives in its place."""


def no_forge(_sender: PeerId, _receiver: PeerId, frame: Frame) -> Frame:
    return frame


@dataclass
class Member:
    peer: PeerId
    state: StageState
    executor: Executor
    rounds: Rounds
    host: PaperHost

    @property
    def average(self) -> torch.Tensor:
        assert self.state.average is not None
        return self.state.average.flat_sum


@dataclass
class Group:
    """Members of one stage by peer, and what goes wrong between them."""

    members: dict[PeerId, Member] = field(default_factory=dict)
    fault: Fault = no_fault
    forge: Forge = no_forge
    lend: Callable[[PeerId, CutFile], CutFile] = lambda _peer, file: file
    """What a member sends in place of the chunks of an average."""
    chunk_s: dict[PeerId, float] = field(default_factory=dict)
    """Of members whose chunks arrive slowly: the seconds that each takes."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def roster(self, attempt: int = 0, leader: PeerId | None = None) -> Roster:
        entries = tuple(sorted(entry_of(member.state.record) for member in self.members.values()))
        return Roster(0, 0, attempt, leader or entries[0].peer, entries)

    def view(self, me: PeerId) -> LiveView:
        """The table, if everybody has heard everything."""
        return LiveView(me=me, records=tuple(member.state.record for member in self.members.values()))

    @property
    def failures(self) -> list[tuple[PeerId, PeerId]]:
        """The peer that noticed, and the one that did not answer."""
        return [(peer, failed) for peer, member in self.members.items() for failed in member.host.failed]

    def leader(self, roster: Roster) -> Member:
        return self.members[roster.leader]

    async def settled(self, phase: Phase) -> None:
        """Until every member is in the phase."""
        await self.until(lambda: all(member.state.record.phase is phase for member in self.members.values()))

    async def until(self, holds: Callable[[], bool], within_s: float = 20.0) -> None:
        async with asyncio.timeout(within_s):
            while not holds():
                self.changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await self.changed.wait()


@contextlib.contextmanager
def bugs_at_the_callee() -> Iterator[None]:
    """What the wire makes of a bug at the callee."""
    try:
        yield
    except TypeError as error:
        raise PeerGoneError(repr(error)) from None


def sized(frame: Frame, size_of: Callable[[Frame], int]) -> Frame:
    """A chunk as the wire hands it over."""
    if size_of(frame) != frame.num_bytes:
        raise BadMessageError("the chunks do not add up to the size in the header")
    return frame


@dataclass
class Client:
    """AveragingClient without a wire."""

    group: Group
    me: PeerId

    async def propose(self, peer: PeerId, roster: Roster, timeout_s: float) -> ProposalAnswer:
        await self._deliver("propose", peer)
        with bugs_at_the_callee():
            async with asyncio.timeout(timeout_s):
                return await self.group.members[peer].rounds.propose(self.me, roster)

    async def give(self, peer: PeerId, average_id: AverageId, frames: AsyncGenerator[Frame], told: Callable[[Verified], None]) -> None:
        await self._deliver("give", peer)
        bugs: list[Exception] = []

        async def arriving(size_of: Callable[[Frame], int]) -> AsyncGenerator[Frame]:
            try:
                async for frame in frames:
                    await self._deliver("chunk", peer)
                    await asyncio.sleep(self.group.chunk_s.get(self.me, 0.0))
                    yield sized(self.group.forge(self.me, peer, frame), size_of)
            except TypeError as error:
                bugs.append(error)
                raise PeerGoneError("the caller's stream broke off") from None

        try:
            with bugs_at_the_callee():
                await self.group.members[peer].rounds.give(self.me, average_id, arriving, told)
        finally:
            if bugs:
                raise bugs[0]

    async def take(
        self,
        peer: PeerId,
        average_id: AverageId,
        words: AsyncGenerator[Verified],
        size_of: Callable[[Frame], int],
        takes: Callable[[Frame], Awaitable[None]],
    ) -> None:
        await self._deliver("take", peer)
        frames = self.group.members[peer].rounds.take(self.me, average_id, words)
        async with contextlib.aclosing(frames):
            while True:
                with bugs_at_the_callee():
                    frame = await anext(frames, None)
                if frame is None:
                    return
                await self.group.fault("taken", peer, self.me)
                await asyncio.sleep(self.group.chunk_s.get(peer, 0.0))
                await takes(sized(self.group.forge(peer, self.me, frame), size_of))

    async def beat(self, peer: PeerId, beat: Beat, timeout_s: float) -> Beat:
        try:
            async with asyncio.timeout(timeout_s):
                await self._deliver("beat", peer)
        except TimeoutError:
            raise PeerGoneError("no answer in time") from None
        return self.group.members[peer].rounds.beat(self.me, beat)

    async def abort(self, peer: PeerId, average_id: AverageId, left_out: PeerId, reason: str, _timeout_s: float) -> None:
        await self._deliver("abort", peer)
        self.group.members[peer].rounds.abort(self.me, average_id, left_out, reason)

    @contextlib.asynccontextmanager
    async def open_average(
        self, peer: PeerId, stage: int, step: int, section: int | None, patience_s: float
    ) -> AsyncIterator[Offer[Average]]:
        await self._deliver("get_average", peer)
        average, file, _ = await self.group.members[peer].rounds.kept.get_average(stage, step, section)
        with Lending(self.group.lend(peer, file), patience_s) as lending:
            yield Lent(average, lending)

    async def _deliver(self, kind: str, peer: PeerId) -> None:
        await self.group.fault(kind, self.me, peer)


def make_member(group: Group, peer: PeerId, folder: Path, manifest: Manifest, averaging_s: float = AVERAGING_S) -> Member:
    record = PeerRecord(peer=peer, incarnation=1)
    state = StageState(manifest, record, torch.device("cpu"), lambda: group.view(peer))
    state.own = None  # the sums are made up, and no updates of the parameters
    state.serve()
    executor, log = Executor(), AverageLog(folder, torch.float64)
    loop, host = asyncio.get_running_loop(), PaperHost(group.changed, key=peer.encode())
    rounds = Rounds(state, executor, cast(AveragingClient, Client(group, peer)), log, averaging_s, loop.time, host)
    return Member(peer, state, executor, rounds, host)


def gradient_of(index: int, length: int) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(index))


def fill(state: StageState, held: Sequence[int], factor: float = 1.0) -> None:
    """Accumulate made-up float32 gradients of these microbatches, times a factor."""
    for index in held:
        state.accumulator.flat.add_(factor * gradient_of(index, state.accumulator.flat.numel()))
        state.record = replace(state.record, done=state.record.done | 1 << index)


def whole_sum(member: Member) -> torch.Tensor:
    total = torch.zeros_like(member.state.accumulator.flat)
    for index in range(MICROBATCHES):
        total += gradient_of(index, total.numel())
    return total
