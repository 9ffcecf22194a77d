"""Calls strangers, keys of which nothing proves that a daemon stands behind them: T8 (proof). `policy/swarm/meeting.py` decides whom."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from peerd.policy.swarm.meeting import Meetings
from peerd.policy.swarm.spreading import TURNS_PER_PERIOD
from peerd.swarm.clock import clock_s
from peerd.swarm.liveness import Liveness
from peerd.swarm.membership import Membership
from peerd.table.record import PeerId, PeerRecord


class Meeting:
    """Tells each stranger of this peer. One that answers counts from then on."""

    def __init__(self, membership: Membership, liveness: Liveness, drop: Callable[[PeerId], Awaitable[None]], period_s: float) -> None:
        """`drop` closes the channels to a peer: gRPC dials anew each second, as long as there is one."""
        self._membership = membership
        self._liveness = liveness
        self._drop = drop
        self._turn_s = period_s / TURNS_PER_PERIOD
        self._meetings = Meetings(period_s=period_s, life_s=membership.view.ttl_s)
        self._random = random.Random(membership.me)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._turn_s)
            if self._membership.is_quiet:
                continue
            strangers = {record.peer: record for record in self._membership.strangers()}
            chosen = self._meetings.whom(strangers, clock_s(), self._random.random())
            await asyncio.gather(*(self._meet(strangers[peer]) for peer in chosen))

    async def _meet(self, record: PeerRecord) -> None:
        if await self._liveness.answers(record):
            self._membership.reached(record.peer)
        else:
            self._meetings.failed(record.peer, clock_s())
            if not self._membership.view.is_proven(record.peer):  # it may have called meanwhile
                await self._drop(record.peer)
