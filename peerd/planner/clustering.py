"""Which devices are near one another: average linkage."""

from __future__ import annotations

from collections.abc import Sequence

from peerd.planner.matching import Matrix

Merge = tuple[float, tuple[int, ...], tuple[int, ...]]
"""Two clusters that are joined, and their mean distance."""


def average_linkage(distances: Matrix) -> list[Merge]:
    """All merges of agglomerative clustering by mean distance, nearest first. Chains of nearest neighbours find them in n^2 steps."""
    size = len(distances)
    far = [list(row) for row in distances]
    members: dict[int, tuple[int, ...]] = {each: (each,) for each in range(size)}
    merges: list[Merge] = []
    chain: list[int] = []
    while len(members) > 1:
        if not chain:
            chain.append(min(members))
        last = chain[-1]
        row = far[last]
        before = chain[-2] if len(chain) > 1 else -1
        nearest = min((other for other in members if other != last), key=lambda other: (row[other], other != before, other))
        if nearest != before:
            chain.append(nearest)
            continue
        del chain[-2:]
        kept, gone = min(last, nearest), max(last, nearest)
        merges.append((row[nearest], members[kept], members[gone]))
        here, there = len(members[kept]), len(members[gone])
        for other in members:
            if other not in (kept, gone):
                far[kept][other] = far[other][kept] = (here * far[kept][other] + there * far[gone][other]) / (here + there)
        members[kept] += members.pop(gone)
    return sorted(merges, key=lambda merge: merge[0])


def clusters_at(merges: Sequence[Merge], size: int, num_clusters: int) -> list[tuple[int, ...]]:
    """The clusters when so many are left: neighbours in the tree stand side by side."""
    cluster_of: dict[int, tuple[int, ...]] = {each: (each,) for each in range(size)}
    inside = len(merges) + 1 - num_clusters
    for _, one, other in merges[:inside]:
        joined = cluster_of[one[0]] + cluster_of[other[0]]
        for each in joined:
            cluster_of[each] = joined
    found = {cluster[0]: cluster for cluster in cluster_of.values()}
    position = {each: place for place, each in enumerate(_leaves(merges, size))}
    return sorted(found.values(), key=lambda cluster: min(position[each] for each in cluster))


def _leaves(merges: Sequence[Merge], size: int) -> tuple[int, ...]:
    """All devices as the whole tree orders them."""
    order: dict[int, tuple[int, ...]] = {each: (each,) for each in range(size)}
    for _, one, other in merges:
        joined = order[one[0]] + order[other[0]]
        for each in joined:
            order[each] = joined
    return order[0]
