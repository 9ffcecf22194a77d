"""Notes from the table: the progress of the run, and addresses at which other peers can be met again."""

from __future__ import annotations

import asyncio

from peerd.config.manifest import TrainConfig
from peerd.policy.swarm.health import Progress, advance, resumed
from peerd.policy.swarm.pace import Mark, still_since
from peerd.swarm.clock import clock_s
from peerd.swarm.identity import LOCAL_STATE, LocalState
from peerd.swarm.membership import Membership
from peerd.table.record import PeerId
from peerd.unwritten import UNWRITTEN

NOTES_PERIOD_S = 1.0
RETRY_PERIOD_S = 10.0
"""Until what could not be written is tried again."""


class Notes:
    """Runs while this peer is in the swarm."""

    def __init__(self, membership: Membership, local: LocalState, train: TrainConfig) -> None:
        self._membership = membership
        self._local = local
        self._train = train
        self.progress = self._advanced(None)
        self._still: dict[PeerId, tuple[Mark, float]] = {}

    def still_s(self, peer: PeerId) -> float:
        """How long the work of a peer has looked the same; 0 if it is not known here."""
        return max(0.0, clock_s() - self._still[peer][1]) if peer in self._still else 0.0

    def begin_anew(self) -> None:
        """This peer comes back after a pause, during which it saw nothing."""
        self.progress, self._still = resumed(self.progress, clock_s()), {}

    async def run(self) -> None:
        """Note what changed. Addresses go to disk soon: all peers may be killed at any moment, and then nobody knows where to meet."""
        noted, remembered, tried_s = None, None, clock_s()
        while True:
            live = self._membership.live()
            if live is not noted:
                self.progress = self._advanced(self.progress)
                self._still = still_since(self._still, live, clock_s())
                noted, addresses = live, self._addresses_met()
                if addresses != remembered or (LOCAL_STATE in UNWRITTEN and clock_s() - tried_s > RETRY_PERIOD_S):
                    await asyncio.to_thread(self._local.remember_peers, addresses)
                    remembered, tried_s = addresses, clock_s()
            await asyncio.sleep(NOTES_PERIOD_S)

    def _advanced(self, before: Progress | None) -> Progress:
        return advance(before, self._membership.live(), self._train.num_stages, self._train.microbatches_per_step, clock_s())

    async def remember_peers(self) -> None:
        """Write the addresses to disk at which this peer can come back without being given one."""
        await asyncio.to_thread(self._local.remember_peers, self._addresses_met())

    def _addresses_met(self) -> list[str]:
        others = [r for r in self._membership.live().records if r.peer != self._membership.me and r.addresses]
        # The second address too: a router may not route peers behind it to its own public address.
        second = {r.peer: [address for address in r.addresses[1:2] if not address.startswith("/ip4/127.")] for r in others}
        return [address for r in others for address in (r.addresses[0], *second[r.peer])]
