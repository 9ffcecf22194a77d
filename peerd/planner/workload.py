"""What a stage costs: work, memory and traffic, as sums over the parts of the model it holds.

Where the parts' costs come from is the model's affair (`decoder.py` for the built-in one).
"""

from __future__ import annotations

from dataclasses import dataclass

from peerd.config.codec import parse_allowed
from peerd.config.manifest import Manifest

FLOAT32_BYTES = 4
MOMENTS = 2
"""Numbers per parameter that AdamW keeps."""
BACKWARD_SHARE = 2
"""A backward pass makes two products for each of the forward pass: for the weights and for the inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a part of a model takes for one microbatch."""

    num_parameters: int = 0
    forward_flops: int = 0
    """Matrix products only."""
    graph_bytes: int = 0
    """What autograd keeps between forward and backward."""

    def __add__(self, other: Load) -> Load:
        return Load(
            num_parameters=self.num_parameters + other.num_parameters,
            forward_flops=self.forward_flops + other.forward_flops,
            graph_bytes=self.graph_bytes + other.graph_bytes,
        )

    def __sub__(self, other: Load) -> Load:
        return self + Load(num_parameters=-other.num_parameters, forward_flops=-other.forward_flops, graph_bytes=-other.graph_bytes)

    @property
    def parameter_bytes(self) -> int:
        return FLOAT32_BYTES * self.num_parameters

    @property
    def optimizer_bytes(self) -> int:
        return MOMENTS * self.parameter_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoads:
    """A model as the parts that stages are made of."""

    first: Load
    """What only the first stage has: the embedding."""
    groups: tuple[Load, ...]
    """Layers that share weights, together; one each where none do."""
    last: Load
    """What only the last stage has: the final norm, the head and the loss."""
    narrowing: Load = Load()
    """At the end of what is before a narrow boundary."""
    widening: Load = Load()


def stage_load(manifest: Manifest, loads: ModelLoads, layers: range) -> Load:
    """What a stage of these layers takes."""
    model = manifest.model
    is_first, is_last = layers.start == 0, layers.stop == model.num_layers
    inside = sum(layers.start < layer < layers.stop for layer in model.boundary_layers)
    size = model.layers_per_group
    parts = [*loads.groups[layers.start // size : layers.stop // size]]
    parts += [loads.narrowing] * (inside + (not is_last)) + [loads.widening] * (inside + (not is_first))
    parts += [loads.first] * is_first + [loads.last] * is_last
    return sum(parts, Load())


def stage_flops(manifest: Manifest, load: Load, is_last: bool) -> int:
    """Forward and backward of one microbatch, with the forward pass made twice where graphs are not kept.

    The last stage goes backward at once and never computes anything again.
    """
    again = manifest.compute.recompute == "always" and not is_last
    return (1 + BACKWARD_SHARE + again) * load.forward_flops


def stage_memory_bytes(manifest: Manifest, load: Load, slots: int) -> int:
    """Bytes that serving a stage takes with `slots` microbatches in hand.

    Per parameter: the current and the previous value, the gradient, the accumulator and Adam's two moments, and during a round
    a copy of the accumulator, the parts that come in and the sum that goes out; with evaluation the value at the evaluated
    step. Per slot: the input and the output's gradient. Graphs: one per slot where compute.recompute is "never", else one at a
    time ("auto" recomputes when memory is short). Compressed averaging keeps what parts and sums left out. Torch itself and the
    allocator's slack are not counted.
    """
    accumulator_bytes = 8 if manifest.train.accumulate == "float64" else FLOAT32_BYTES
    num_accumulators = 6 if parse_allowed(manifest.wire.weight_gradients).is_lossy else 4
    num_graphs = slots if manifest.compute.recompute == "never" else min(slots, 1)
    return (
        load.num_parameters
        * ((3 + MOMENTS + (manifest.train.evaluate_every_steps > 0)) * FLOAT32_BYTES + num_accumulators * accumulator_bytes)
        + slots * 2 * manifest.boundary_bytes
        + num_graphs * load.graph_bytes
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEstimate:
    """What a volunteer who serves this stage gives."""

    layers: range
    load: Load
    memory_bytes: int
    flops_per_token: int
    """Forward and backward."""
    upload_bytes_per_token: float
    """Activations to the next stage and gradients to the one before, uncompressed where the run says `auto`; what averaging takes
    comes on top, once a step."""
    averaging_bytes: int
    """Uploaded per step in a large stage: a part to each reducer, and the reduced slice to each member."""


def estimate_stage(manifest: Manifest, loads: ModelLoads, layers: range) -> StageEstimate:
    load = stage_load(manifest, loads, layers)
    is_first, is_last = layers.start == 0, layers.stop == manifest.model.num_layers
    tokens, wire = manifest.tokens_per_microbatch, manifest.wire
    num_values, part = manifest.boundary_bytes // FLOAT32_BYTES, parse_allowed(wire.weight_gradients).most_exact
    forth, back = (parse_allowed(name).most_exact.num_bytes(num_values) for name in (wire.activations, wire.activation_gradients))
    raw_bytes = load.num_parameters * (8 if manifest.train.accumulate == "float64" else FLOAT32_BYTES)
    return StageEstimate(
        layers=layers,
        load=load,
        memory_bytes=stage_memory_bytes(manifest, load, manifest.slots),
        flops_per_token=stage_flops(manifest, load, is_last) // tokens,
        upload_bytes_per_token=((not is_last) * forth + (not is_first) * back) / tokens,
        averaging_bytes=2 * (part.num_bytes(load.num_parameters) if part.is_lossy else raw_bytes),
    )
