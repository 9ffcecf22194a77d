"""The simulated table: the swarm as planners know it, some seconds late and with measuring errors."""

from __future__ import annotations

import math
import random
from collections import deque

from peerd.policy.admission import choose_stage
from peerd.sim.swarm import Peer
from peerd.table.record import PeerId, PeerRecord, Phase
from peerd.table.view import LiveView

LOAD = 0.98
"""Share of its capacity at which the weakest stage is kept busy; queues follow from it."""


class Table:
    """Records become known `delay_s` after the fact; what peers measure is off by `noise`, a relative deviation.

    Peer ids ascend in the order of arrival, so the dictionary's order is that of a view's records.
    """

    def __init__(self, num_stages: int, delay_s: float, noise: float, chance: random.Random) -> None:
        self._delay_s, self._noise, self._chance = delay_s, noise, chance
        self._records: dict[PeerId, PeerRecord] = {}
        self._news: deque[tuple[float, PeerId, PeerRecord | None]] = deque()
        self._totals = [0.0] * num_stages
        """Per stage, of all members."""

    def publish(self, now_s: float, peer: Peer) -> None:
        phase = Phase.ACCUMULATING if peer.serving else Phase.JOINING
        self._news.append((now_s + self._delay_s, peer.id, PeerRecord(peer=peer.id, stage=peer.stage, phase=phase, throughput=peer.speed)))

    def withdraw(self, now_s: float, peer: Peer) -> None:
        self._news.append((now_s + self._delay_s, peer.id, None))

    def advance(self, now_s: float) -> None:
        """Take in the news that have arrived by now."""
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
        """Where admission sends a joiner. It adds up throughputs, so one record per stage tells it what all would."""
        totals = enumerate(self._totals)
        records = tuple(PeerRecord(peer=PeerId(f"stage {s}"), stage=s, throughput=total) for s, total in totals if total > 1e-9)
        choice = choose_stage(LiveView(me=joiner, records=records), [0] * len(self._totals), 1)
        assert choice.stage is not None  # every stage fits
        return choice.stage

    def view(self, *, with_queues: bool) -> LiveView:
        """What a planner sees now."""
        if with_queues:
            self._measure_queues()
        records = tuple(self._records.values())
        if self._noise:
            records = tuple(self._measured(record) for record in records)
        return LiveView(me=PeerId(""), records=records)

    def _measure_queues(self) -> None:
        """A stage at load rho has rho / (1 - rho) waiting (as in M/M/1), times the mean number of peers, spread evenly."""
        serving: list[list[PeerRecord]] = [[] for _ in self._totals]
        for record in self._records.values():
            if record.phase is not Phase.JOINING:
                serving[record.stage].append(record)
        strengths = [sum(record.throughput for record in found) for found in serving]
        offered = LOAD * min(strengths)
        mean_peers = sum(map(len, serving)) / len(serving)
        for found, strength in zip(serving, strengths, strict=True):
            if not found:
                continue
            load = offered / strength
            each, longer = divmod(round(mean_peers * load / (1 - load)), len(found))
            for place, record in enumerate(found):
                queue = each + 1 if place < longer else each
                if record.queue != queue:
                    self._records[record.peer] = _revised(record, record.throughput, queue)

    def _measured(self, record: PeerRecord) -> PeerRecord:
        return _revised(record, record.throughput * self._off(), round(record.queue * self._off()))

    def _off(self) -> float:
        return math.exp(self._noise * self._chance.gauss(0, 1))


def _revised(record: PeerRecord, throughput: float, queue: int) -> PeerRecord:
    """As dataclasses.replace would, in a third of the time."""
    return PeerRecord(peer=record.peer, stage=record.stage, phase=record.phase, throughput=throughput, queue=queue)
