"""Models whose costs are known without building them."""

from __future__ import annotations

from peerd.config.manifest import Manifest, ModelConfig
from peerd.planner.decoder import decoder_loads
from peerd.planner.workload import ModelLoads


def planned_loads(manifest: Manifest) -> ModelLoads | None:
    """Costs of one microbatch at full length; None for a kind that must be built to know."""
    model, train = manifest.model, manifest.train
    return decoder_loads(model, train.microbatch_size, train.sequence_length) if isinstance(model, ModelConfig) else None
