"""Compares this machine's wall clock with those of other peers: once when it enters, and now and then while it takes part."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence

import structlog

from peerd.errors import ClockError, RemoteError
from peerd.link.links import Links
from peerd.policy.swarm.clocks import AGREED, MOST_ASKED, ClockOffset, Whose, judge_clocks
from peerd.swarm.membership import Membership
from peerd.table.record import PeerId, RunId
from peerd.wire.swarm_client import SwarmClient

ASK_TIMEOUT_S = 5.0
PERIODS_BETWEEN = 12
"""Announce periods from one comparison to the next."""
LOG = structlog.get_logger()


async def ask_clocks(links: Links, peers: Sequence[PeerId]) -> list[ClockOffset]:
    """The offsets of those that answer."""
    client = SwarmClient(links, RunId(""))

    async def ask(peer: PeerId) -> ClockOffset | None:
        asked_s = time.monotonic()
        try:
            told_s = (await client.describe(peer, ASK_TIMEOUT_S)).clock_s
        except RemoteError:
            return None
        return ClockOffset.told(peer, told_s, time.time(), time.monotonic() - asked_s)

    return [offset for offset in await asyncio.gather(*map(ask, peers)) if offset is not None]


async def compare_clocks(links: Links, visited: Sequence[ClockOffset], membership: Membership) -> None:
    """Judge the clock of a contact, the last of those `visited`. ClockError if it differs, and its peers do not say that it is wrong."""
    contact, verdict = visited[-1], judge_clocks(visited)
    if contact.is_off:
        known = {membership.me, *(each.peer for each in visited)}
        others = [r.peer for r in membership.live().records if r.addresses and r.peer not in known]
        verdict = judge_clocks([*visited, *await ask_clocks(links, others[:MOST_ASKED])])
        if verdict.whose is not Whose.THEIRS:
            raise ClockError(verdict.title, verdict.remedy)
    if verdict is not AGREED:
        LOG.warning("a clock is off", found=verdict.title, remedy=verdict.remedy)


class ClockWatch:
    """Keeps the verdict for `health`."""

    def __init__(self, links: Links, membership: Membership, period_s: float) -> None:
        self._links = links
        self._membership = membership
        self._pause_s = PERIODS_BETWEEN * period_s
        self.verdict = AGREED

    async def run(self) -> None:
        while True:
            others = [record.peer for record in self._membership.live().records if record.peer != self._membership.me]
            asked = random.sample(others, min(MOST_ASKED, len(others)))
            verdict = judge_clocks(await ask_clocks(self._links, asked))
            if verdict.whose not in (Whose.NOBODYS, self.verdict.whose):
                LOG.warning("a clock is off", found=verdict.title, remedy=verdict.remedy)
            self.verdict = verdict
            await asyncio.sleep(self._pause_s if others else self._pause_s / PERIODS_BETWEEN)
