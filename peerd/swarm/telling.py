"""Passes on at once what the organiser has signed about peers, and what proves that a peer lies; gossip brings it to those that miss it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from peerd.background import keep, start
from peerd.errors import RemoteError
from peerd.link.links import with_time_for
from peerd.swarm.membership import Membership
from peerd.table.record import PeerId
from peerd.wire.swarm_client import SwarmClient

TELL_TIMEOUT_S = 3.0
CALM_GAP_S = 0.5
"""Shortest time between two proofs that are passed on."""


class Telling:
    """Tells what others must hear besides records."""

    def __init__(self, membership: Membership, client: SwarmClient, whom: Callable[[], Collection[PeerId]], period_s: float) -> None:
        """`whom` chooses the peers to tell: all, or in a large swarm some, which tell others."""
        self._membership = membership
        self._client = client
        self._whom = whom
        self._period_s = period_s

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for part in (self._spread_proofs, self._keep_access):
                group.create_task(keep(part))

    async def _spread_proofs(self) -> None:
        """Pass on what proves that a peer lies, T7 (contradiction). It hears that, too: its home may have been copied."""
        while True:
            peer, proof = await self._membership.contradictions.untold.get()
            for other in {peer, *self._whom()}:
                start(self._tell(self._client.tell(other, proof, TELL_TIMEOUT_S)))
            await asyncio.sleep(CALM_GAP_S)

    async def _keep_access(self) -> None:
        """T9 (access): let those count for nothing who may not take part, and pass a new list on. They hear it, too."""
        access = self._membership.access
        while True:
            if access.version == access.told:
                await access.changed(self._period_s)
            if access.version == access.told and not access.by_invitation:
                continue
            shut_out = self._membership.drop_shut_out()
            if access.version != access.told:
                access.told = access.version
                within_s = with_time_for(TELL_TIMEOUT_S, sum(map(len, access.raw)))
                for other in {*shut_out, *self._whom()}:
                    start(self._tell(self._client.tell_list(other, access.raw, within_s)))

    async def _tell(self, message: Coroutine[Any, Any, Any]) -> None:
        with contextlib.suppress(RemoteError):  # others tell it as well
            await message
