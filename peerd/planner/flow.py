"""The most that flows through layers of nodes, each with a capacity, along edges between neighbouring layers, each with one too."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise

LEAST_SHARE = 1e-9
"""Of the largest capacity: flows below it are rounding."""


def most_flow(nodes: Sequence[Sequence[float]], edges: Sequence[Sequence[Sequence[float]]]) -> float:
    """`nodes[layer][i]` are capacities, `edges[layer][i][j]` those from node i of a layer to node j of the next.

    Dinic's algorithm on a graph in which each node is an entry and an exit.
    """
    graph = _Graph()
    last = len(nodes) - 1
    for layer, capacities in enumerate(nodes):
        for i, capacity in enumerate(capacities):
            graph.connect((layer, i, "in"), (layer, i, "out"), capacity)
            if layer == 0:
                graph.connect(_SOURCE, (0, i, "in"), capacity)
            if layer == last:
                graph.connect((last, i, "out"), _SINK, capacity)
            elif layer < last:
                for j, each in enumerate(edges[layer][i]):
                    graph.connect((layer, i, "out"), (layer + 1, j, "in"), min(each, capacity))
    return graph.most()


Node = tuple[int, int, str]
_SOURCE, _SINK = (-1, 0, "out"), (-2, 0, "in")


class _Graph:
    def __init__(self) -> None:
        self._left: dict[Node, dict[Node, float]] = {}
        """What each edge still carries."""

    def connect(self, start: Node, end: Node, capacity: float) -> None:
        self._left.setdefault(start, {})[end] = capacity
        self._left.setdefault(end, {}).setdefault(start, 0.0)

    def most(self) -> float:
        least = LEAST_SHARE * max(self._left[_SOURCE].values())
        total = 0.0
        while True:
            levels = self._levels(least)
            if _SINK not in levels:
                return total
            turns = {node: iter(list(ends)) for node, ends in self._left.items()}
            while path := self._path(levels, turns, least):
                carried = min(self._left[a][b] for a, b in pairwise(path))
                for a, b in pairwise(path):
                    self._left[a][b] -= carried
                    self._left[b][a] += carried
                total += carried

    def _levels(self, least: float) -> dict[Node, int]:
        levels, waiting = {_SOURCE: 0}, deque([_SOURCE])
        while waiting:
            node = waiting.popleft()
            for end, left in self._left[node].items():
                if left > least and end not in levels:
                    levels[end] = levels[node] + 1
                    waiting.append(end)
        return levels

    def _path(self, levels: dict[Node, int], turns: dict[Node, Iterator[Node]], least: float) -> list[Node]:
        """A shortest path with capacity left; an edge that was tried in vain is not tried again in this phase."""
        path = [_SOURCE]
        while path[-1] != _SINK:
            node = path[-1]
            for end in turns[node]:
                if self._left[node][end] > least and levels.get(end) == levels[node] + 1:
                    path.append(end)
                    break
            else:
                path.pop()
                if not path:
                    return []
        return path
