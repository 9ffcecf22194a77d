"""Cuts a model into stages: the layers of a stage, its first weights, and the memory it needs.

Nothing here knows what a decoder is; kinds.py does.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import torch

from peerd.config.codec import as_matrix
from peerd.config.manifest import Manifest
from peerd.config.muon import layer_matrices_in
from peerd.errors import StageError
from peerd.models.kinds import builder_of
from peerd.models.module import StageModule as StageModule
from peerd.planner.cutting import resolved, stage_layers
from peerd.planner.kinds import planned_loads
from peerd.planner.link_needs import stage_traffic
from peerd.planner.load import Load
from peerd.planner.memory import EASY_SHARE, Memory, Placing, Room, optimizer_bytes, placing_in, stage_memory
from peerd.planner.workload import ModelLoads
from peerd.policy.round.needs import StageTraffic
from peerd.policy.swarm.rates import SampleDemand

MOST_SLOTS_FACTOR = 4
"""Upper bound of the slots for long links, as a multiple of the usual number, which fills a pipeline of short links."""


def layers_of(manifest: Manifest, stage: int) -> range:
    """The global indices of a stage's layers. Raises StageError if the run has no such stage."""
    num_stages = manifest.train.num_stages
    if not 0 <= stage < num_stages:
        raise StageError(f"there is no stage {stage}", f"this run's stages are 0 to {num_stages - 1}")
    return stage_layers(manifest, None if manifest.layer_counts else model_loads(manifest))[stage]


def model_loads(manifest: Manifest) -> ModelLoads:
    """The loads of the model's parts, for one microbatch at full length.

    If the planner does not know the kind of model, they are measured on stages that are built without memory.
    """
    return planned_loads(manifest) or measured_loads(manifest)


def with_cut(manifest: Manifest) -> Manifest:
    """The manifest with a cut by cost replaced by numbers of layers: what is signed must not depend on an estimate."""
    return manifest if manifest.layer_counts else resolved(manifest, model_loads(manifest))


def measured_loads(manifest: Manifest) -> ModelLoads:
    """The loads of any kind of model without narrow boundaries, measured on stages built on the meta device.

    They are measured as in a run of two stages, where no part is both first and last: a part costs the same in any number of stages.
    A group of layers costs what it adds to a stage that ends with the group before it, because whether autograd keeps the output
    between the two depends on both. Equal groups are measured once.
    """
    size, num_layers = manifest.model.layers_per_group, manifest.model.num_layers
    num_stages = 1 if num_layers == size else 2
    manifest = replace(manifest, train=replace(manifest.train, num_stages=num_stages, cut="even"))

    @functools.cache
    def load_of(stage: int, layers: range) -> Load:
        module = builder_of(manifest).stage(manifest, stage, layers)
        matrices = [parameter for parameter in module.parameters() if parameter.dim() > 1]
        return replace(
            _memory_load(manifest, module),
            num_sides=sum(sum(as_matrix(matrix.shape)) for matrix in matrices),
            num_in_vectors=sum(parameter.numel() for parameter in module.parameters() if parameter.dim() < 2),
            forward_flops=module.forward_flops(manifest.train.microbatch_size, manifest.train.sequence_length),
        )

    if num_stages == 1:
        return ModelLoads(first=Load(), groups=(load_of(0, range(num_layers)),), last=Load())
    kinds, groups, in_order = builder_of(manifest).layer_kinds(manifest), dict[object, Load](), list[Load]()
    for layer in range(0, num_layers, size):
        before = range(max(0, layer - size), layer)
        kind = (*(kinds[each] for each in before), kinds[layer])
        if kind not in groups:
            groups[kind] = load_of(0, range(before.start, layer + size)) - load_of(0, before)
        in_order.append(groups[kind])
    return ModelLoads(first=load_of(0, range(0)), groups=tuple(in_order), last=load_of(1, range(num_layers, num_layers)))


def input_of(manifest: Manifest, stage: int, sequence_length: int) -> tuple[str, tuple[int, ...]]:
    """Element type and shape of a microbatch's input to a stage: tokens or images for the first stage, hidden states for the others."""
    if stage > 0:
        return "float32", manifest.boundary_shape(layers_of(manifest, stage).start, sequence_length)
    return manifest.model.input_dtype, (manifest.train.microbatch_size, *manifest.model.sample_shape(sequence_length))


def labels_shape(manifest: Manifest, sequence_length: int) -> tuple[int, ...]:
    """The shape of a microbatch's int32 labels: one per token, or one per image."""
    return (manifest.train.microbatch_size, *manifest.model.labels_shape(sequence_length))


def build_stage(manifest: Manifest, stage: int, device: torch.device | str) -> StageModule:
    """A stage with its first weights, which are the same for every split and on every machine.

    Each parameter is drawn on the CPU from its own generator, seeded by the run's seed and the parameter's name.
    """
    module = _on_meta(manifest, stage)
    module.initialise(manifest.seed, torch.device(device))
    return module


def initial_parameter_spec(manifest: Manifest, stage: int) -> dict[str, tuple[int, ...]]:
    """Name -> shape of a stage's parameters, which are all float32, without allocating them."""
    return dict(_parameter_shapes(manifest, stage))


