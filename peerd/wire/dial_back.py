"""Asks several peers whether they can reach this one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from peerd.errors import RemoteError
from peerd.link.links import Links
from peerd.policy.swarm.checkup import Dialled
from peerd.table.record import PeerId, RunId
from peerd.wire.checkup import CheckupClient

MAX_DIALLERS = 4


async def dial_backs(
    links: Links, run: RunId, peers: Sequence[PeerId], port: int, within_s: float | None = None, *, direct: bool = False
) -> list[Dialled]:
    """Ask several peers to dial back at `port`, that of `direct` connections or p2pd's, and return what they found.

    For a peer that does not answer within `within_s` the result is unknown.
    """
    client = CheckupClient(links, run)

    async def ask(peer: PeerId) -> Dialled:
        try:
            async with asyncio.timeout(within_s):
                answer = await client.dial_back(peer, port, direct=direct)
        except (RemoteError, TimeoutError):
            return Dialled(peer, "", None)
        # A peer that is asked through a relay does not see the address of this one.
        return Dialled(peer, answer.observed, answer.reached if answer.observed else None)

    return list(await asyncio.gather(*(ask(peer) for peer in peers[:MAX_DIALLERS])))
