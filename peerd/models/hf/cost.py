"""The costs of a stage of a transformers model.

Attention is counted as plain matrix products, because torch's counter knows only those. The routing of tokens to experts is known
only at run time; here every token goes through the first expert, as many times as it would have experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from peerd.config.manifest import Manifest
from peerd.config.model_kinds import HuggingFaceConfig
from peerd.models.dropout import dropout_of
from peerd.models.hf.layout import blocks_of
from peerd.models.hf.library import empty_model, library_config
from peerd.models.measure import product_flops, saved_bytes
from peerd.models.module import StageModule

SAME_EXPERT = "peerd_same_expert"
"""The name under which `_same_expert` is registered with transformers."""
ROUGH_FLOATS_PER_WIDTH = 24
"""Numbers that a usual layer keeps per token and unit of width, for models that cannot be measured without memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    graph_bytes: int
    """Bytes that autograd keeps of one microbatch between forward and backward, and the loss's scratch memory."""
    forward_flops: int
    """Operations of the matrix products of one microbatch's forward pass."""


def cost_of(module: StageModule, config: Any, manifest: Manifest, num_layers: int) -> StageCost:
    """Measure one microbatch on a stage that is used for nothing else. `config` is its PreTrainedConfig."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(SAME_EXPERT, _same_expert)
    config._experts_implementation = SAME_EXPERT
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    rows = (manifest.train.microbatch_size, manifest.train.sequence_length)

    def microbatch() -> tuple[Tensor, Tensor | None]:
        tokens = torch.zeros(rows, dtype=torch.int64)
        inputs = tokens if module.is_first else torch.zeros(manifest.boundary_shape(1), requires_grad=True)
        labels = torch.zeros((rows[0], *manifest.model.labels_shape(rows[1])), dtype=torch.int64)
        return inputs, labels if module.needs_labels else None

    scratch_bytes = 2 * 4 * manifest.model.vocab_size * manifest.tokens_per_microbatch if module.is_last else 0
    try:
        with dropout_of(module, manifest, 0, 0):
            graph_bytes = saved_bytes(module, microbatch, manifest.train.precision)
        config._attn_implementation = "eager"
        flops = product_flops(module, microbatch)
    except Exception:  # shapes may depend on values, kernels may lack a form for fake tensors
        graph_bytes = 4 * ROUGH_FLOATS_PER_WIDTH * manifest.tokens_per_microbatch * config.hidden_size * num_layers + scratch_bytes // 2
        flops = 2 * num_parameters * manifest.tokens_per_microbatch
    return StageCost(graph_bytes=graph_bytes + scratch_bytes, forward_flops=flops)


def kinds_of_layers(model: HuggingFaceConfig) -> tuple[object, ...]:
    """For each layer its parameters' shapes and the config's fields for it; layers for which these are equal cost the same."""
    config = library_config(model)
    whole = empty_model(config, model.objective)
    blocks = whole.get_submodule(blocks_of(whole, model.num_layers))
    told = [value for _, value in sorted(vars(config).items()) if isinstance(value, list | tuple) and len(value) == model.num_layers]
    made = [tuple((name, tuple(parameter.shape)) for name, parameter in block.named_parameters()) for block in blocks]
    return tuple((made[layer], repr([value[layer] for value in told])) for layer in range(model.num_layers))


def _same_expert(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    num_chosen = chosen.shape[-1]
    rows = hidden.repeat_interleave(num_chosen, dim=0)
    up = _product(rows, experts.gate_up_proj if experts.has_gate else experts.up_proj, experts.is_transposed)
    inner = experts._apply_gate(up) if experts.has_gate else experts.act_fn(up)
    down = _product(inner, experts.down_proj, experts.is_transposed)
    return (down * weights.reshape(-1, 1)).view(-1, num_chosen, down.shape[-1]).sum(dim=1)


def _product(rows: Tensor, matrices: Tensor, is_transposed: bool) -> Tensor:
    return rows @ (matrices[0] if is_transposed else matrices[0].T)
