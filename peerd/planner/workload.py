"""The costs of a stage: work, memory and traffic, as sums over the parts of the model that it holds.

Each kind of model supplies the costs of its parts (`decoder.py` for the built-in one).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from peerd.config.codec import Codec, parse_allowed, parse_averaged
from peerd.config.manifest import Manifest
from peerd.planner.load import FLOAT32_BYTES as FLOAT32_BYTES
from peerd.planner.load import Load as Load
from peerd.planner.load import ModelLoads as ModelLoads
from peerd.planner.memory import Placing, least_on_device, optimizer_bytes, stage_memory, sum_bytes

BACKWARD_SHARE = 2
"""A backward pass computes two products for each of the forward pass: one for the weights and one for the inputs."""


def stage_load(manifest: Manifest, loads: ModelLoads, layers: range) -> Load:
    """The load of a stage that holds these layers."""
    model = manifest.model
    is_first, is_last = layers.start == 0, layers.stop == model.num_layers
    inside = sum(layers.start < layer < layers.stop for layer in model.boundary_layers)
    size = model.layers_per_group
    parts = [*loads.groups[layers.start // size : layers.stop // size]]
    parts += [loads.narrowing] * (inside + (not is_last)) + [loads.widening] * (inside + (not is_first))
    parts += [loads.first] * is_first + [loads.last] * is_last
    return sum(parts, Load()) - (loads.shared if is_first and is_last else Load())


def stage_flops(manifest: Manifest, load: Load, is_last: bool) -> int:
    """The forward and backward passes of one microbatch; the forward pass counts twice if graphs are not kept.

    The last stage goes backward at once and never recomputes.
    """
    again = manifest.compute.recompute == "always" and not is_last
    return (1 + BACKWARD_SHARE + again) * load.forward_flops


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEstimate:
    """What serving this stage takes from a volunteer's machine."""

    layers: range
    load: Load
    memory_bytes: int
    """Memory of a device that has its own, with what compute.offload leaves on it at least."""
    host_bytes: int
    """The machine's memory beside it."""
    together_bytes: int
    """Where one memory holds all, as on a processor."""
    optimizer_bytes: int
    flops_per_token: int
    """Forward and backward passes."""
    upload_bytes_per_token: float
    """Activations to the next stage and gradients to the one before, uncompressed if the run says `auto`. Averaging adds to this
    once a step."""
    averaging_bytes: int
    """Upload per step in a large stage: a part to each reducer, the reduced slice to each member, and a tied weight's gradients."""


def estimate_stage(manifest: Manifest, loads: ModelLoads, layers: range) -> StageEstimate:
    load = stage_load(manifest, loads, layers)
    is_first, is_last = layers.start == 0, layers.stop == manifest.model.num_layers
    tokens, wire = manifest.tokens_per_microbatch, manifest.wire
    forwards, backwards = (parse_allowed(name).most_exact for name in (wire.activations, wire.activation_gradients))
    forth = 0 if is_last else forwards.num_bytes(math.prod(manifest.boundary_shape(layers.stop)))
    back = 0 if is_first else backwards.num_bytes(math.prod(manifest.boundary_shape(layers.start)))
    apart = stage_memory(manifest, load, manifest.slots, least_on_device(manifest))
    return StageEstimate(
        layers=layers,
        load=load,
        memory_bytes=apart.device,
        host_bytes=apart.host,
        together_bytes=stage_memory(manifest, load, manifest.slots, Placing.TOGETHER).device,
        optimizer_bytes=optimizer_bytes(manifest.train, load),
        flops_per_token=stage_flops(manifest, load, is_last) // tokens,
        upload_bytes_per_token=(forth + back) / tokens,
        averaging_bytes=2 * averaged_bytes(manifest, load, parse_averaged(wire.weight_gradients).most_exact)
        + load.num_tied * sum_bytes(manifest.train),
    )


def averaged_bytes(manifest: Manifest, load: Load, codec: Codec) -> int:
    """Size of a stage's gradients in this codec. Low-rank factors are counted for whole matrices, though rounds may split some."""
    if not codec.is_lossy:
        return load.num_parameters * sum_bytes(manifest.train)
    factored = codec.rank * load.num_sides + load.num_in_vectors
    return codec.num_bytes(min(factored, load.num_parameters) if codec.rank else load.num_parameters)
