"""Costs of models that are known without building the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from peerd.config.manifest import Manifest
from peerd.planner.decoder import decoder_loads
from peerd.planner.workload import ModelLoads

_COUNTS: dict[str, Callable[[Any, int, int, str], ModelLoads]] = {"decoder": decoder_loads}
"""model.kind -> what counts its costs from (model, microbatch size, sequence length, precision)."""


def planned_loads(manifest: Manifest) -> ModelLoads | None:
    """The costs of one microbatch at full length; None for a kind that has to be built first."""
    count = _COUNTS.get(manifest.model.kind)
    train = manifest.train
    return count(manifest.model, train.microbatch_size, train.sequence_length, train.precision) if count else None
