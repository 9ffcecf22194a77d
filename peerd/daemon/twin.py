"""Whether another daemon runs under this peer's identity: from a home that was copied with its key."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from peerd.config.paths import Home
from peerd.errors import BadMessageError, IdentityInUseError, RemoteError
from peerd.link.links import Links
from peerd.swarm.membership import Membership
from peerd.swarm.signed import peek_record, read_record
from peerd.table.record import PeerId, PeerRecord
from peerd.table.view import TTL_PERIODS
from peerd.wire.swarm_client import SwarmClient

ASK_TIMEOUT_S = 10.0
MOST_ASKED = 4
SETTLES_PERIODS, RISES_PERIODS = 1.0, 1.5
"""Until all have heard what a peer said last, and until one that lives has said more."""


def refuse_own_address(peers: Sequence[PeerId], me: PeerId, home: Home) -> None:
    """IdentityInUseError where every address to join by is one of this very identity."""
    if peers and all(peer == me for peer in peers):
        raise _twin("the address to join by is of this home's own identity", home)


async def refuse_twin(links: Links, membership: Membership, addresses: Sequence[str], home: Home) -> None:
    """IdentityInUseError where a daemon with this identity goes on telling others new things, while this one is silent.

    A record with one of the `addresses`, which are this daemon's, is that of the daemon that ran here before.
    """
    seen = await _seen_by_others(links, membership)
    if seen is None or seen.leaving or _outside(seen.addresses) & _outside(addresses):
        return
    period_s = membership.view.ttl_s / TTL_PERIODS * seen.periods
    await asyncio.sleep(SETTLES_PERIODS * period_s)
    settled = await _seen_by_others(links, membership)
    await asyncio.sleep(RISES_PERIODS * period_s)
    risen = await _seen_by_others(links, membership)
    if settled is not None and risen is not None and risen.pair > settled.pair:
        where = next(iter(risen.addresses), "an address that is not known")
        raise _twin(f"another daemon runs with this identity, at {where}", home)


async def _seen_by_others(links: Links, membership: Membership) -> PeerRecord | None:
    """This peer's own record, as the first peer that answers has it."""
    client, me = SwarmClient(links, membership.run), membership.me
    for other in [record.peer for record in membership.live().records if record.peer != me][:MOST_ASKED]:
        try:
            mine = [raw async for page in client.table(other, ASK_TIMEOUT_S) for raw in page if peek_record(raw[0])[0] == me]
            return read_record(*mine[0], membership.run).record if mine else None
        except (RemoteError, BadMessageError):
            continue
    return None


def _outside(addresses: Sequence[str]) -> set[str]:
    """Without those that every machine has; a peer that has no other is one of this machine."""
    return {address for address in addresses if not address.startswith("/ip4/127.")} or set(addresses)


def _twin(what: str, home: Home) -> IdentityInUseError:
    remedy = f"stop the other daemon, or, if this home was copied, delete {home.identity} and join again at another peer's address"
    return IdentityInUseError(what, remedy)
