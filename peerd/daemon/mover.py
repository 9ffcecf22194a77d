"""Rebalancing in the daemon: once per period, ask policy/ whether this peer shall serve another stage, and go.

A move is a graceful departure at a step boundary and an entrance elsewhere, so nothing is replayed because of it.
"""

from __future__ import annotations

import asyncio
import time

import structlog

from peerd.daemon.departure import Departure
from peerd.daemon.node import Node
from peerd.models.stages import estimate_stage_memory_bytes
from peerd.policy.rebalance import Rebalancing, move_of, plan
from peerd.stage.service import slots_of

LOG = structlog.get_logger()


class Mover:
    """Runs for as long as this stage is served. Off where the manifest's period is 0."""

    def __init__(self, node: Node, departure: Departure) -> None:
        self._node = node
        self._departure = departure
        manifest = node.place.manifest
        self._period_s = manifest.swarm.rebalance_period_s
        self._needed = tuple(estimate_stage_memory_bytes(manifest, stage, slots_of(manifest)) for stage in range(manifest.train.num_stages))

    async def run(self) -> None:
        while self._period_s > 0:
            # Periods are counted on the wall clock, so that all peers plan with one seed.
            await asyncio.sleep(self._period_s - time.time() % self._period_s)
            self._plan_once(int(time.time() / self._period_s))

    def _plan_once(self, period: int) -> None:
        node = self._node
        params = Rebalancing(
            period_s=self._period_s,
            download_s=node.join_took_s,
            horizon_s=max(10 * self._period_s, 10 * node.join_took_s),
            needed_bytes=self._needed,
        )
        found = plan(node.membership.live(), node.place.manifest.train.num_stages, period, params)
        node.rebalance_reason = found.reason
        move = move_of(found, node.state.record)
        if move is not None and not node.settings.stay:
            LOG.info("rebalancing", to_stage=move.to_stage, reason=move.reason)
            self._departure.move(move.to_stage)
