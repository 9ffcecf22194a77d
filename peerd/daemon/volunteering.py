"""Decides whether this peer relays for others: if it volunteers, as long as nothing prevents it."""

from __future__ import annotations

import asyncio
import datetime

import structlog

from peerd.control.reach import ReachInfo, RelayInfo
from peerd.daemon.peer import Peer
from peerd.link.relay import Relay
from peerd.policy.swarm.relaying import VolunteerState, why_not_relay

LOOK_PERIOD_S = 1.0
LOG = structlog.get_logger()


class Volunteering:
    """Runs while this peer is in the swarm."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._day, self._before_today = "", 0

    async def run(self) -> None:
        if not self._peer.settings.relay:
            return
        while True:
            await self.look()
            await asyncio.sleep(LOOK_PERIOD_S)

    async def look(self) -> None:
        """Decide anew, and announce a change. Peers that were banned since the last look are dropped."""
        peer, relay = self._peer, self._peer.network.relay
        relay.drop_banned()
        standing = VolunteerState(
            limits=peer.governor.limits,
            pause=peer.governor.pause,
            leaving=peer.seat.leaving,
            reach=peer.reachability.reach,
            relayed_today=self._relayed_today(relay),
        )
        off = why_not_relay(standing, relay.bounds)
        if off == relay.off:
            return
        is_news = bool(off) != bool(relay.off)
        await relay.switch(off)
        if is_news:
            LOG.info("relaying", on=not off, reason=off)
            peer.announce()

    def _relayed_today(self, relay: Relay) -> int:
        today = datetime.datetime.now().strftime("%Y-%m-%d")  # noqa: DTZ005 - the owner's own day
        if today != self._day:
            self._day, self._before_today = today, relay.carried.total
        return relay.carried.total - self._before_today


def reach_info(peer: Peer) -> ReachInfo:
    found = peer.reachability
    return {"state": found.reach.name.lower(), "reason": found.reason, "relays": list(found.relays)}


def relay_info(peer: Peer) -> RelayInfo:
    relay = peer.network.relay
    return {
        "volunteers": peer.settings.relay,
        "off": relay.off,
        "reservations": len(relay.reserved),
        "circuits": len(relay.circuits),
        "bytes": relay.carried.total,
    }
