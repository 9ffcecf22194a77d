"""Local steps in one process: each stage in several copies, which compute and average as peers of a swarm do.

The copies that a microbatch passes are drawn from seed, step and stage, so that all copies of a stage get the same number of microbatches
to within one. A swarm's paths depend on who is faster; these are some that it could have gone. With a codec for averages the copies average
as a round does: each reduces a slice; the others' parts of it and its sum pass the codec, both with error feedback.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from peerd.averaging.compression import Compression
from peerd.config.codec import parse_averaged
from peerd.config.manifest import Manifest
from peerd.models.stages import StageModule
from peerd.stage.accumulator import views_of
from peerd.stage.local_steps import LocalSteps
from peerd.stage.optimizer import Optimizer
from peerd.table.record import AverageId

Backpropagate = Callable[[Sequence[StageModule], int], float]
"""Computes a microbatch of the step, by its index, through a module of each stage, which leaves gradients on these. Returns its loss."""


class Replicas:
    """All copies of all stages."""

    def __init__(self, manifest: Manifest, stages: Sequence[StageModule], num_replicas: int) -> None:
        self._manifest = manifest
        self._stages = [_Replicated(manifest, stage, num_replicas) for stage in stages]

    def begin_from(self, optimizers: Sequence[Optimizer]) -> None:
        """End a synchronous beginning: each copy's own updates go on with the moments of the steps before."""
        for stage, optimizer in zip(self._stages, optimizers, strict=True):
            stage.begin_from(optimizer)

    def mean_changes(self, step: int, backpropagate: Backpropagate) -> tuple[float, list[dict[str, Tensor]]]:
        """Make the local steps of a step. Returns the mean loss and, per stage, the change of each parameter per microbatch, downhill.

        The copies start from the stages' present parameters, which stay as they are.
        """
        num_microbatches = self._manifest.train.microbatches_per_step
        for stage in self._stages:
            stage.begin()
        paths = list(zip(*(stage.order(step) for stage in self._stages), strict=True))
        loss = 0.0
        for index, path in enumerate(paths):
            loss += backpropagate([stage.modules[number] for stage, number in zip(self._stages, path, strict=True)], index)
            for stage, number in zip(self._stages, path, strict=True):
                stage.take(step, number)
        return loss / num_microbatches, [stage.mean_change(step) for stage in self._stages]


class _Replicated:
    """The copies of one stage."""

    def __init__(self, manifest: Manifest, stage: StageModule, num_replicas: int) -> None:
        self._manifest = manifest
        self._stage = stage
        self.modules = [copy.deepcopy(stage) for _ in range(num_replicas)]
        self._steps = [LocalSteps(manifest, dict(module.named_parameters())) for module in self.modules]
        self._averages = Averages(manifest, [value.shape for value in stage.parameters()], num_replicas)

    def begin_from(self, optimizer: Optimizer) -> None:
        for steps in self._steps:
            steps.inner.begin_from(optimizer)

    def begin(self) -> None:
        parameters = dict(self._stage.named_parameters())
        for steps in self._steps:
            steps.begin(parameters)

    def order(self, step: int) -> list[int]:
        return copies_passed(self._manifest, self._stage.stage, step, len(self.modules))

    def take(self, step: int, number: int) -> None:
        """Add the gradients of a microbatch to this copy's open batch, and seal it if it is full."""
        steps, module = self._steps[number], self.modules[number]
        steps.add({name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None})
        module.zero_grad()
        if steps.is_full:
            steps.seal(step)

    def mean_change(self, step: int) -> dict[str, Tensor]:
        """Seal what is open, and average."""
        own = []
        for steps in self._steps:
            steps.seal(step)
            own.append(torch.cat([value.flatten() for value in steps.contribution().values()]))
        return self._averages.mean_of(step, own, dict(self._stage.named_parameters()))


def copies_passed(manifest: Manifest, stage: int, step: int, num_copies: int) -> list[int]:
    """The copy of a stage that each microbatch of the step passes."""
    drawn, copies = random.Random(f"{manifest.seed}/{step}/{stage}"), range(num_copies)
    number = manifest.train.microbatches_per_step
    return [each for _ in range(-(-number // num_copies)) for each in drawn.sample(copies, num_copies)][:number]


class Averages:
    """What the copies of a stage average, with the codec's errors of the steps before."""

    def __init__(self, manifest: Manifest, shapes: Sequence[torch.Size], num_copies: int) -> None:
        """`shapes`: of the stage's parameters."""
        dtype = torch.float64 if manifest.train.accumulate == "float64" else torch.float32
        allowed = parse_averaged(manifest.wire.weight_gradients)
        self._number = manifest.train.microbatches_per_step
        self._compressions = [Compression(allowed, dtype, shapes, num_exact=0) for _ in range(num_copies)]

    def mean_of(self, step: int, own: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The change of each parameter per microbatch. `own`: what each copy gives, all parameters in one vector."""
        total = self._sum_of(AverageId(step.to_bytes(8, "little")), own)
        return views_of(total / self._number, {name: value.shape for name, value in parameters.items()})

    def _sum_of(self, average_id: AverageId, own: Sequence[Tensor]) -> Tensor:
        """The sum of what each copy gives, as all of them receive it."""
        if len(own) == 1:
            return own[0]
        length, slices = len(own[0]), list[Tensor]()
        for reducer, by in enumerate(self._compressions):
            start, end = length * reducer // len(own), length * (reducer + 1) // len(own)
            where = by.piece(length, start, end, by.allowed.most_exact)
            parts = [
                each.kept(each.parts, average_id, where, values[start:end])
                if each is by
                else each.sent(each.parts, average_id, where, values[start:end])[0]
                for each, values in zip(self._compressions, own, strict=True)
            ]
            slices.append(by.sent(by.sums, average_id, where, sum(parts[1:], parts[0]))[0])
        for each in self._compressions:
            each.applied([average_id])
        return torch.cat(slices)
