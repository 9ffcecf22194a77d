"""Cutting a model into stages: which layers a stage holds, its first weights, and the memory it needs.

Another kind of model is one more entry in `BUILDERS`; nothing else here knows what a decoder is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from peerd.config.manifest import Manifest
from peerd.errors import StageError
from peerd.models.decoder import DecoderStage
from peerd.models.module import StageModule
from peerd.planner.cutting import resolved, stage_layers
from peerd.planner.kinds import planned_loads
from peerd.planner.workload import Load, ModelLoads, stage_memory_bytes

__all__ = [
    "BUILDERS",
    "StageModule",
    "build_stage",
    "estimate_forward_flops",
    "estimate_graph_bytes",
    "estimate_stage_memory_bytes",
    "initial_parameter_spec",
    "keeps_graphs",
    "layers_of",
]

BUILDERS: dict[str, Callable[[Manifest, int, range], StageModule]] = {"decoder": DecoderStage}
"""Manifest's model.kind -> what builds one stage of it from (manifest, stage, layers)."""
AUTO_MEMORY_SHARE = 0.5
"""Of free memory that "auto" gives to a stage with its graphs: others on this machine may look at the same free memory."""


def layers_of(manifest: Manifest, stage: int) -> range:
    """The global indices of a stage's layers. Raises StageError for a stage the run does not have."""
    num_stages = manifest.train.num_stages
    if not 0 <= stage < num_stages:
        raise StageError(f"there is no stage {stage}", f"this run's stages are 0 to {num_stages - 1}")
    return stage_layers(manifest, None if manifest.layer_counts else model_loads(manifest))[stage]


def model_loads(manifest: Manifest) -> ModelLoads:
    """What the parts of the model cost for one microbatch at full length.

    Of a kind that the planner does not know, by the difference that each group of layers makes to a stage without memory.
    """
    return planned_loads(manifest) or measured_loads(manifest)


def with_cut(manifest: Manifest) -> Manifest:
    """The manifest with a cut by cost as the numbers of layers it comes to: what is signed must not depend on who estimates."""
    return manifest if manifest.layer_counts else resolved(manifest, model_loads(manifest))


def measured_loads(manifest: Manifest) -> ModelLoads:
    """The same, asked of stages built on the meta device, of any kind of model without narrow boundaries."""
    size, num_layers = manifest.model.layers_per_group, manifest.model.num_layers

    def load_of(stage: int, layers: range) -> Load:
        with torch.device("meta"), _Uninitialised():
            module = BUILDERS[manifest.model.kind](manifest, stage, layers)
        return Load(
            num_parameters=sum(parameter.numel() for parameter in module.parameters()),
            forward_flops=module.forward_flops(manifest.train.microbatch_size, manifest.train.sequence_length),
            graph_bytes=module.graph_bytes(manifest.tokens_per_microbatch),
        )

    first, last = load_of(0, range(0)), load_of(manifest.train.num_stages - 1, range(num_layers, num_layers))
    groups = tuple(load_of(0, range(layer, layer + size)) - first for layer in range(0, num_layers, size))
    return ModelLoads(first=first, groups=groups, last=last if manifest.train.num_stages > 1 else last - first)


def build_stage(manifest: Manifest, stage: int, device: torch.device | str) -> StageModule:
    """A stage with its first weights, the same whatever the split and on every machine.

    Each parameter is drawn on the CPU from its own generator, seeded by the run's seed and the parameter's name.
    """
    module = _on_meta(manifest, stage)
    _give_memory(module, torch.device(device))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(module.initial_value(name, parameter.shape, _generator(manifest.seed, name)))
        module.fill_buffers()
    return module


def initial_parameter_spec(manifest: Manifest, stage: int) -> dict[str, tuple[int, ...]]:
    """Name -> shape of a stage's parameters, without allocating them. All are float32."""
    return {name: tuple(parameter.shape) for name, parameter in _on_meta(manifest, stage).named_parameters()}


def estimate_forward_flops(manifest: Manifest, stage: int) -> int:
    """Floating-point operations of one microbatch's forward pass, matrix products only. Backward is twice that."""
    return _on_meta(manifest, stage).forward_flops(manifest.train.microbatch_size, manifest.train.sequence_length)


def estimate_graph_bytes(manifest: Manifest, stage: int) -> int:
    """Bytes that one microbatch's graph holds from forward to backward when it is kept and not recomputed."""
    return _on_meta(manifest, stage).graph_bytes(manifest.tokens_per_microbatch)


def estimate_stage_memory_bytes(manifest: Manifest, stage: int, slots: int) -> int:
    """Bytes that serving a stage takes with `slots` microbatches in hand, as `planner.workload.stage_memory_bytes` counts them."""
    module = _on_meta(manifest, stage)
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    return stage_memory_bytes(
        manifest, Load(num_parameters=num_parameters, graph_bytes=module.graph_bytes(manifest.tokens_per_microbatch)), slots
    )


def keeps_graphs(manifest: Manifest, stage: int, slots: int, free_bytes: int) -> bool:
    """Whether a peer with so much free memory keeps a graph per slot from forward to backward, or recomputes it."""
    if manifest.compute.recompute != "auto":
        return manifest.compute.recompute == "never"
    keeping = replace(manifest, compute=replace(manifest.compute, recompute="never"))
    return estimate_stage_memory_bytes(keeping, stage, slots) <= AUTO_MEMORY_SHARE * free_bytes


def _on_meta(manifest: Manifest, stage: int) -> StageModule:
    """The stage's structure without memory."""
    with torch.device("meta"), _Uninitialised():
        return BUILDERS[manifest.model.kind](manifest, stage, layers_of(manifest, stage))


def _give_memory(module: nn.Module, device: torch.device) -> None:
    """As nn.Module.to_empty, without the half second in which that loads torch's symbolic shapes."""
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            setattr(owner, name, nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device=device)))
        for name, buffer in list(owner.named_buffers(recurse=False)):
            setattr(owner, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))


class _Uninitialised(TorchFunctionMode):
    """Leaves out torch.nn.init: there is nothing to fill, and filling tensors without memory imports torch's compiler (1 s, 70 MB)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8, person=b"peerd weights").digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
