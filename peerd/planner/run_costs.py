"""What the stages of a run ask of its peers, for the model of the steady state."""

from __future__ import annotations

from collections.abc import Sequence

from peerd.config.codec import parse_averaged
from peerd.config.manifest import Manifest
from peerd.planner.link_needs import boundary_bytes
from peerd.planner.memory import least_on_device, stage_memory
from peerd.planner.steady import RunCost, StageDemand
from peerd.planner.workload import ModelLoads, averaged_bytes, stage_flops, stage_load


def run_cost(manifest: Manifest, loads: ModelLoads, cut: Sequence[range]) -> RunCost:
    """The run with these layers in each stage, in the smallest codecs that it allows."""
    return RunCost(
        stages=tuple(stage_cost(manifest, loads, layers) for layers in cut),
        microbatches_per_step=manifest.train.microbatches_per_step,
        tokens_per_microbatch=manifest.tokens_per_microbatch,
        is_averaging_hidden=manifest.train.delayed_updates,
        slots=manifest.slots,
    )


def stage_cost(manifest: Manifest, loads: ModelLoads, layers: range) -> StageDemand:
    load = stage_load(manifest, loads, layers)
    forth, back = boundary_bytes(manifest, layers.stop)
    return StageDemand(
        flops=stage_flops(manifest, load, layers.stop == manifest.model.num_layers),
        memory_bytes=stage_memory(manifest, load, manifest.slots, least_on_device(manifest)).device,
        forth_bytes=forth,
        back_bytes=back,
        gradient_bytes=averaged_bytes(manifest, load, parse_averaged(manifest.wire.weight_gradients).codecs[-1]),
    )
