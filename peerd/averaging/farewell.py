"""Tells the other members of a round that this one has left it."""

from __future__ import annotations

from peerd.averaging.surroundings import Surroundings
from peerd.background import Tasks
from peerd.errors import RemoteError
from peerd.policy.step.roster import Roster
from peerd.table.record import PeerId


class Farewell:
    """Its calls go on in the background. Whom they do not reach hears it from the judges, or gives the round up itself."""

    def __init__(self, around: Surroundings, tasks: Tasks) -> None:
        self._around = around
        self._tasks = tasks

    def tell(self, roster: Roster, named: str = "", reason: str = "") -> None:
        """Tell all others that this peer has left the round, and whom a judge names."""
        for peer in roster.peers:
            if peer != self._around.me:
                self._tasks.start(self._abort_at(peer, roster, named, reason))

    async def _abort_at(self, peer: PeerId, roster: Roster, named: str, reason: str) -> None:
        try:
            await self._around.client.abort(peer, roster.average_id, named, reason, self._around.averaging_s / 4)
        except RemoteError:
            return
