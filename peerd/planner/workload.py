"""The costs of a stage: work, memory and traffic, as sums over the parts of the model that it holds.

Each kind of model supplies the costs of its parts (`decoder.py` for the built-in one).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, fields

from peerd.config.codec import Codec, parse_allowed, parse_averaged
from peerd.config.manifest import Manifest, TrainConfig

FLOAT32_BYTES = 4
BACKWARD_SHARE = 2
"""A backward pass computes two products for each of the forward pass: one for the weights and one for the inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The cost of a part of a model, for one microbatch."""

    num_parameters: int = 0
    num_tied: int = 0
    """Parameters of which another stage holds a copy."""
    num_sides: int = 0
    """Sum of the rows and columns of its matrices."""
    num_in_vectors: int = 0
    """Parameters that are not in a matrix."""
    forward_flops: int = 0
    """Matrix products only."""
    graph_bytes: int = 0
    """Bytes that autograd keeps between forward and backward."""

    def __add__(self, other: Load) -> Load:
        return self._combined(operator.add, other)

    def __sub__(self, other: Load) -> Load:
        return self._combined(operator.sub, other)

    def _combined(self, combine: Callable[[int, int], int], other: Load) -> Load:
        return Load(**{each.name: combine(getattr(self, each.name), getattr(other, each.name)) for each in fields(Load)})

    @property
    def parameter_bytes(self) -> int:
        return FLOAT32_BYTES * self.num_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoads:
    """The loads of the parts that stages consist of."""

    first: Load
    """Only the first stage has it: the embedding."""
    groups: tuple[Load, ...]
    """One load per group of layers that share weights; a layer that shares none is a group."""
    last: Load
    """Only the last stage has it: the final norm, the head and the loss."""
    narrowing: Load = Load()
    """Before a narrow boundary; `widening` is what follows it."""
    widening: Load = Load()
    shared: Load = Load()
    """Counted in both `first` and `last`, but only once in a stage that has both."""


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


def optimizer_bytes(train: TrainConfig) -> int:
    """Bytes of the optimizer's state per parameter: both moments for AdamW and LAMB, the velocity for SGD with momentum.

    The scales of packed moments are not counted, a five-hundredth of them; nor that vectors keep 32 bits.
    """
    numbers = int(train.momentum > 0) if train.optimizer == "sgd" else 2
    return numbers * train.optimizer_bits // 8


def stage_memory_bytes(manifest: Manifest, load: Load, slots: int, *, on_gpu: bool = False) -> int:
    """Bytes of device memory that serving a stage takes with `slots` microbatches in hand.

    Per parameter: the current and the previous value, the gradient, the accumulator and the optimizer's state; during a round a
    copy of the accumulator, the received parts and the reduced sum; with evaluation the value at the evaluated step; with delayed
    updates the value of the next step; with overlapping steps the next step's accumulator; with parameter averaging the round's
    three again. A GPU does not hold the state that compute.offload_optimizer keeps in the machine's memory. Per slot: the input
    and the output's gradient. Graphs: one per slot if compute.recompute is "never", else one at a time ("auto" recomputes when
    memory is short). Compressed averaging keeps the residuals of parts and sums. For a tied weight, the other stage's gradients
    and the sum. Torch itself and the allocator's slack are not counted.
    """
    train = manifest.train
    accumulator_bytes = 8 if train.accumulate == "float64" else FLOAT32_BYTES
    num_in_round = 6 if train.average_parameters_every_steps else 3
    num_accumulators = 1 + num_in_round + 2 * parse_averaged(manifest.wire.weight_gradients).is_lossy + train.overlaps_steps
    state_bytes = 0 if on_gpu and manifest.compute.offload_optimizer else optimizer_bytes(train)
    num_values = 3 + (train.evaluate_every_steps > 0) + train.delayed_updates
    num_graphs = slots if manifest.compute.recompute == "never" else min(slots, 1)
    return (
        load.num_parameters * (num_values * FLOAT32_BYTES + state_bytes + num_accumulators * accumulator_bytes)
        + load.num_tied * 2 * accumulator_bytes
        + slots * 2 * manifest.boundary_bytes
        + num_graphs * load.graph_bytes
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEstimate:
    """What serving this stage takes from a volunteer's machine."""

    layers: range
    load: Load
    memory_bytes: int
    """Memory of the device. `offloaded_bytes` are not in it, unless the device is the processor."""
    optimizer_bytes: int
    offloaded_bytes: int
    """The part of the optimizer's state that lies in the machine's own memory."""
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
    state_bytes = optimizer_bytes(manifest.train) * load.num_parameters
    accumulator_bytes = 8 if manifest.train.accumulate == "float64" else FLOAT32_BYTES
    return StageEstimate(
        layers=layers,
        load=load,
        memory_bytes=stage_memory_bytes(manifest, load, manifest.slots, on_gpu=True),
        optimizer_bytes=state_bytes,
        offloaded_bytes=state_bytes if manifest.compute.offload_optimizer else 0,
        flops_per_token=stage_flops(manifest, load, is_last) // tokens,
        upload_bytes_per_token=(forth + back) / tokens,
        averaging_bytes=2 * averaged_bytes(manifest, load, parse_averaged(wire.weight_gradients).most_exact)
        + load.num_tied * accumulator_bytes,
    )


def averaged_bytes(manifest: Manifest, load: Load, codec: Codec) -> int:
    """Size of a stage's gradients in this codec. Low-rank factors are counted for whole matrices, though rounds may split some."""
    if not codec.is_lossy:
        return load.num_parameters * (8 if manifest.train.accumulate == "float64" else FLOAT32_BYTES)
    factored = codec.rank * load.num_sides + load.num_in_vectors
    return codec.num_bytes(min(factored, load.num_parameters) if codec.rank else load.num_parameters)
