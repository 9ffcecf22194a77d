"""Searches DT-FM's placements: greedy deals of clustered devices, and swaps annealed on a softened cost.

Everything works on the canonical order of the devices and is counted, never timed: the same devices and seed give the same placement,
however the devices are listed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from random import Random

from peerd.planner.clustering import average_linkage, clusters_at
from peerd.planner.dtfm import Groups, PairCosts, PlacedStages, averaging_s, hop, hops, in_groups, placed
from peerd.planner.matching import path_length, quick_path

NUM_CLUSTERINGS = 13
"""Numbers of clusters that are dealt, from one to a cluster a device, in equal ratios."""
MOST_WORK = 8_000_000
"""Edges between two stages that swaps look at in all: some 20 s of one core."""
SWAPS_A_PAIR = 32
"""Swaps that are tried for each pair of devices, where `MOST_WORK` allows."""
RESTARTS = 3
SWAPS_BETWEEN_ORDERS = 150
"""Swaps after which the order of the stages is chosen anew."""
SOFTENED = 0.7
"""Weight of means beside longest edges when the search begins; at its end the longest alone count."""
MELTED, FIRM = 0.5, 0.9
"""Shares of the swaps after which the weight of means begins to fall, and is 0."""
HOT, COLD = 0.007, 0.0002
"""Rise that is accepted once in e times, as shares of the best cost: at the beginning, and at the end."""


def deals(costs: PairCosts) -> Iterator[Groups]:
    """Ways to deal clusters of near devices to stages.

    Each fills a block of `width` stages at a time, device after device round the block: with one stage a block a cluster stays within a
    stage, with all stages in one block it stands in every stage.
    """
    num_stages, size = costs.sizes.num_stages, costs.sizes.num_replicas
    num_devices = num_stages * size
    widths = [width for width in range(1, num_stages + 1) if num_stages % width == 0]
    merges = average_linkage(costs.passing)
    numbers = sorted({round(num_devices ** (step / (NUM_CLUSTERINGS - 1))) for step in range(NUM_CLUSTERINGS)})
    for number in numbers:
        clusters = clusters_at(merges, num_devices, number)
        for dealt in (clusters, sorted(clusters, key=len, reverse=True)):
            line = [device for cluster in dealt for device in cluster]
            for width in widths:
                blocks = in_groups(line, width * size)
                yield tuple(tuple(block[stage::width]) for block in blocks for stage in range(width))


def ranked_deals(costs: PairCosts) -> list[PlacedStages]:
    """All different deals with their costs, the best first."""
    different = {frozenset(map(frozenset, groups)): groups for groups in deals(costs)}
    return sorted((placed(costs, groups) for groups in different.values()), key=lambda found: found.comm_cost_s)


def dealt(costs: PairCosts, _seed: int = 0) -> PlacedStages:
    """The best deal; nothing in it is chance."""
    return ranked_deals(costs)[0]


def at_random(costs: PairCosts, seed: int) -> PlacedStages:
    """Stages of devices that are drawn: what a search has to beat."""
    num_stages, size = costs.sizes.num_stages, costs.sizes.num_replicas
    line = list(range(num_stages * size))
    Random(seed).shuffle(line)
    return placed(costs, in_groups(line, size))


def searched(costs: PairCosts, seed: int) -> PlacedStages:
    """The best deal, improved by swaps that begin at the best few."""
    return improved(costs, ranked_deals(costs)[:RESTARTS], seed)


def improved(costs: PairCosts, starts: Sequence[PlacedStages], seed: int) -> PlacedStages:
    """The best placement that swaps of two devices lead to from these; at least as good as the best of them."""
    num_devices = costs.sizes.num_stages * costs.sizes.num_replicas
    best = min(starts, key=lambda found: found.comm_cost_s)
    if costs.sizes.num_stages < 2:
        return best
    swaps = min(SWAPS_A_PAIR * num_devices**2, MOST_WORK // costs.sizes.num_replicas**2)
    for restart in range(RESTARTS):
        start = starts[restart % len(starts)]
        found = _Annealing(costs, start.groups, Random(f"{seed} {restart}")).run(swaps // RESTARTS)
        best = min(best, found, key=lambda each: each.comm_cost_s)
    return best


class _Annealing:
    """Stages in a fixed order, with what each swap changes: sums of the two stages, and the hops beside them."""

    def __init__(self, costs: PairCosts, groups: Groups, random: Random) -> None:
        self._costs = costs
        self._random = random
        self._groups = [list(group) for group in groups]
        self._num_stages = len(groups)
        self._size = len(groups[0])
        self._slowest = [averaging_s(costs, group) for group in groups]
        self._hops = [self._hop(stage) for stage in range(self._num_stages - 1)]
        """Between each stage and the next: the longest edge, and the mean."""
        self._best_s = math.inf
        self._best: Groups = groups

    def run(self, num_swaps: int) -> PlacedStages:
        self._note()
        scale = self._best_s
        soft = SOFTENED
        now = self._energy(soft)
        for number in range(num_swaps):
            done = number / num_swaps
            if number % SWAPS_BETWEEN_ORDERS == 0:
                self._reorder()
                soft = SOFTENED * min(1.0, max(0.0, (FIRM - done) / (FIRM - MELTED)))
                heat = scale * HOT * (COLD / HOT) ** done
                now = self._energy(soft)
            a, b = self._stages_to_swap()
            i, j = self._random.randrange(self._size), self._random.randrange(self._size)
            now = self._tried(a, i, b, j, soft, now, now - heat * math.log(1 - self._random.random()))
        self._reorder()
        return placed(self._costs, self._best)

    def _stages_to_swap(self) -> tuple[int, int]:
        """Two stages. Half the time the first is one that costs more than others."""
        num_stages, random = self._num_stages, self._random
        a = random.randrange(num_stages)
        if random.random() < 0.5:
            if random.random() < 0.5:
                a = max(range(num_stages), key=self._slowest.__getitem__)
            else:
                a = max(range(num_stages - 1), key=lambda at: self._hops[at][0]) + random.randrange(2)
        b = random.randrange(num_stages - 1)
        return a, b + (b >= a)

    def _tried(self, a: int, i: int, b: int, j: int, soft: float, now: float, most: float) -> float:
        """Swap two devices and return the energy; undo it if that is above `most`."""
        groups, costs = self._groups, self._costs
        slowest, hops_before = self._slowest[:], self._hops[:]
        groups[a][i], groups[b][j] = groups[b][j], groups[a][i]
        self._slowest[a], self._slowest[b] = averaging_s(costs, groups[a]), averaging_s(costs, groups[b])
        beside = {at for stage in (a, b) for at in (stage - 1, stage) if 0 <= at < self._num_stages - 1}
        energy = self._energy(soft) - sum((1 - soft) * self._hops[at][0] + soft * self._hops[at][1] for at in beside)
        for at in sorted(beside):
            if energy > most:
                break
            self._hops[at] = self._hop(at)
            energy += (1 - soft) * self._hops[at][0] + soft * self._hops[at][1]
        if energy <= most:
            self._note()
            return energy
        groups[a][i], groups[b][j] = groups[b][j], groups[a][i]
        self._slowest, self._hops = slowest, hops_before
        return now

    def _hop(self, at: int) -> tuple[float, float]:
        found = hop(self._costs, self._groups[at], self._groups[at + 1])
        return found.longest, found.mean

    def _energy(self, soft: float) -> float:
        averaging = (1 - soft) * max(self._slowest) + soft * sum(self._slowest) / self._num_stages
        return averaging + sum([(1 - soft) * longest + soft * mean for longest, mean in self._hops])

    def _note(self) -> None:
        """Keep the stages if they cost less than any before."""
        cost = max(self._slowest) + sum([longest for longest, _ in self._hops])
        if cost < self._best_s * (1 - 1e-12):
            self._best_s, self._best = cost, tuple(map(tuple, self._groups))

    def _reorder(self) -> None:
        lengths = hops(self._costs, self._groups)
        here = tuple(range(self._num_stages))
        order = quick_path(lengths, here)
        if path_length(lengths, order) < path_length(lengths, here) * (1 - 1e-12):
            self._groups = [self._groups[stage] for stage in order]
            self._slowest = [self._slowest[stage] for stage in order]
            self._hops = [self._hop(stage) for stage in range(self._num_stages - 1)]
            self._note()
