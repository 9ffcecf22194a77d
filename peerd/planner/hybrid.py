"""The hybrid parameter server's planner: reliable devices anchor stages, unreliable ones help them (equations 1 and 2 of the paper).

A stage's reliable devices are servers: front servers take activations from the stage before and deal them to all devices of the stage, back
servers gather the results and pass them on. A minibatch takes a stage `comm + DT`, and an iteration d times that of the slowest.

Three things differ from the paper. Every number of stages is scored by the exact equation 2: the paper compares levels by its equation 3,
which divides the work by the compute of all servers and by the number of clusters besides, so that each split seems to gain what it does
not. A helper goes where the exact time falls most, not to the nearest cluster, where all would gather. Memory is counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from peerd.planner.clustering import average_linkage, clusters_at
from peerd.planner.matching import open_path
from peerd.planner.network import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridJob:
    """What is trained. The layers are alike."""

    num_layers: int
    layer_flops: float
    """Of a minibatch, forward and backward."""
    layer_bytes: float
    """Of memory."""
    boundary_bytes: float
    """A minibatch's activations; its gradients are as large."""
    num_minibatches: int


@dataclass(frozen=True, slots=True)
class HybridStage:
    front: tuple[int, ...]
    back: tuple[int, ...]
    helpers: tuple[int, ...]
    num_layers: int
    comm_s: float
    """To the stages beside it, for one minibatch."""
    stage_s: float
    """Within it (DT, equation 1)."""

    @property
    def servers(self) -> tuple[int, ...]:
        return tuple(sorted({*self.front, *self.back}))


@dataclass(frozen=True, slots=True)
class HybridPlan:
    stages: tuple[HybridStage, ...]
    iteration_s: float
    """PT, equation 2."""


def best_plan(network: Topology, job: HybridJob) -> HybridPlan | None:
    """The fastest of all numbers of stages; None if the model fits none of them."""
    return min((plan for plan in plans(network, job) if plan is not None), key=lambda plan: plan.iteration_s, default=None)


def plans(network: Topology, job: HybridJob) -> list[HybridPlan | None]:
    """The plan of 1, 2, ... stages: as many as there are reliable devices, or layers. None where the model does not fit."""
    anchors = [device for device, peer in enumerate(network.peers) if peer.is_reliable]
    if not anchors:
        raise ValueError("no device is reliable, and each stage needs one that is")
    apart = [[_apart_s(network, job, a, b) if a != b else 0.0 for b in anchors] for a in anchors]
    merges = average_linkage(apart)
    found = []
    for number in range(1, min(len(anchors), job.num_layers) + 1):
        clusters = [[anchors[each] for each in cluster] for cluster in clusters_at(merges, len(anchors), number)]
        found.append(_Planner(network, job, _ordered(network, job, clusters)).plan())
    return found


def _apart_s(network: Topology, job: HybridJob, a: int, b: int) -> float:
    """The paper's distance: a minibatch there and back."""
    return network.hop_s(a, b, job.boundary_bytes) + network.hop_s(b, a, job.boundary_bytes)


