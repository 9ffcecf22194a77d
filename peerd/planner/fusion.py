"""FusionLLM's planner (Tang et al. 2024, sections 3 and 4): one pipeline over unlike devices, each with consecutive layers.

A link takes alpha + beta M, a pass T_lat = sum of (C_p + R_p), and n pipelined microbatches T_pipe = T_lat + (n - 1) max(C_p, R_p)
(equations 2 and 3). OP-Fence puts devices with fast links side by side: communities of the graph of bandwidths (Louvain), an open path
through them and within each. For that order the cut is exact: a dynamic programme over device and layer, under each device's memory,
in which a device may also be left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from peerd.planner.matching import open_path
from peerd.planner.network import Topology

MOST_GAIN_ROUNDS = 50

_Cut = tuple[float, float, tuple[int, ...], tuple[int, ...]]
"""Latency, slowest part, devices, and the first layer of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """What stages of a model cost, forward and backward, for one microbatch."""

    num_layers: int
    flops: Callable[[int, int], float]
    """Of the layers from the first number up to, but without, the second."""
    memory_bytes: Callable[[int, int], float]
    boundary_bytes: Callable[[int], tuple[float, float]]
    """Before a layer: activations forth and gradients back."""
    num_microbatches: int


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Devices in order, each with the layers from its entry in `starts` to the next one's."""

    devices: tuple[int, ...]
    starts: tuple[int, ...]
    latency_s: float
    """Equation 2: one microbatch through all of it, forth and back."""
    slowest_s: float
    """The longest computation or transfer of a microbatch."""
    iteration_s: float
    """Equation 3."""


def measured(topology: Topology, costs: LayerCosts, devices: Sequence[int], starts: Sequence[int]) -> Pipeline:
    """Equations 2 and 3 for this cut."""
    ends = [*starts[1:], costs.num_layers]
    times: list[tuple[float, float]] = []
    for place, (device, start, end) in enumerate(zip(devices, starts, ends, strict=True)):
        received = _received_s(topology, costs, devices[place - 1], device, start) if place else 0.0
        times.append((costs.flops(start, end) / topology.peers[device].flops, received))
    latency, slowest = sum(map(sum, times)), max(map(max, times))
    return Pipeline(tuple(devices), tuple(starts), latency, slowest, latency + (costs.num_microbatches - 1) * slowest)


