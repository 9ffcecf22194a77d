"""Fast and fallible liveness, rule T5 (suspicion): a peer whose connection broke and that does not answer a re-dial is suspect.

Sure and slow liveness is the record's TTL, in table/. A wrong suspicion costs replays, never exactness, and makes the next
slower (policy/swarm/suspicion.py).
"""

from __future__ import annotations

import asyncio

import structlog

from peerd.background import start
from peerd.errors import PeerGoneError, RemoteError
from peerd.policy.swarm.reaching import is_out_of_reach
from peerd.swarm.clock import clock_s
from peerd.swarm.membership import Membership
from peerd.table.record import PeerId, PeerRecord, Reach
from peerd.wire.swarm_client import SwarmClient

REDIAL_TIMEOUT_S, RELAYED_REDIAL_TIMEOUT_S = 1.0, 4.0
"""Through a relay it takes half a dozen round trips, each of them longer."""
LOG = structlog.get_logger()


class Liveness:
    """Re-dials peers that failed and tells the swarm about those that do not answer."""

    def __init__(self, membership: Membership, client: SwarmClient) -> None:
        self._membership = membership
        self._client = client
        self._probes: dict[PeerId, asyncio.Task[None]] = {}
        self.faults_seen = 0
        """Peers that did not answer and had not said that they leave."""

    def report_failure(self, peer: PeerId) -> None:
        """A call to this peer failed or its connection broke: find out whether it is there."""
        live = self._membership.live()
        record = live.find(peer)
        if peer in self._probes or record is None or peer == live.me or is_out_of_reach(live.mine, record):
            return
        task = start(self._probe(peer, record.pair))
        self._probes[peer] = task
        task.add_done_callback(lambda _task: self._probes.pop(peer, None))

    async def follow(self, broken: asyncio.Queue[PeerId]) -> None:
        """Look after the peers in the queue, whose connections broke, until cancelled."""
        while True:
            self.report_failure(await broken.get())

    def close(self) -> None:
        for task in self._probes.values():
            task.cancel()

    async def _probe(self, peer: PeerId, pair: tuple[int, int]) -> None:
        own, record = self._membership.raws.get(self._membership.me), self._membership.find(peer)
        timeout_s = RELAYED_REDIAL_TIMEOUT_S if record is not None and record.reach is Reach.RELAYED else REDIAL_TIMEOUT_S
        try:
            patience_s = timeout_s * self._membership.patience.factor(clock_s())
            self._membership.absorb(await self._client.gossip(peer, [own.raw] if own else [], patience_s))
        except PeerGoneError:
            record = self._membership.find(peer)
            if record is not None and record.pair <= pair:
                self._suspect(record)
        except RemoteError:
            return  # whatever its answer is, it lives

    def _suspect(self, record: PeerRecord) -> None:
        if record.leaving:
            LOG.info("a peer has left", left=record.peer)
        else:
            LOG.warning("suspect: no answer to a re-dial", suspect=record.peer)
            self.faults_seen += 1
        self._membership.suspect(record)
