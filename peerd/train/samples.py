"""Sources of microbatches: a corpus of tokens, or a model that makes its own samples."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from peerd.config.manifest import Manifest
from peerd.config.model_kinds import BlocksConfig


class Microbatches(Protocol):
    """Contract: a microbatch depends on the run, the step and the index alone, and is the same on every machine."""

    def microbatch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels of microbatch (step, index)."""
        ...

    def evaluation_microbatch(self, index: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels of an evaluation's microbatch. They are the same in every evaluation, and never trained on."""
        ...


class Samples:
    """The samples of a run whose model is a list of blocks; any peer that has the package can make them."""

    def __init__(self, manifest: Manifest) -> None:
        from peerd.models.blocks import load_entry  # runs of other kinds do not need it

        self._model = load_entry(manifest.model_as(BlocksConfig).entry)
        self._seed = manifest.seed
        self._count = manifest.train.microbatch_size

    def microbatch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        return self._model.samples(self._seed, step, index, self._count)

    def evaluation_microbatch(self, index: int) -> tuple[Tensor, Tensor]:
        from peerd.models.blocks import EVALUATION_STEP

        return self.microbatch(EVALUATION_STEP, index)
