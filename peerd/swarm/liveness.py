"""Finds dead peers fast but fallibly, rule T5 (suspicion): a peer is suspect if its connection broke and it does not answer a re-dial.

A re-dial and its answer may wait behind tensors on a busy line. So a peer from which any bytes came since the question was asked lives,
and is asked again. That is proven by what arrives, and ends when nothing does.
Sure and slow liveness is the record's TTL, in table/. A wrong suspicion costs replays, never exactness, and makes the next
slower (policy/swarm/suspicion.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

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
ASK_AGAIN_S = 0.2
LOG = structlog.get_logger()


class Liveness:
    """Re-dials peers that failed and tells the swarm about those that do not answer."""

    def __init__(self, membership: Membership, client: SwarmClient, heard_s: Mapping[PeerId, float]) -> None:
        """`heard_s` tells when bytes last came from each peer (`time.monotonic`)."""
        self._membership = membership
        self._client = client
        self._heard_s = heard_s
        self._probes: dict[PeerId, asyncio.Task[None]] = {}
        self.faults_seen = 0
        """Number of peers that did not answer and had not announced that they leave."""

    def report_failure(self, peer: PeerId) -> None:
        """Find out whether a peer is alive after a call to it failed or its connection broke."""
        live = self._membership.live()
        record = live.find(peer)
        if peer in self._probes or record is None or peer == live.me or is_out_of_reach(live.mine, record):
            return
        task = start(self._probe(peer, record.pair))
        self._probes[peer] = task
        task.add_done_callback(lambda _task: self._probes.pop(peer, None))

    async def follow(self, broken: asyncio.Queue[PeerId]) -> None:
        """Check the peers in the queue, whose connections broke, until cancelled."""
        while True:
            self.report_failure(await broken.get())

    def close(self) -> None:
        for task in self._probes.values():
            task.cancel()

    async def _probe(self, peer: PeerId, pair: tuple[int, int]) -> None:
        while (record := self._unchanged(peer, pair)) is not None:
            asked_s = time.monotonic()
            if await self._answers(record):
                self._membership.reached(peer)
                return
            is_heard = self._heard_s.get(peer, 0.0) > asked_s
            lives = self._membership.not_reached(peer, may_be_slow=is_heard)
            if is_heard:
                await asyncio.sleep(ASK_AGAIN_S)
            elif (record := self._unchanged(peer, pair)) is not None:
                if not lives:
                    self._suspect(record)
                return

    def _unchanged(self, peer: PeerId, pair: tuple[int, int]) -> PeerRecord | None:
        """Return the peer's record, None if it is known to have risen above `pair`."""
        record = self._membership.find(peer)
        return record if record is not None and record.pair <= pair else None

    async def _answers(self, record: PeerRecord) -> bool:
        own = self._membership.raws.get(self._membership.me)
        timeout_s = RELAYED_REDIAL_TIMEOUT_S if record.reach is Reach.RELAYED else REDIAL_TIMEOUT_S
        try:
            patience_s = timeout_s * self._membership.patience.factor(clock_s())
            self._membership.absorb(await self._client.gossip(record.peer, [own.raw] if own else [], patience_s))
        except PeerGoneError:
            return False
        except RemoteError:
            return True  # whatever its answer is, it lives
        return True

    def _suspect(self, record: PeerRecord) -> None:
        if record.leaving:
            LOG.info("a peer has left", left=record.peer)
        else:
            LOG.warning("suspect: no answer to a re-dial", suspect=record.peer)
            self.faults_seen += 1
        self._membership.suspect(record)
