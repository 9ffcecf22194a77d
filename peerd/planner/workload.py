"""What a stage costs: work, memory and traffic, as sums over the parts of the model it holds.

Where the parts' costs come from is the model's affair (`decoder.py` for the built-in one).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from peerd.config.codec import parse_allowed, parse_averaged
from peerd.config.manifest import Manifest, TrainConfig

FLOAT32_BYTES = 4
BACKWARD_SHARE = 2
"""A backward pass makes two products for each of the forward pass: for the weights and for the inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a part of a model takes for one microbatch."""

    num_parameters: int = 0
    num_tied: int = 0
    """Those of them that another stage holds, too."""
    num_sides: int = 0
    """Rows and columns of its matrices, all added up."""
    num_in_vectors: int = 0
    """Parameters that are in no matrix."""
    forward_flops: int = 0
    """Matrix products only."""
    graph_bytes: int = 0
    """What autograd keeps between forward and backward."""

    def __add__(self, other: Load) -> Load:
        return Load(
            num_parameters=self.num_parameters + other.num_parameters,
            num_tied=self.num_tied + other.num_tied,
            num_sides=self.num_sides + other.num_sides,
            num_in_vectors=self.num_in_vectors + other.num_in_vectors,
            forward_flops=self.forward_flops + other.forward_flops,
            graph_bytes=self.graph_bytes + other.graph_bytes,
        )

    def __sub__(self, other: Load) -> Load:
        return self + Load(
            num_parameters=-other.num_parameters,
            num_tied=-other.num_tied,
            num_sides=-other.num_sides,
            num_in_vectors=-other.num_in_vectors,
            forward_flops=-other.forward_flops,
            graph_bytes=-other.graph_bytes,
        )

    @property
    def parameter_bytes(self) -> int:
        return FLOAT32_BYTES * self.num_parameters


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
    shared: Load = Load()
    """What `first` and `last` both count, and one stage that has both has once."""


def stage_load(manifest: Manifest, loads: ModelLoads, layers: range) -> Load:
    """What a stage of these layers takes."""
    model = manifest.model
    is_first, is_last = layers.start == 0, layers.stop == model.num_layers
    inside = sum(layers.start < layer < layers.stop for layer in model.boundary_layers)
    size = model.layers_per_group
    parts = [*loads.groups[layers.start // size : layers.stop // size]]
    parts += [loads.narrowing] * (inside + (not is_last)) + [loads.widening] * (inside + (not is_first))
    parts += [loads.first] * is_first + [loads.last] * is_last
    return sum(parts, Load()) - (loads.shared if is_first and is_last else Load())


def stage_flops(manifest: Manifest, load: Load, is_last: bool) -> int:
    """Forward and backward of one microbatch, with the forward pass made twice where graphs are not kept.

    The last stage goes backward at once and never computes anything again.
    """
    again = manifest.compute.recompute == "always" and not is_last
    return (1 + BACKWARD_SHARE + again) * load.forward_flops


def optimizer_numbers(train: TrainConfig) -> int:
    """Numbers per parameter that the optimizer keeps: both moments of AdamW and LAMB, SGD's velocity where it has momentum."""
    return int(train.momentum > 0) if train.optimizer == "sgd" else 2


def stage_memory_bytes(manifest: Manifest, load: Load, slots: int, *, on_gpu: bool = False) -> int:
    """Bytes that serving a stage takes of its device's memory with `slots` microbatches in hand.

    Per parameter: the current and the previous value, the gradient, the accumulator and the optimizer's state, and during a round
    a copy of the accumulator, the parts that come in and the sum that goes out; with evaluation the value at the evaluated
    step, with delayed updates the value of the next and, where steps overlap, the next step's accumulator, and where parameters
    are averaged the round's three for them, too. A GPU does not hold the state that compute.offload_optimizer leaves to the
    machine. Per slot: the input and the output's gradient. Graphs: one per slot where compute.recompute is "never", else one at a
    time ("auto" recomputes when memory is short). Compressed averaging keeps what parts and sums left out. Of a tied weight the other
    stage's gradients come in, and the sum is kept beside. Torch itself and the allocator's slack are not counted.
    """
    train = manifest.train
    accumulator_bytes = 8 if train.accumulate == "float64" else FLOAT32_BYTES
    num_in_round = 6 if train.average_parameters_every_steps else 3
    num_accumulators = 1 + num_in_round + 2 * parse_averaged(manifest.wire.weight_gradients).is_lossy + train.overlaps_steps
    num_state = 0 if on_gpu and manifest.compute.offload_optimizer else optimizer_numbers(train)
    num_values = 3 + num_state + (train.evaluate_every_steps > 0) + train.delayed_updates
    num_graphs = slots if manifest.compute.recompute == "never" else min(slots, 1)
    return (
        load.num_parameters * (num_values * FLOAT32_BYTES + num_accumulators * accumulator_bytes)
        + load.num_tied * 2 * accumulator_bytes
        + slots * 2 * manifest.boundary_bytes
        + num_graphs * load.graph_bytes
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEstimate:
    """What a volunteer who serves this stage gives."""

    layers: range
    load: Load
    memory_bytes: int
    """Of its device: without `offloaded_bytes`, unless that is the processor."""
    optimizer_bytes: int
    offloaded_bytes: int
    """Of the optimizer's state, in the machine's own memory."""
    flops_per_token: int
    """Forward and backward."""
    upload_bytes_per_token: float
    """Activations to the next stage and gradients to the one before, uncompressed where the run says `auto`; what averaging takes
    comes on top, once a step."""
    averaging_bytes: int
    """Uploaded per step in a large stage: a part to each reducer, and the reduced slice to each member; and a tied weight's gradients."""


def estimate_stage(manifest: Manifest, loads: ModelLoads, layers: range) -> StageEstimate:
    load = stage_load(manifest, loads, layers)
    is_first, is_last = layers.start == 0, layers.stop == manifest.model.num_layers
    tokens, wire = manifest.tokens_per_microbatch, manifest.wire
    forwards, backwards = (parse_allowed(name).most_exact for name in (wire.activations, wire.activation_gradients))
    forth = 0 if is_last else forwards.num_bytes(math.prod(manifest.boundary_shape(layers.stop)))
    back = 0 if is_first else backwards.num_bytes(math.prod(manifest.boundary_shape(layers.start)))
    optimizer_bytes = optimizer_numbers(manifest.train) * load.parameter_bytes
    accumulator_bytes = 8 if manifest.train.accumulate == "float64" else FLOAT32_BYTES
    return StageEstimate(
        layers=layers,
        load=load,
        memory_bytes=stage_memory_bytes(manifest, load, manifest.slots, on_gpu=True),
        optimizer_bytes=optimizer_bytes,
        offloaded_bytes=optimizer_bytes if manifest.compute.offload_optimizer else 0,
        flops_per_token=stage_flops(manifest, load, is_last) // tokens,
        upload_bytes_per_token=(forth + back) / tokens,
        averaging_bytes=2 * _averaged_bytes(manifest, load, accumulator_bytes) + load.num_tied * accumulator_bytes,
    )


def _averaged_bytes(manifest: Manifest, load: Load, accumulator_bytes: int) -> int:
    """A stage's gradients as its peers send them to be averaged; before rounds cut matrices apart, where they travel as factors."""
    codec = parse_averaged(manifest.wire.weight_gradients).most_exact
    if not codec.is_lossy:
        return load.num_parameters * accumulator_bytes
    factored = codec.rank * load.num_sides + load.num_in_vectors
    return codec.num_bytes(min(factored, load.num_parameters) if codec.rank else load.num_parameters)
