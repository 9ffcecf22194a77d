"""The cost of a part of a model. The costs of a stage are sums over the parts that it holds."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, fields

FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The cost of a part of a model, for one microbatch."""

    num_parameters: int = 0
    num_tied: int = 0
    """Parameters of which another stage holds a copy."""
    num_sides: int = 0
    """Sum of the rows and columns of its matrices."""
    num_in_vectors: int = 0
    """Parameters that are not in a matrix."""
    num_in_layers: int = 0
    """Parameters in matrices of layers, which Muon updates."""
    forward_flops: int = 0
    """Matrix products only."""
    graph_bytes: int = 0
    """Bytes that autograd keeps between forward and backward."""

    def __add__(self, other: Load) -> Load:
        return self._combined(operator.add, other)

    def __sub__(self, other: Load) -> Load:
        return self._combined(operator.sub, other)

    def _combined(self, combine: Callable[[int, int], int], other: Load) -> Load:
        return Load(**{each.name: combine(getattr(self, each.name), getattr(other, each.name)) for each in fields(Load)})

    @property
    def parameter_bytes(self) -> int:
        return FLOAT32_BYTES * self.num_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoads:
    """The loads of the parts that stages consist of."""

    first: Load
    """Only the first stage has it: the embedding."""
    groups: tuple[Load, ...]
    """One load per group of layers that share weights; a layer that shares none is a group."""
    last: Load
    """Only the last stage has it: the final norm, the head and the loss."""
    narrowing: Load = Load()
    """Before a narrow boundary; `widening` is what follows it."""
    widening: Load = Load()
    shared: Load = Load()
    """Counted in both `first` and `last`, but only once in a stage that has both."""


def number_bytes(precision: str) -> int:
    """Bytes of a number that a pass computes in a run's `train.precision`."""
    return 2 if precision in ("bfloat16", "float16") else FLOAT32_BYTES
