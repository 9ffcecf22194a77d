"""DT-FM's model of communication (Yuan et al. 2022, equations 1 to 4): what one iteration of a placement costs in seconds.

Devices form stages of equally many replicas. Each stage averages its gradients by a sharded parameter server, each lane of replicas
passes activations on to one replica of the next stage, and the order of the stages is free. Links count by the mean of both ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peerd.planner.matching import Bottleneck, Matrix, bottleneck_matching, open_path
from peerd.planner.network import Topology

Groups = tuple[tuple[int, ...], ...]
"""The devices of each stage, by their positions in the topology."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySizes:
    """What is placed. The defaults are those of DT-FM's study: GPT3-1.3B on 64 devices."""

    num_stages: int = 8
    num_replicas: int = 8
    gradient_bytes: float = 0.65e9
    """A stage's gradients (c_dp)."""
    activation_bytes: float = 0.47124922275543213e9
    """What a lane passes on in an iteration (c_pp)."""


@dataclass(frozen=True, slots=True)
class PairCosts:
    """The seconds that each pair of devices takes, there and back."""

    sizes: StudySizes
    averaging: Matrix
    """To exchange a shard of gradients (the summand of equation 2)."""
    passing: Matrix
    """To pass activations on and gradients back (equation 3)."""


@dataclass(frozen=True, slots=True)
class PlacedStages:
    """Stages in the order of the pipeline, and what they cost in seconds."""

    comm_cost_s: float
    averaging_s: float
    """Of the stage that takes longest."""
    pipeline_s: float
    """Sum of the hops."""
    groups: Groups
    """Position i of each group is lane i: these devices pass microbatches to one another."""


def pair_costs(topology: Topology, sizes: StudySizes) -> PairCosts:
    shard = sizes.gradient_bytes / sizes.num_replicas
    return PairCosts(sizes, _round_trips(topology, shard), _round_trips(topology, sizes.activation_bytes))


def _round_trips(topology: Topology, num_bytes: float) -> Matrix:
    count = range(len(topology.peers))
    return [[0.0 if a == b else 2 * topology.mean_hop_s(a, b, num_bytes) for b in count] for a in count]


def averaging_s(costs: PairCosts, group: Sequence[int]) -> float:
    """Equation 2: the time of the device that takes longest."""
    return max(sum(costs.averaging[device][other] for other in group) for device in group)


def hop(costs: PairCosts, group: Sequence[int], other: Sequence[int]) -> Bottleneck:
    """Equation 3: the best matching between the devices of two stages."""
    return bottleneck_matching([[costs.passing[a][b] for b in other] for a in group])


def hops(costs: PairCosts, groups: Sequence[Sequence[int]]) -> list[list[float]]:
    """The coarsened graph: the hop between any two stages."""
    lengths = [[0.0] * len(groups) for _ in groups]
    for a, group in enumerate(groups):
        for b in range(a):
            lengths[a][b] = lengths[b][a] = hop(costs, group, groups[b]).longest
    return lengths


def in_groups(line: Sequence[int], size: int) -> Groups:
    """A line of devices, cut into groups of this size."""
    return tuple(tuple(line[start : start + size]) for start in range(0, len(line), size))


def placed(costs: PairCosts, groups: Sequence[Sequence[int]]) -> PlacedStages:
    """Equation 1: the groups in their best order and with the best lanes, and what they cost."""
    pipeline, order = open_path(hops(costs, groups))
    slowest = max(averaging_s(costs, group) for group in groups)
    lanes = [tuple(groups[order[0]])]
    for stage in order[1:]:
        partners = hop(costs, lanes[-1], groups[stage]).partners
        lanes.append(tuple(groups[stage][partner] for partner in partners))
    return PlacedStages(slowest + pipeline, slowest, pipeline, tuple(lanes))
