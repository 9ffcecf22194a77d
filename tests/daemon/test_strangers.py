"""Of a peer that called once and never got into the table nothing stays."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import cast

from peerd.daemon.peer import FORGET_AFTER_TTLS, Peer
from peerd.link.traffic import Traffic, Way
from peerd.table.record import PeerId

TTL_S = 15.0
MEMBER, STRANGER, RECENT = PeerId("member"), PeerId("stranger"), PeerId("recent")


async def test_a_stranger_is_forgotten_and_a_member_is_not() -> None:
    traffic, now_s = Traffic(), time.monotonic()
    for peer in (MEMBER, STRANGER, RECENT):
        traffic.heard_s[peer] = now_s
        with traffic.receiving((peer, Way.TUNNEL), 1):
            pass

    async def forget(peer: PeerId) -> None:
        traffic.forget(peer)

    traffic.heard_s[RECENT] += FORGET_AFTER_TTLS * TTL_S
    view = SimpleNamespace(sightings={MEMBER: None}, ttl_s=TTL_S)
    network = SimpleNamespace(links=SimpleNamespace(traffic=traffic), forget=forget)
    daemon = SimpleNamespace(membership=SimpleNamespace(view=view), network=network)
    await Peer._forget_strangers(cast(Peer, daemon), now_s + FORGET_AFTER_TTLS * TTL_S + 1)
    assert set(traffic.heard_s) == {MEMBER, RECENT}
    assert {caller for caller, _ in traffic.incoming} == {MEMBER, RECENT}
