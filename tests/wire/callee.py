"""A daemon's own handlers behind the real services, for a run of two stages of which it serves the last; and whoever calls it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from peerd.averaging.rounds import Rounds
from peerd.policy.step.contributions import StageTally, Tally
from peerd.stage.calls import StageService
from peerd.stage.state import StageState
from peerd.swarm.identity import Identity
from peerd.swarm.membership import Membership
from peerd.swarm.signed import sign_record
from peerd.table.record import PeerId, PeerRecord, RawRecord, RunId
from peerd.wire.accounts import AccountsTold, AccountsWanted
from peerd.wire.clients import StageClient
from peerd.wire.door import Door
from peerd.wire.messages import Call, CallResult, Description
from peerd.wire.tensors import encode
from tests.link.local_peers import Served
from tests.paper_host import PaperHost
from tests.swarm.fixed_row import FixedRow
from tests.tiny_run import tiny_manifest

RUN = RunId("a" * 32)
BAD, STATE, BUSY, GONE = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAVAILABLE,
)
PATIENCE_S = 20.0
"""Longer than any answer takes on a machine that is full. A test that waits until patience ends has its own."""
DOOR_PATIENCE_S = 2.0
"""That of the daemon under attack, which says four times in it that it is at work."""
MANIFEST = tiny_manifest(num_stages=2, accumulate="float64", evaluation_fraction=0.1, evaluate_every_steps=2)
ROWS = (MANIFEST.train.microbatch_size, MANIFEST.train.sequence_length)
ALL = (1 << MANIFEST.train.microbatches_per_step) - 1


class Nowhere:
    """The last stage sends nothing on."""

    async def send(self, call: Call, on_forwarded: Callable[[int, PeerId], None]) -> CallResult:
        raise AssertionError("there is no later stage")

    def distrust(self, call: Call, peer: PeerId) -> None:
        raise AssertionError("there is no later stage")


class Unanswering:
    """The averaging client of a member whose mates never answer."""

    async def _ask(self, *_arguments: object) -> None:
        await asyncio.get_running_loop().create_future()

    give = take = beat = abort = _ask


class Listener:
    """The gossip handler without the gossip: merges what comes."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    def gossip(self, caller: PeerId, records: Sequence[RawRecord]) -> Sequence[RawRecord]:
        self._membership.absorb(records, caller)
        return ()

    def table(self, caller: PeerId, after: PeerId) -> tuple[Sequence[RawRecord], PeerId]:
        return (), PeerId("")

    def news(self, caller: PeerId, known: Collection[bytes]) -> Sequence[RawRecord]:
        return ()

    async def reaches(self, caller: PeerId, accused: PeerId) -> bool:
        return self._membership.find(accused) is not None

    def describe(self) -> Description:
        return Description((), "", 0.0)

    async def tallies(self) -> list[StageTally]:
        return [StageTally(stage=1, first_step=0, last_step=4, steps=5, tallies=(Tally(peer="abc", steps=5, microbatches=40),))]

    async def accounts(self, wanted: AccountsWanted) -> AccountsTold:
        return AccountsTold()


class StateRow(FixedRow):
    """The row of a peer that serves a stage."""

    state: StageState | None = None

    def record(self) -> PeerRecord | None:
        return self.state.record if self.state is not None else None


@dataclass(kw_only=True)
class Host(PaperHost):
    """Merges the records that come with calls."""

    membership: Membership

    def absorb(self, records: Sequence[RawRecord], sender: PeerId) -> None:
        self.membership.absorb(records, sender)


@dataclass(slots=True)
class Callee:
    """The daemon under attack, and a caller that it does not know yet."""

    served: Served
    door: Door
    membership: Membership
    state: StageState
    service: StageService
    rounds: Rounds
    host: Host
    caller: Identity
    servicers: list[Any]

    @property
    def me(self) -> PeerId:
        return self.membership.me

    def links(self, caller: Identity | None = None) -> Any:
        return self.served.links_of((caller or self.caller).peer)

    def call(self, **changes: Any) -> Call:
        chance = torch.Generator().manual_seed(1)
        sound = Call(
            call_id=os.urandom(16),
            stage=1,
            step=0,
            index=0,
            accumulate=frozenset({0, 1}),
            inputs=encode(torch.randn((*ROWS, MANIFEST.decoder.d_model), generator=chance)),
            labels=encode(torch.randint(0, MANIFEST.model.vocab_size, ROWS, generator=chance, dtype=torch.int32)),
        )
        return replace(sound, **changes)

    def forged(self) -> RawRecord:
        """The caller's own record, which another key signed."""
        return sign_record(PeerRecord(peer=self.caller.peer, incarnation=1, version=1), new_identity(), RUN).raw

    async def assert_lives(self) -> None:
        """Somebody else's sound microbatch is served as if nothing had been."""
        other = new_identity()
        result = await StageClient(self.links(other), RUN).backpropagate(
            other.peer, self.call(index=1), (), PATIENCE_S, lambda _stage, _peer: None
        )
        assert result.gradient is not None
        assert self.state.record.done == 0b10
        assert self.service.queue == 0


def new_identity() -> Identity:
    return Identity(Ed25519PrivateKey.generate())


async def assert_refused(callee: Callee, rpc: Any, status: grpc.StatusCode, words: str = "") -> None:
    """The status; that a broken message counts as refused and anything else does not; and that the daemon lives on."""
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await drain(rpc)
    assert refusal.value.code() is status
    assert words in (refusal.value.details() or "")
    assert callee.door.refused == (1 if status is BAD else 0)
    await callee.assert_lives()


async def drain(rpc: Any) -> None:
    async with asyncio.timeout(20):
        if hasattr(rpc, "__aiter__"):
            async for _ in rpc:
                continue
        else:
            await rpc
