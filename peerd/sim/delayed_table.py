"""The simulated table: the swarm as planners know it, some seconds late and with measurement errors."""

from __future__ import annotations

import math
import random
from collections import deque

from peerd.policy.swarm.choosing import weakest_stage
from peerd.sim.simulated_swarm import SimulatedPeer
from peerd.table.record import PeerId, PeerRecord, Phase
from peerd.table.view import LiveView

LOAD = 0.98
"""Utilisation of the weakest stage; queue lengths follow from it."""
ROUNDING = 1e-9
"""A stage's total below this, in samples/s, is rounding error: the stage is empty."""


class DelayedTable:
    """A table in which records appear `delay_s` late and measurements have a relative standard deviation of `noise`.

    Peer ids ascend in order of arrival, so the dictionary has the order of a view's records.
    """

    def __init__(self, num_stages: int, delay_s: float, noise: float, chance: random.Random) -> None:
        self._delay_s, self._noise, self._chance = delay_s, noise, chance
        self._records: dict[PeerId, PeerRecord] = {}
        self._news: deque[tuple[float, PeerId, PeerRecord | None]] = deque()
        self._totals = [0.0] * num_stages
        """Throughput of each stage's members."""
        self._summary = [PeerRecord(peer=PeerId(f"stage {stage}"), stage=stage) for stage in range(num_stages)]

    def publish(self, now_s: float, peer: SimulatedPeer) -> None:
        phase = Phase.ACCUMULATING if peer.serving else Phase.JOINING
        record = PeerRecord(peer=peer.id, stage=peer.stage, phase=phase, throughput=peer.device.speed)
        self._news.append((now_s + self._delay_s, peer.id, record))

    def withdraw(self, now_s: float, peer: SimulatedPeer) -> None:
        self._news.append((now_s + self._delay_s, peer.id, None))

    def advance(self, now_s: float) -> None:
        """Apply the updates that have arrived by now."""
        while self._news and self._news[0][0] <= now_s:
            _, peer, record = self._news.popleft()
            known = self._records.get(peer)
            if known is not None:
                self._totals[known.stage] -= known.throughput
            if record is None:
                self._records.pop(peer, None)
                continue
            self._totals[record.stage] += record.throughput
            self._records[peer] = record

    def weakest_stage(self, joiner: PeerId) -> int:
        """The stage to which admission sends a joiner. It adds up throughputs, so one record per stage with the total is enough."""
        for stage, (record, total) in enumerate(zip(self._summary, self._totals, strict=True)):
            if record.throughput != total:
                self._summary[stage] = PeerRecord(peer=record.peer, stage=stage, throughput=total)
        peopled = tuple(record for record in self._summary if record.throughput > ROUNDING)
        return weakest_stage(LiveView(me=joiner, records=peopled), range(len(self._totals)))[0]

    def view(self, *, with_queues: bool) -> LiveView:
        """The view that a planner has now."""
        if with_queues:
            self._measure_queues()
        records = tuple(self._records.values())
        if self._noise:
            records = tuple(self._measured(record) for record in records)
        return LiveView(me=PeerId(""), records=records)

    def _measure_queues(self) -> None:
        """Set queues: a stage at load rho has rho / (1 - rho) waiting (as in M/M/1), times the mean number of peers.

        One record holds the whole stage's queue: planners only use the sum, and this takes less time.
        """
        serving: list[list[PeerRecord]] = [[] for _ in self._totals]
        for record in self._records.values():
            if record.phase is not Phase.JOINING:
                serving[record.stage].append(record)
            if record.backlog:
                self._records[record.peer] = _revised(record, record.throughput, 0)
        strengths = [math.fsum(record.throughput for record in found) for found in serving]
        offered = LOAD * min(strengths)
        mean_peers = sum(map(len, serving)) / len(serving)
        for found, strength in zip(serving, strengths, strict=True):
            if found:
                load = offered / strength
                self._records[found[0].peer] = _revised(found[0], found[0].throughput, mean_peers * load / (1 - load))

    def _measured(self, record: PeerRecord) -> PeerRecord:
        return _revised(record, record.throughput * self._off(), record.backlog * self._off())

    def _off(self) -> float:
        return math.exp(self._noise * self._chance.gauss(0, 1))


def _revised(record: PeerRecord, throughput: float, backlog: float) -> PeerRecord:
    """Like dataclasses.replace, in a third of the time."""
    return PeerRecord(peer=record.peer, stage=record.stage, phase=record.phase, throughput=throughput, backlog=backlog)
