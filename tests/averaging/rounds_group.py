"""A stage's peers in one process: each the real Rounds over a real StageState, without a wire between them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import torch

from peerd.averaging.log import AverageLog
from peerd.averaging.rounds import Rounds
from peerd.config.manifest import Manifest
from peerd.errors import PeerGoneError
from peerd.link.links import Bytes
from peerd.policy.step.roster import Roster, entry_of
from peerd.stage.executor import Executor
from peerd.stage.state import StageState
from peerd.table.record import AverageId, PeerId, PeerRecord, Phase, RawRecord
from peerd.wire.clients import AveragingClient
from peerd.wire.messages import Average, Part
from tests.paper_host import PaperHost
from tests.strategies import view_of
from tests.tiny_run import tiny_manifest

AVERAGING_S = 20.0
PIECE_S = 0.1
MICROBATCHES = 6
MANIFEST = tiny_manifest(microbatches_per_step=MICROBATCHES, accumulate="float64")
Fault = Callable[[str, PeerId, PeerId], Awaitable[None]]
"""Called with the kind of message, its sender and its receiver before it is handed over; may wait or raise."""


async def no_fault(_kind: str, _sender: PeerId, _receiver: PeerId) -> None:
    return


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
    pieces: dict[PeerId, list[int]] = field(default_factory=dict)
    """Of members whose parts arrive slowly: the bytes of each piece, PIECE_S apart."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def roster(self, attempt: int = 0, leader: PeerId | None = None) -> Roster:
        entries = tuple(sorted(entry_of(member.state.record) for member in self.members.values()))
        return Roster(0, 0, attempt, leader or entries[0].peer, entries)

    @property
    def failures(self) -> list[tuple[PeerId, PeerId]]:
        """The peer that noticed, and the one that did not answer."""
        return [(peer, failed) for peer, member in self.members.items() for failed in member.host.failed]

    def leader(self, roster: Roster) -> Member:
        return self.members[roster.leader]

    async def settled(self, phase: Phase) -> None:
        """Until every member is in the phase."""
        async with asyncio.timeout(20):
            while any(member.state.record.phase is not phase for member in self.members.values()):
                self.changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await self.changed.wait()


@dataclass
class Client:
    """AveragingClient without a wire."""

    group: Group
    me: PeerId

    async def propose(self, peer: PeerId, roster: Roster, timeout_s: float) -> tuple[bool, str, RawRecord]:
        await self._deliver("propose", peer)
        try:
            async with asyncio.timeout(timeout_s):
                return await self.group.members[peer].rounds.propose(self.me, roster)
        except TypeError as error:  # what the wire makes of a bug at the callee
            raise PeerGoneError(repr(error)) from None

    async def reduce(self, peer: PeerId, part: Part, chunks: Sequence[memoryview], *_: object) -> tuple[memoryview, ...]:
        await self._deliver("reduce", peer)

        async def receive(told: Callable[[int], None], _num_streams: int) -> tuple[memoryview, ...]:
            for num_bytes in self.group.pieces.get(self.me, ()):
                await asyncio.sleep(PIECE_S)
                told(num_bytes)
            return tuple(chunks)

        header = Part(part.average_id, part.slice_index, part.ledger, part.num_bytes)
        return tuple(await self.group.members[peer].rounds.reduce(self.me, header, receive))

    async def abort(self, peer: PeerId, average_id: AverageId, _timeout_s: float) -> None:
        await self._deliver("abort", peer)
        self.group.members[peer].rounds.abort(self.me, average_id)

    async def get_average(self, peer: PeerId, stage: int, step: int, *_: object) -> tuple[Average, bytes, Sequence[Bytes]]:
        await self._deliver("get_average", peer)
        return await self.group.members[peer].rounds.kept.get_average(stage, step)

    async def _deliver(self, kind: str, peer: PeerId) -> None:
        await self.group.fault(kind, self.me, peer)


def make_member(group: Group, peer: PeerId, folder: Path, manifest: Manifest) -> Member:
    record = PeerRecord(peer=peer, incarnation=1)
    state = StageState(manifest, record, torch.device("cpu"), lambda: view_of(record))
    state.serve()
    executor, log = Executor(), AverageLog(folder, torch.float64)
    loop, host = asyncio.get_running_loop(), PaperHost(group.changed)
    rounds = Rounds(state, executor, cast(AveragingClient, Client(group, peer)), log, AVERAGING_S, loop.time, host)
    return Member(peer, state, executor, rounds, host)


def gradient_of(index: int, length: int) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(index))


def fill(state: StageState, held: Sequence[int]) -> None:
    """Accumulate made-up float32 gradients of these microbatches."""
    for index in held:
        state.accumulator.flat.add_(gradient_of(index, state.accumulator.flat.numel()))
        state.record = replace(state.record, done=state.record.done | 1 << index)


def whole_sum(member: Member) -> torch.Tensor:
    total = torch.zeros_like(member.state.accumulator.flat)
    for index in range(MICROBATCHES):
        total += gradient_of(index, total.numel())
    return total
