"""Models whose costs are known without building them."""

from __future__ import annotations

from collections.abc import Callable

from peerd.config.manifest import Manifest, ModelConfig
from peerd.planner.decoder import decoder_loads
from peerd.planner.workload import ModelLoads

PLANNED: dict[str, Callable[[ModelConfig, int, int], ModelLoads]] = {"decoder": decoder_loads}
"""Manifest's model.kind -> costs of (model, microbatch, sequence)."""


def planned_loads(manifest: Manifest) -> ModelLoads | None:
    """Costs of one microbatch at full length; None for a kind that must be built to know."""
    planned, train = PLANNED.get(manifest.model.kind), manifest.train
    return planned(manifest.model, train.microbatch_size, train.sequence_length) if planned else None
