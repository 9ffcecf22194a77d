"""Comparing clocks with peers whose answers come through real gRPC."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from peerd.daemon import clocks
from peerd.daemon.clocks import ask_clocks
from peerd.link.traffic import Traffic
from peerd.policy.swarm.clocks import Whose, judge_clocks
from peerd.swarm.membership import Membership
from peerd.wire.door import Door
from peerd.wire.messages import Description
from peerd.wire.services import SwarmServicer
from tests.link.local_peers import serving
from tests.wire.callee import DOOR_PATIENCE_S, RUN, Listener, new_identity

DAY_S = 86400.0


@pytest.mark.parametrize("by_s", [-DAY_S, DAY_S])
async def test_a_clock_that_is_set_while_a_peer_is_asked_is_off_by_what_it_was_set_by(by_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    off_s = 0.0

    class Peer(Listener):
        def describe(self) -> Description:
            nonlocal off_s
            off_s = by_s
            return Description((), "", time.time())

    mine = SimpleNamespace(time=lambda: time.time() + off_s, monotonic=time.monotonic)
    monkeypatch.setattr(clocks, "time", mine)
    peer = Peer(Membership(new_identity(), RUN, ttl_s=30.0))
    async with serving([SwarmServicer(Door(RUN, DOOR_PATIENCE_S, Traffic()), peer, peer)]) as served:
        me = new_identity().peer
        (offset,) = await ask_clocks(served.links_of(me), [me])
    assert abs(offset.offset_s - by_s) < 2.0
    assert judge_clocks([offset]).whose is Whose.UNKNOWN
