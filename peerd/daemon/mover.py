"""Rebalancing in the daemon: once per period, asks policy/ whether this peer should serve another stage, and moves it.

In a move the peer leaves its stage at a step boundary and enters another one, so no microbatch is replayed because of it.
"""

from __future__ import annotations

import asyncio
import math
import time

import structlog

from peerd.daemon.departure import Departure
from peerd.daemon.seat import Seat
from peerd.models.stages import estimate_stage_memory, placing_of_stage, stage_demands
from peerd.planner.memory import Placing, least_on_device
from peerd.policy.step.ledger import FEWEST
from peerd.policy.swarm.queues import READINGS, QueueReadings
from peerd.policy.swarm.rebalance import Rebalancing, Rule, move_of, plan, seed_at
from peerd.swarm.clock import clock_s

THROUGHPUT_ERROR = 0.05
"""Relative standard deviation of a measured throughput: 0.02 to 0.05 if dozens of processes share two cores."""
HORIZON = 10
"""Number of periods or downloads, whichever are longer, that a gain is expected to last."""
READ_S = 1.0
"""Time between two looks at what waits here."""
LOG = structlog.get_logger()


class Mover:
    """Runs while this stage is served. Nobody moves if the manifest's period is 0, or its rule "none"."""

    def __init__(self, seat: Seat, departure: Departure) -> None:
        self._seat = seat
        self._departure = departure
        config = seat.peer.place.manifest.swarm
        self._period_s = config.rebalance_period_s
        self._rule = Rule(config.rebalance) if self._period_s > 0 else Rule.NONE
        self._readings = QueueReadings()
        self._needed: tuple[int, ...] = ()

    async def run(self) -> None:
        await asyncio.to_thread(self._estimate)
        look_s = self._period_s / READINGS if self._rule is Rule.QUEUES else self._period_s
        last = math.floor(time.time() / look_s) if look_s > 0 else 0
        while True:
            self._seat.backlog.read(self._seat.num_waiting, clock_s())
            # Periods are counted on the wall clock, so that all peers plan with one seed.
            left_s = look_s - time.time() % look_s if look_s > 0 else READ_S
            await asyncio.sleep(min(READ_S, left_s))
            if look_s > 0 and last != (last := math.floor(time.time() / look_s)):
                self._plan_once(time.time())

    def _estimate(self) -> None:
        """Estimate the memory and work of each stage, which takes some hundredths of a second per stage."""
        manifest = self._seat.peer.place.manifest
        stages = range(manifest.train.num_stages)
        least = Placing.TOGETHER if manifest.compute.offload == "none" else least_on_device(manifest)
        self._needed = tuple(estimate_stage_memory(manifest, stage, manifest.slots, least).device for stage in stages)
        self._seat.demands = stage_demands(manifest, are_alike=self._seat.peer.settings.compute_stand_in_ms > 0)

    def _fits(self, stage: int) -> bool:
        """Whether this peer has the memory. A record does not say whether it has a device of its own, so a plan counts on the least."""
        manifest, room = self._seat.peer.place.manifest, self._seat.room
        lacks = room.lacks(estimate_stage_memory(manifest, stage, manifest.slots, placing_of_stage(manifest, stage, room)))
        if lacks:
            LOG.info("not moved", to_stage=stage, reason=f"it needs {lacks}")
        return not lacks

    def _plan_once(self, now_s: float) -> None:
        seat = self._seat
        live, num_stages = seat.peer.membership.live(), seat.peer.place.manifest.train.num_stages
        params = Rebalancing(
            rule=self._rule,
            period_s=self._period_s,
            download_s=seat.join_took_s,
            horizon_s=HORIZON * max(self._period_s, seat.join_took_s),
            noise=THROUGHPUT_ERROR,
            demands=seat.demands,
            needed_bytes=self._needed,
            least_peers=FEWEST if seat.peer.place.manifest.swarm.certifies else 1,
        )
        found = plan(live, num_stages, seed_at(now_s, params), params)
        if self._rule is Rule.QUEUES:
            found = self._readings.read(found, live)
        seat.rebalance_reason, seat.rebalance_moves = found.reason, found.moves
        move = move_of(found, seat.state.record)
        if move is not None and not seat.peer.settings.keeps_stage and self._fits(move.to_stage):
            LOG.info("rebalancing", to_stage=move.to_stage, reason=move.reason)
            self._departure.move(move.to_stage)
