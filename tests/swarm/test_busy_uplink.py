"""A re-dial beside tensors on a slow uplink goes first."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
import torch

from peerd.link.links import Links
from peerd.link.throttle import Throttle, Throttles
from peerd.link.traffic import Traffic
from peerd.swarm.liveness import Liveness
from peerd.swarm.membership import Membership
from peerd.swarm.signed import sign_record
from peerd.table.record import PeerRecord, Phase
from peerd.wire.clients import StageClient
from peerd.wire.door import Door
from peerd.wire.messages import Call
from peerd.wire.services import StageServicer, SwarmServicer
from peerd.wire.swarm_client import SwarmClient
from peerd.wire.tensors import encode
from tests.link.local_peers import serving
from tests.link.test_lanes import SlowReader
from tests.swarm.fixed_row import FixedRow
from tests.wire.callee import DOOR_PATIENCE_S, RUN, Listener, new_identity

UPLOAD = 100_000
TENSOR_BYTES = 1 << 20


@dataclass
class Pair:
    """A caller with a slow uplink, and the peer that it sends tensors to."""

    membership: Membership
    links: Links
    record: PeerRecord
    sent: list[asyncio.Task[object]] = field(default_factory=list)

    @property
    def liveness(self) -> Liveness:
        return Liveness(self.membership, SwarmClient(self.links, RUN), self.links.traffic.heard_s, self.links)

    def send(self, index: int) -> None:
        """Send a microbatch that keeps the uplink busy for ten seconds."""
        inputs, labels = encode(torch.zeros(TENSOR_BYTES // 4)), encode(torch.zeros(2, dtype=torch.int32))
        call = Call(call_id=bytes([index] * 16), stage=1, step=0, index=index, accumulate=frozenset({1}), inputs=inputs, labels=labels)
        sending = StageClient(self.links, RUN).backpropagate(self.record.peer, call, (), 30.0, lambda _stage, _peer: None)
        self.sent.append(asyncio.ensure_future(sending))


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    me, mate = new_identity(), new_identity()
    rows = [FixedRow(PeerRecord(peer=each.peer, incarnation=1, phase=Phase.ACCUMULATING)) for each in (me, mate)]
    members = [Membership(each, RUN, 60.0, row) for each, row in zip((me, mate), rows, strict=True)]
    record = PeerRecord(peer=mate.peer, incarnation=1, version=1, phase=Phase.ACCUMULATING)
    for membership in members:
        membership.publish()
    members[0].absorb([sign_record(record, mate, RUN).raw])
    reader, listener, door = SlowReader(), Listener(members[1]), Door(RUN, DOOR_PATIENCE_S, Traffic())
    for index in range(8):
        reader.reads[index].set()
    async with serving([StageServicer(door, reader), SwarmServicer(door, listener, listener)]) as served:
        throttle = Throttle()
        throttle.rate = UPLOAD
        made = Pair(members[0], served.links_of(me.peer, Throttles(upload=throttle)), record)
        yield made
        for task in made.sent:
            task.cancel()
        await asyncio.gather(*made.sent, return_exceptions=True)


async def probed(pair: Pair) -> int:
    """How many suspicions a failure report leads to while tensors leave."""
    liveness = pair.liveness
    for index in range(2):
        pair.send(index)
    async with asyncio.timeout(10):
        while pair.links.traffic.heard_s.get(pair.record.peer) is None:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)
    liveness.report_failure(pair.record.peer)
    await asyncio.wait_for(asyncio.gather(*liveness._probes.values()), 20)
    return liveness.faults_seen


async def test_a_re_dial_does_not_wait_behind_tensors(pair: Pair) -> None:
    asked_s = time.monotonic()
    assert await probed(pair) == 0
    assert time.monotonic() - asked_s < 2.0
    assert not any(task.done() for task in pair.sent), "the uplink was busy all the time"


async def test_a_peer_from_which_nothing_comes_is_suspected_at_once(pair: Pair) -> None:
    await pair.links.channel(pair.record.peer)
    pair.links._tunnel._throttles.download.rate = 1e-6
    pair.links.traffic.heard_s[pair.record.peer] = time.monotonic() - 0.1
    asked_s = time.monotonic()
    liveness = pair.liveness
    liveness.report_failure(pair.record.peer)
    await asyncio.gather(*liveness._probes.values())
    assert liveness.faults_seen == 1
    assert time.monotonic() - asked_s < 3.0
