"""Networks to plan for: the five of DT-FM's study, from their description, and irregular ones."""

from __future__ import annotations

from itertools import chain
from random import Random

from peerd.planner.network import PeerSpec, Topology
from peerd.planner.network_formats import BYTES_PER_GBIT

Regions = list[list[tuple[float, float]]]
"""Delay in ms and rate in Gbit/s between each region and those before it, itself last."""

UNITED_STATES: Regions = [  # Virginia, Oregon, California, Ohio
    [(5, 2)],
    [(67, 1.15), (5, 2)],
    [(59, 1.05), (12, 1.25), (5, 2)],
    [(11, 1.12), (49, 1.1), (52, 1.02), (5, 2)],
]
CITIES: Regions = [  # Oregon, Virginia, Ohio, Tokyo, Seoul, London, Frankfurt, Ireland
    [(5, 2)],
    [(67, 0.79), (5, 2)],
    [(49, 1.1), (11, 1.12), (5, 2)],
    [(96, 0.523), (143, 0.524), (130, 0.694), (5, 2)],
    [(124, 0.46), (172, 0.5), (159, 0.529), (34, 1.1), (5, 2)],
    [(136, 0.42), (76, 1.16), (86, 1.05), (210, 0.366), (238, 0.342), (5, 2)],
    [(143, 0.404), (90, 1.02), (99, 0.799), (223, 0.36), (235, 0.358), (14, 1.14), (5, 2)],
    [(124, 0.482), (67, 1.05), (77, 1.14), (199, 0.465), (228, 0.335), (12, 1.09), (24, 1.08), (5, 2)],
]
UNIVERSITIES: Regions = [[(1, 5)], [(11, 1.12), (1, 5)]]


def uniform(num_regions: int, inside: float, between: float) -> Regions:
    return [[(0.0, between)] * number + [(0.0, inside)] for number in range(num_regions)]


BEST_KNOWN = {0: 3.440, 1: 31.634, 2: 16.087, 3: 34.802, 4: 49.218}
"""Seconds an iteration."""


def study(case: int) -> Topology:
    """DT-FM's network: a data centre, spot instances of 4 and of 1 devices, two universities, four US regions, eight cities."""
    regions, counts = {
        0: (uniform(8, 100, 3.125), [8] * 8),
        1: (uniform(40, 100, 1.25), [4] * 8 + [1] * 32),
        2: (UNIVERSITIES, [32] * 2),
        3: (UNITED_STATES, [16] * 4),
        4: (CITIES, [8] * 8),
    }[case]
    region_of = list(chain.from_iterable([region] * count for region, count in enumerate(counts)))
    links = [[regions[max(a, b)][min(a, b)] for b in region_of] for a in region_of]
    return topology(links)


def topology(links: list[list[tuple[float, float]]]) -> Topology:
    """From the delay (ms) and the rate (Gbit/s) of each pair."""
    return Topology(
        tuple(PeerSpec(name=f"device-{number}") for number in range(len(links))),
        tuple(tuple(delay / 1e3 for delay, _ in row) for row in links),
        tuple(tuple(rate * BYTES_PER_GBIT for _, rate in row) for row in links),
    )


def shuffled(network: Topology, seed: int) -> Topology:
    order = list(range(len(network.peers)))
    Random(seed).shuffle(order)
    return network.part(order)


def irregular(num_devices: int, seed: int) -> Topology:
    """Every link has a delay and a rate of its own."""
    random = Random(seed)
    links = [[(0.0, 1.0)] * num_devices for _ in range(num_devices)]
    for a in range(num_devices):
        for b in range(a):
            links[a][b] = links[b][a] = (random.uniform(1, 200), 10 ** random.uniform(-1, 1))
    return topology(links)


def volunteers(num_devices: int, seed: int) -> Topology:
    """Homes and laboratories of 1 to 9 devices, each behind a line of its own, at places of their own."""
    random = Random(seed)
    home_of: list[int] = []
    while len(home_of) < num_devices:
        home_of += [len(home_of)] * random.choice([1, 1, 1, 2, 3, 5, 9])
    home_of = home_of[:num_devices]
    homes = {home: (random.random(), random.random(), 10 ** random.uniform(-1.5, 0)) for home in sorted(set(home_of))}

    def link(a: int, b: int) -> tuple[float, float]:
        (x, y, line), (u, v, other) = homes[home_of[a]], homes[home_of[b]]
        return (0.5, 10.0) if home_of[a] == home_of[b] else (5 + 100 * ((x - u) ** 2 + (y - v) ** 2) ** 0.5, min(line, other))

    return topology([[link(a, b) for b in range(num_devices)] for a in range(num_devices)])
