"""Strangers are called, and count once they have answered."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from peerd.errors import PeerGoneError
from peerd.swarm.clock import clock_s
from peerd.swarm.identity import Identity
from peerd.swarm.liveness import Lines, Liveness
from peerd.swarm.meeting import Meeting
from peerd.swarm.membership import Membership
from peerd.swarm.signed import sign_record
from peerd.table.record import PeerId, PeerRecord, Phase, RawRecord, RunId
from peerd.wire.swarm_client import SwarmClient
from tests.swarm.fixed_row import FixedRow

RUN = RunId("a" * 32)
PERIOD_S = 0.01
ME, MATE, THIRD, NEWCOMER, GHOST = (Identity(Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)) for number in range(5))


@dataclass
class Client:
    """Only the newcomer is there."""

    called: list[PeerId] = field(default_factory=list)
    dropped: list[PeerId] = field(default_factory=list)
    has_dropped: asyncio.Event = field(default_factory=asyncio.Event)

    async def gossip(self, peer: PeerId, records: Sequence[RawRecord], _timeout_s: float) -> tuple[RawRecord, ...]:
        assert len(records) == 1
        self.called.append(peer)
        if peer != NEWCOMER.peer:
            raise PeerGoneError("nobody there")
        return ()

    async def drop(self, peer: PeerId) -> None:
        self.dropped.append(peer)
        self.has_dropped.set()


def row_of(other: Identity) -> RawRecord:
    return sign_record(PeerRecord(peer=other.peer, incarnation=1, version=1, phase=Phase.ACCUMULATING), other, RUN).raw


async def test_hole_37_strangers_are_called_and_the_one_that_answers_counts_and_no_channel_to_another_one_stays() -> None:
    row = FixedRow(PeerRecord(peer=ME.peer, incarnation=1, phase=Phase.ACCUMULATING))
    membership, client = Membership(ME, RUN, ttl_s=60.0, row=row), Client()
    membership.publish()
    membership.absorb([row_of(other) for other in (MATE, THIRD, NEWCOMER, GHOST)])
    for known in (MATE, THIRD):
        membership.view.prove(known.peer, clock_s() - 60.0)
    liveness = Liveness(membership, cast(SwarmClient, client), {}, cast(Lines, None))
    meeting = asyncio.ensure_future(Meeting(membership, liveness, client.drop, PERIOD_S).run())
    await asyncio.wait_for(client.has_dropped.wait(), 20.0)
    await asyncio.sleep(0)
    meeting.cancel()
    assert {record.peer for record in membership.live().records} == {ME.peer, MATE.peer, THIRD.peer, NEWCOMER.peer}
    assert [record.peer for record in membership.strangers()] == [GHOST.peer]
    assert set(client.called) == {NEWCOMER.peer, GHOST.peer}
    assert set(client.dropped) == {GHOST.peer}
