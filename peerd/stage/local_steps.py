"""Local steps: what one peer does to its own parameters within a step, and what it gives to the average.

A peer begins a step with the parameters that all its mates begin with. It updates its own after every `train.local_batch` of its
microbatches. At the step's end it gives its change of the parameters, times the number of microbatches behind it, in place of a sum of
gradients. The sum over all peers, divided by the step's microbatches, is a pseudo-gradient, which the run's optimizer applies
(DiLoCo, arXiv 2311.08105; each peer counts by what it has computed).

Gradients wait in an **open batch**. An update *seals* it: it can be dropped before that, and not after.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from peerd.config.manifest import Manifest
from peerd.stage.optimizer import Optimizer


class LocalSteps:
    """The parameters that one peer computes with. They change in place."""

    def __init__(self, manifest: Manifest, parameters: Mapping[str, nn.Parameter]) -> None:
        self.inner = Optimizer(manifest.inner, parameters)
        """Its moments are this peer's own. They go on from step to step, and no other peer learns them.

        With a synchronous beginning (`train.local_steps_after`) all peers' are those of the step at which it ends.
        """
        self.num_open = 0
        """Microbatches in the open batch."""
        self.num_sealed = 0
        """Microbatches behind the updates of this step."""
        self._local_batch = manifest.train.local_batch
        self._precision = torch.float64 if manifest.train.accumulate == "float64" else torch.float32
        self._parameters = {name: parameter.detach() for name, parameter in parameters.items()}
        self._begin = {name: torch.empty_like(value) for name, value in self._parameters.items()}
        self._sums = {name: torch.zeros_like(value, dtype=self._precision) for name, value in self._parameters.items()}
        self.begin()

    @property
    def is_full(self) -> bool:
        """Whether the open batch is to be sealed."""
        return self.num_open >= self._local_batch

    def begin(self, parameters: Mapping[str, Tensor] | None = None) -> None:
        """Begin a step with these parameters, or with the present ones."""
        for name, value in self._parameters.items():
            if parameters is not None:
                value.copy_(parameters[name].detach())
            self._begin[name].copy_(value)
        self.drop()
        self.num_sealed = 0

    def add(self, gradients: Mapping[str, Tensor]) -> None:
        """Add the gradients of one microbatch to the open batch."""
        for name, total in self._sums.items():
            total.add_(gradients[name])
        self.num_open += 1

    def drop(self) -> None:
        """Empty the open batch without an update."""
        for total in self._sums.values():
            total.zero_()
        self.num_open = 0

    def seal(self, step: int) -> None:
        """Make an update of the mean gradient of the open batch, which may be a smaller one at the end of a step, or empty."""
        if self.num_open:
            self.inner.update(step, self._sums, lambda total: total / self.num_open)
            self.num_sealed += self.num_open
            self.drop()

    def contribution(self) -> dict[str, Tensor]:
        """The change of each parameter since the step began, downhill, times the sealed microbatches: this peer's share of the sum."""
        return {name: change_of(self._begin[name], value, self.num_sealed, self._precision) for name, value in self._parameters.items()}


def change_of(begun: Tensor, now: Tensor, num_microbatches: int, precision: torch.dtype) -> Tensor:
    """What a peer gives to the average: how far its updates have moved a parameter, downhill, times the microbatches behind them."""
    return (begun.to(precision) - now.to(precision)).mul_(num_microbatches)