def equal_numbers(topology: Topology, costs: LayerCosts, devices: Sequence[int]) -> Pipeline:
    """The paper's baseline: as many layers each, in the order of the list."""
    count = min(len(devices), costs.num_layers)
    return measured(topology, costs, devices[:count], [place * costs.num_layers // count for place in range(count)])


def op_fence(topology: Topology, costs: LayerCosts) -> Pipeline | None:
    """The best cut along the fenced order, or along it backwards; None if no cut fits the devices' memory."""
    order = fenced_order(topology, sum(costs.boundary_bytes(1)) if costs.num_layers > 1 else 0.0)
    cuts = [best_cut(topology, costs, each) for each in (order, order[::-1])]
    return min((cut for cut in cuts if cut is not None), key=lambda cut: cut.iteration_s, default=None)


def fenced_order(topology: Topology, num_bytes: float) -> tuple[int, ...]:
    """Devices so that communities stay together: an open path through the communities, and one within each."""
    count = range(len(topology.peers))
    seconds = [[topology.mean_hop_s(a, b, num_bytes) if a != b else 0.0 for b in count] for a in count]
    rates = [[topology.mean_rate(a, b) if a != b else 0.0 for b in count] for a in count]
    groups = communities(rates)
    nearest = [[min(seconds[a][b] for a in one for b in other) if one is not other else 0.0 for other in groups] for one in groups]
    order: list[int] = []
    for group in open_path(nearest)[1]:
        members = groups[group]
        found = [members[each] for each in open_path([[seconds[a][b] for b in members] for a in members])[1]]
        if order and seconds[order[-1]][found[-1]] < seconds[order[-1]][found[0]]:
            found.reverse()
        order += found
    return tuple(order)


def communities(weights: Sequence[Sequence[float]]) -> list[list[int]]:
    """Louvain: devices move to the community with the most modularity to gain, then communities become devices, until nothing moves."""
    size = len(weights)
    groups = [[each] for each in range(size)]
    while True:
        links = [[sum(weights[a][b] for a in one for b in other) for other in groups] for one in groups]
        label = _moved(links)
        merged = [[each for group, its in zip(groups, label, strict=True) if its == one for each in group] for one in sorted({*label})]
        if len(merged) == len(groups):
            return groups
        groups = merged


def _moved(links: Sequence[Sequence[float]]) -> list[int]:
    """The community of each node after local moves. `links` holds both directions, and a node's own links on the diagonal."""
    count = range(len(links))
    degree = [sum(row) for row in links]
    twice = sum(degree)
    label, total = list(count), degree[:]
    for _ in range(MOST_GAIN_ROUNDS):
        moves = False
        for node in count:
            total[label[node]] -= degree[node]
            towards = {label[node]: 0.0}
            for other in count:
                if other != node:
                    towards[label[other]] = towards.get(label[other], 0.0) + links[node][other]
            gains = {each: weight - degree[node] * total[each] / twice if twice else 0.0 for each, weight in towards.items()}
            best = max(gains, key=lambda each: (gains[each], each == label[node], -each))
            if gains[best] > gains[label[node]] * (1 + 1e-12) + 1e-12 * twice:
                label[node], moves = best, True
            total[label[node]] += degree[node]
        if not moves:
            break
    return label


def best_cut(topology: Topology, costs: LayerCosts, order: Sequence[int]) -> Pipeline | None:
    """The fastest cut along this order, exactly. None if none fits.

    For each last device and number of layers placed it keeps what no other cut beats in both latency and slowest part.
    """
    size, num_layers = len(order), costs.num_layers
    kept: list[dict[int, list[_Cut]]] = [{} for _ in range(size)]
    for place, device in enumerate(order):
        speed, room = topology.peers[device].flops, topology.peers[device].memory_bytes
        begun: dict[int, list[_Cut]] = {0: [(0.0, 0.0, (), ())]}
        for before in range(place):
            for start, found in kept[before].items():
                if start == num_layers:
                    continue
                received = _received_s(topology, costs, order[before], device, start)
                begun.setdefault(start, []).extend(
                    (latency + received, max(slowest, received), devices, starts) for latency, slowest, devices, starts in found
                )
        for start, options in begun.items():
            options = _undominated(options)
            for end in range(start + 1, num_layers + 1):
                if costs.memory_bytes(start, end) > room:
                    break
                computed = costs.flops(start, end) / speed
                kept[place].setdefault(end, []).extend(
                    (latency + computed, max(slowest, computed), (*devices, device), (*starts, start))
                    for latency, slowest, devices, starts in options
                )
        kept[place] = {end: _undominated(found) for end, found in kept[place].items()}
    whole = [found for each in kept for found in each.get(num_layers, [])]
    best = min(whole, key=lambda found: found[0] + (costs.num_microbatches - 1) * found[1], default=None)
    return measured(topology, costs, best[2], best[3]) if best else None


def _undominated(options: list[_Cut]) -> list[_Cut]:
    """Those of which no other is at least as good in both times."""
    best: list[_Cut] = []
    for option in sorted(options):
        if not best or option[1] < best[-1][1]:
            best.append(option)
    return best


def _received_s(topology: Topology, costs: LayerCosts, one: int, other: int, layer: int) -> float:
    """The transfers of a microbatch between two devices: activations there, and gradients back."""
    forth, back = costs.boundary_bytes(layer)
    return topology.hop_s(one, other, forth) + topology.hop_s(other, one, back)