def _ordered(network: Topology, job: HybridJob, clusters: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """The clusters as an open path through the means of their distances."""
    means = [
        [sum(_apart_s(network, job, a, b) for a in one for b in other if a != b) / len(one) / len(other) for other in clusters]
        for one in clusters
    ]
    return [clusters[each] for each in open_path(means)[1]]


class _Planner:
    """One number of stages: who serves at which side, who helps where, and how many layers each stage has."""

    def __init__(self, network: Topology, job: HybridJob, clusters: Sequence[Sequence[int]]) -> None:
        self._network = network
        self._job = job
        self._sides = [self._split(clusters, stage) for stage in range(len(clusters))]
        self._comm_s = [self._between_s(stage) for stage in range(len(clusters))]

    def plan(self) -> HybridPlan | None:
        """Helpers, the strongest first, go where they leave the iteration shortest; among equals to the nearest."""
        helpers: list[list[int]] = [[] for _ in self._sides]
        peers = self._network.peers
        for device in sorted((each for each, peer in enumerate(peers) if not peer.is_reliable), key=lambda each: -peers[each].flops):
            options = [[[*each, device] if at == stage else each for at, each in enumerate(helpers)] for stage in range(len(helpers))]
            times = [self._times(option) for option in options]
            worst = [max(each, default=math.inf) for each in times]
            near = [self._served_s(stage, device, self._job.boundary_bytes) for stage in range(len(helpers))]
            stage = min(range(len(options)), key=lambda at: (worst[at], near[at]))
            if worst[stage] <= max(self._times(helpers), default=math.inf):
                helpers = options[stage]  # otherwise it would only hold the others up
        layers = self._layers(helpers)
        if layers is None:
            return None
        stages = tuple(
            HybridStage(front, back, tuple(mates), count, comm_s, self._within_s(stage, mates, count))
            for stage, ((front, back), mates, count, comm_s) in enumerate(zip(self._sides, helpers, layers, self._comm_s, strict=True))
        )
        return HybridPlan(stages, self._job.num_minibatches * max(each.comm_s + each.stage_s for each in stages))

    def _split(self, clusters: Sequence[Sequence[int]], stage: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Each server to the side that it is nearer to, at least one to each. One server alone is both."""
        cluster = clusters[stage]
        if len(cluster) == 1:
            return (cluster[0],), (cluster[0],)

        def mean_s(device: int, neighbour: int) -> float:
            others = clusters[neighbour] if 0 <= neighbour < len(clusters) else ()
            return sum(_apart_s(self._network, self._job, device, other) for other in others) / len(others) if others else math.inf

        leaning = {device: (mean_s(device, stage - 1), mean_s(device, stage + 1)) for device in cluster}
        by_side = sorted(cluster, key=lambda device: (leaning[device][0] > leaning[device][1], _difference(leaning[device]), device))
        num_front = sum(before < after for before, after in leaning.values())
        if all(before == after for before, after in leaning.values()):
            num_front = len(cluster) // 2
        num_front = min(max(num_front, 1), len(cluster) - 1)
        return tuple(by_side[:num_front]), tuple(by_side[num_front:])

    def _between_s(self, stage: int) -> float:
        """What the stage receives from before and after, for one minibatch: the first and last terms of equation 2."""
        front, back = self._sides[stage]
        passed = 0.0
        if stage:
            passed += self._passed_s(self._sides[stage - 1][1], front)
        if stage + 1 < len(self._sides):
            passed += self._passed_s(self._sides[stage + 1][0], back)
        return passed

    def _passed_s(self, senders: Sequence[int], receivers: Sequence[int]) -> float:
        """Each receiver takes an equal segment; the segments of a sender share its line evenly."""
        one, other = len(senders), len(receivers)
        num_bytes = self._job.boundary_bytes / max(one, other) * max(math.ceil(other / one), math.ceil(one / other))
        return max(min(self._network.hop_s(sender, receiver, num_bytes) for sender in senders) for receiver in receivers)

    def _times(self, helpers: Sequence[Sequence[int]]) -> list[float]:
        """The seconds that each stage takes for a minibatch; empty if the model does not fit."""
        layers = self._layers(helpers)
        if layers is None:
            return []
        return [self._comm_s[stage] + self._within_s(stage, mates, layers[stage]) for stage, mates in enumerate(helpers)]

    def _layers(self, helpers: Sequence[Sequence[int]]) -> list[int] | None:
        """One layer after another goes where the stage's time then is least, which is exact for layers that are alike."""
        stages = range(len(self._sides))
        fixed = [self._comm_s[stage] + self._dealt_s(stage, helpers[stage]) for stage in stages]
        devices = [[self._network.peers[each] for each in self._devices(stage, helpers[stage])] for stage in stages]
        paces = [self._job.layer_flops / sum(peer.flops for peer in peers) for peers in devices]
        most = [min(_holds(peer.memory_bytes, self._job) for peer in peers) for peers in devices]
        layers = [1] * len(stages)
        if min(most) < 1 or sum(most) < self._job.num_layers:
            return None
        for _ in range(self._job.num_layers - len(layers)):
            free = [stage for stage in stages if layers[stage] < most[stage]]
            stage = min(free, key=lambda each: fixed[each] + paces[each] * (layers[each] + 1))
            layers[stage] += 1
        return layers

    def _devices(self, stage: int, helpers: Sequence[int]) -> list[int]:
        front, back = self._sides[stage]
        return [*sorted({*front, *back}), *helpers]

    def _within_s(self, stage: int, helpers: Sequence[int], num_layers: int) -> float:
        """Equation 1, with work in proportion to compute, so that all compute equally long."""
        compute = sum(self._network.peers[each].flops for each in self._devices(stage, helpers))
        return self._dealt_s(stage, helpers) + num_layers * self._job.layer_flops / compute

    def _dealt_s(self, stage: int, helpers: Sequence[int]) -> float:
        """The longest way of a share from a front server to a device and on to a back server."""
        devices = self._devices(stage, helpers)
        compute = sum(self._network.peers[each].flops for each in devices)
        return max(self._served_s(stage, each, self._job.boundary_bytes * self._network.peers[each].flops / compute) for each in devices)

    def _served_s(self, stage: int, device: int, num_bytes: float) -> float:
        front, back = self._sides[stage]
        taken = min(0.0 if each == device else self._network.hop_s(each, device, num_bytes) for each in front)
        given = min(0.0 if each == device else self._network.hop_s(device, each, num_bytes) for each in back)
        return taken + given


def _holds(memory_bytes: float, job: HybridJob) -> int:
    """Layers that a device has memory for."""
    needs_all = job.num_layers * job.layer_bytes
    return job.num_layers if memory_bytes >= needs_all else int(memory_bytes / job.layer_bytes)


def _difference(leaning: tuple[float, float]) -> float:
    """How much nearer the front is; 0 where neither side has a neighbour."""
    before, after = leaning
    return 0.0 if before == after else before - after


def papers_number(network: Topology, job: HybridJob) -> int:
    """The number of stages at which the paper's search stops: splits go on while its estimate of an iteration falls.

    The estimate takes equation 2's transfers, and for the rest equation 3: the work of all layers by the compute of all servers, and that
    by the number of clusters. A stage has only its part of the servers, so the second division is one too many.
    """
    found = [plan for plan in plans(network, replace(job, layer_bytes=0.0)) if plan is not None]
    servers = sum(peer.flops for peer in network.peers if peer.is_reliable)
    work_s = job.num_layers * job.layer_flops / servers
    estimates = [max(stage.comm_s for stage in plan.stages) + work_s / number for number, plan in enumerate(found, 1)]
    return next((number for number, (here, there) in enumerate(pairwise(estimates), 1) if there > here), len(estimates))
