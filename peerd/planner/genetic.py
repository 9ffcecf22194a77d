"""DT-FM's own search (Yuan et al. 2022, section 3.4): a genetic algorithm over balanced partitions, with a local search. For comparison.

A child mixes two parents stage by stage, and is then improved by swaps between the ends of the fastest links of two stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from random import Random

from peerd.planner.dtfm import Groups, PairCosts, PlacedStages, in_groups, placed
from peerd.planner.matching import Matrix

POPULATION = 40
CHILDREN_A_STAGE = 60
"""Children in all, for each stage of the pipeline."""
LOCAL_ROUNDS = 3


def genetic(costs: PairCosts, seed: int) -> PlacedStages:
    """The best placement of the last generation."""
    random = Random(seed)
    num_stages, size = costs.sizes.num_stages, costs.sizes.num_replicas
    population = []
    for _ in range(POPULATION):
        line = list(range(num_stages * size))
        random.shuffle(line)
        population.append(placed(costs, in_groups(line, size)))
    for _ in range(CHILDREN_A_STAGE * num_stages if num_stages > 1 else 0):
        one, other = random.sample(population, 2)
        child = _locally_improved(costs, _crossed(one.groups, other.groups, random))
        worst = max(range(POPULATION), key=lambda at: population[at].comm_cost_s)
        if child.comm_cost_s < population[worst].comm_cost_s:
            population[worst] = child
    return min(population, key=lambda found: found.comm_cost_s)


def _crossed(one: Groups, other: Groups, random: Random) -> list[list[int]]:
    """Each device goes where one of the parents has it, as far as that stage has room; the rest fills up."""
    stage_in = [{device: stage for stage, group in enumerate(parent) for device in group} for parent in (one, other)]
    size = len(one[0])
    devices = sorted(stage_in[0])
    random.shuffle(devices)
    child: list[list[int]] = [[] for _ in one]
    left = []
    for device in devices:
        group = child[stage_in[random.randrange(2)][device]]
        if len(group) < size:
            group.append(device)
        else:
            left.append(device)
    for group in child:
        while len(group) < size:
            group.append(left.pop())
    return child


def _locally_improved(costs: PairCosts, groups: list[list[int]]) -> PlacedStages:
    """The cheapest of what rounds of swaps lead through, one swap for each pair of stages in a round, the one with the most gain."""
    best = placed(costs, groups)
    for _ in range(LOCAL_ROUNDS):
        for a in range(len(groups)):
            for b in range(a):
                here, there = _fastest(costs.passing, groups[a]), _fastest(costs.passing, groups[b])
                there_from, here_from = (partial(_gain, costs.passing, other=groups[each]) for each in (b, a))
                gain, d, e = max((there_from(d, here) + here_from(e, there), d, e) for d in here for e in there)
                if gain > 0:
                    groups[a][groups[a].index(d)], groups[b][groups[b].index(e)] = e, d
        best = min(best, placed(costs, groups), key=lambda found: found.comm_cost_s)
    return best


def _fastest(links: Matrix, group: Sequence[int]) -> tuple[int, ...]:
    """The ends of a stage's fastest link; of a stage with one device, that."""
    pairs = [(links[x][y], x, y) for x in group for y in group if x < y]
    return min(pairs)[1:] if pairs else (group[0],)


def _gain(links: Matrix, device: int, fastest: Sequence[int], other: Sequence[int]) -> float:
    """What a device's hop to the other stage is expected to cost before a swap, less what its fastest link costs, which then may serve."""
    return sum(links[device][each] for each in other) / len(other) - links[fastest[0]][fastest[-1]]
