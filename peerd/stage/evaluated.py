"""Evaluation in one stage: the parameters of an evaluated step are set aside, so that training does not wait for it."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from peerd.config.manifest import Manifest
from peerd.errors import WrongStateError
from peerd.models.module import StageModule
from peerd.stage.precision import run_module


class EvaluatedStep:
    """The last evaluated step that was left behind, until the next one is. Touches neither accumulator nor ledger."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._module: StageModule | None = None
        self.step: int | None = None
        """Whose parameters are set aside."""

    def set_aside(self, step: int, module: StageModule) -> None:
        """Before the parameters of `step` change."""
        if self._manifest.train.evaluates_at(step):
            self.step, self._module = step, copy.deepcopy(module)

    def forget(self) -> None:
        """The stage's state is another one now, maybe of another lineage."""
        self.step = self._module = None

    def forward(self, step: int, now: tuple[int, StageModule], inputs: Tensor, labels: Tensor) -> Tensor:
        """Activations, or from the last stage the loss. `now` is the stage's step and module. WrongStateError where `step` is gone."""
        module = now[1] if step == now[0] else self._module if step == self.step else None
        if module is None:
            raise WrongStateError(f"this peer does not hold the parameters of step {step}")
        with torch.no_grad():
            return run_module(self._manifest.train, module, inputs, labels if module.is_last else None)
