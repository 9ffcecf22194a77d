"""Shows newcomers a table with nobody but itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peerd.daemon.peer import Peer
from peerd.swarm.gossip import Gossip
from peerd.table.record import PeerId, RawRecord

NOBODY = PeerId("")


async def lie(peer: Peer, _arguments: Mapping[str, Any]) -> None:
    def table(self: Gossip, _caller: PeerId, _after: PeerId) -> tuple[list[RawRecord], PeerId]:
        own = self._membership.raws.get(peer.membership.me)
        return [own.raw] if own is not None else [], NOBODY

    setattr(Gossip, "table", table)  # noqa: B010 - it is a lie