def whole_parameter_spec(manifest: Manifest) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the whole model's parameters. One that two stages hold counts once."""
    stages = range(manifest.train.num_stages)
    return {name: shape for stage in stages for name, shape in initial_parameter_spec(manifest, stage).items()}


@functools.lru_cache(maxsize=64)
def _parameter_shapes(manifest: Manifest, stage: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, tuple(parameter.shape)) for name, parameter in _on_meta(manifest, stage).named_parameters())


@functools.lru_cache(maxsize=4)
def stage_traffics(manifest: Manifest) -> tuple[StageTraffic, ...]:
    """What the peers of each stage send and receive."""
    found = []
    for stage in range(manifest.train.num_stages):
        shapes = [shape for _, shape in _parameter_shapes(manifest, stage)]
        load = Load(
            num_parameters=sum(math.prod(shape) for shape in shapes),
            num_sides=sum(sum(as_matrix(shape)) for shape in shapes if len(shape) > 1),
            num_in_vectors=sum(math.prod(shape) for shape in shapes if len(shape) < 2),
        )
        found.append(stage_traffic(manifest, load, layers_of(manifest, stage)))
    return tuple(found)


def tied_spec(manifest: Manifest, stage: int) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the parameters of a stage that another stage holds as well."""
    module = _on_meta(manifest, stage)
    return {name: tuple(module.get_parameter(name).shape) for name in module.tied_names}


def largest_state_bytes(manifest: Manifest) -> int:
    """Bytes of the largest stage's state: its parameters, the previous ones, and the optimizer's state."""
    loads = [_stage_load(manifest, stage) for stage in range(manifest.train.num_stages)]
    return max(2 * load.parameter_bytes + optimizer_bytes(manifest.train, load) for load in loads)


def estimate_forward_flops(manifest: Manifest, stage: int) -> int:
    """Floating-point operations of one microbatch's forward pass, matrix products only. The backward pass takes twice as many."""
    return _on_meta(manifest, stage).forward_flops(manifest.train.microbatch_size, manifest.train.sequence_length)


def stage_demands(manifest: Manifest, *, are_alike: bool) -> tuple[SampleDemand, ...]:
    """What a sample asks of a peer of each stage, in the smallest codecs. `are_alike`: all stages compute for equally long."""
    size, found = manifest.train.microbatch_size, []
    for stage, traffic in enumerate(stage_traffics(manifest)):
        work = 1.0 if are_alike else max(1.0, float(estimate_forward_flops(manifest, stage)))
        found.append(SampleDemand(work=work, sends=traffic.boundary_up / size, receives=traffic.boundary_down / size))
    return tuple(found)


@functools.lru_cache(maxsize=256)
def estimate_stage_memory(manifest: Manifest, stage: int, slots: int, placing: Placing = Placing.TOGETHER) -> Memory:
    """What serving a stage takes with `slots` microbatches in hand; `planner.memory.stage_memory` says what counts."""
    return stage_memory(manifest, _stage_load(manifest, stage), slots, placing)


def placing_of_stage(manifest: Manifest, stage: int, room: Room) -> Placing:
    """Where the tensors of a stage lie on a peer with this room."""
    return placing_in(room, manifest, _stage_load(manifest, stage), manifest.slots)


def keeps_graphs(manifest: Manifest, stage: int, slots: int, free_bytes: int, placing: Placing = Placing.TOGETHER) -> bool:
    """True if a peer with this much free memory keeps a graph per slot from forward to backward, False if it recomputes."""
    if manifest.compute.recompute != "auto":
        return manifest.compute.recompute == "never"
    keeping = replace(manifest, compute=replace(manifest.compute, recompute="never"))
    return estimate_stage_memory(keeping, stage, slots, placing).device <= EASY_SHARE * free_bytes


@functools.lru_cache(maxsize=64)
def _stage_load(manifest: Manifest, stage: int) -> Load:
    return _memory_load(manifest, _on_meta(manifest, stage))


def _memory_load(manifest: Manifest, module: StageModule) -> Load:
    """The part of a stage's load that its memory depends on."""
    return Load(
        num_parameters=sum(parameter.numel() for parameter in module.parameters()),
        num_tied=sum(module.get_parameter(name).numel() for name in module.tied_names),
        num_in_layers=layer_matrices_in({name: parameter.shape for name, parameter in module.named_parameters()}),
        graph_bytes=module.graph_bytes(manifest.tokens_per_microbatch),
    )


def affordable_slots(manifest: Manifest, stage: int, keeps_graph: bool, free_bytes: int, placing: Placing = Placing.TOGETHER) -> int:
    """Microbatches that a peer with this much free memory may hold if links are long: `compute.slots`, or as many as fit."""
    if manifest.compute.slots:
        return manifest.compute.slots
    kept = replace(manifest, compute=replace(manifest.compute, recompute="never" if keeps_graph else "always"))
    load = _stage_load(manifest, stage)
    most, most_bytes = MOST_SLOTS_FACTOR * manifest.slots, EASY_SHARE * free_bytes
    many = range(most, manifest.slots, -1)
    return next((slots for slots in many if stage_memory(kept, load, slots, placing).device <= most_bytes), manifest.slots)


def _on_meta(manifest: Manifest, stage: int) -> StageModule:
    """The stage's structure without memory for its parameters."""
    return builder_of(manifest).stage(manifest, stage, layers_of(manifest, stage))
