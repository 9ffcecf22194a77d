"""Evaluation in one stage: the parameters of an evaluated step are set aside, so that training does not wait for the evaluation."""

from __future__ import annotations

import torch
from torch import Tensor

from peerd.config.manifest import Manifest
from peerd.errors import WrongStateError
from peerd.models.module import StageModule
from peerd.stage.places import Places
from peerd.stage.precision import run_module


class EvaluatedStep:
    """The parameters of the last evaluated step, kept until the next evaluated step ends. Touches neither accumulator nor ledger."""

    def __init__(self, manifest: Manifest, places: Places) -> None:
        self._manifest = manifest
        self._places = places
        self._module: StageModule | None = None
        self.step: int | None = None
        """The step whose parameters are set aside."""
        self.num_bytes = 0
        """Of the copy."""

    def set_aside(self, step: int, module: StageModule) -> None:
        """Keep a copy if `step` is evaluated. Called before the parameters of `step` change."""
        if self._manifest.train.evaluates_at(step):
            self.step, self._module = step, self._places.set_aside(module)
            self.num_bytes = sum(each.nbytes for each in (*self._module.parameters(), *self._module.buffers()))

    def forget(self) -> None:
        """Drop the copy: the stage has loaded another state, possibly of another lineage."""
        self.step = self._module = None
        self.num_bytes = 0

    def module_of(self, step: int, now: tuple[int, StageModule]) -> StageModule:
        """The module with the parameters of `step`. `now`: the stage's step and module. Raises WrongStateError if they are not here."""
        module = now[1] if step == now[0] else self._module if step == self.step else None
        if module is None:
            raise WrongStateError(f"this peer does not hold the parameters of step {step}")
        return module

    def forward(self, step: int, now: tuple[int, StageModule], inputs: Tensor, labels: Tensor) -> Tensor:
        """The activations, or at the last stage the loss. `now`: the stage's step and module. Raises WrongStateError if `step` is gone."""
        module = self.module_of(step, now)
        with torch.no_grad():
            return run_module(self._manifest.train, self._places.to_compute(module), inputs, labels if module.needs_labels else None)
