"""Makes a tiny copy of a model's config: few layers and small widths, but the same modules with the same functions.

Config fields have no uniform names; the rules below go by name and by length. If a copy with small widths cannot be built, the
widths stay and only the number of layers is reduced.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from peerd.config.model_kinds import HuggingFaceConfig
from peerd.errors import ManifestError
from peerd.models.hf.library import empty_model, library_config

HEAD_WIDTH = 8
MAX_HEADS = 4
MAX_VOCABULARY = 128
MAX_WINDOW = 8
MAX_TRIED_PARAMETERS = 200_000_000
"""Limit for a copy that keeps its widths: the check computes with it, which takes about 16 bytes a parameter."""

_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_GROUPS = ("num_key_value_heads", "num_kv_heads")
_AT_MOST = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "head_dim": HEAD_WIDTH,
    "rotary_dim": HEAD_WIDTH,
    "v_head_dim": HEAD_WIDTH,
    "qk_nope_head_dim": HEAD_WIDTH,
    "qk_rope_head_dim": HEAD_WIDTH,
    "qk_head_dim": 2 * HEAD_WIDTH,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "state_size": 4,
    "sliding_window": MAX_WINDOW,
}
_SCALED = (
    *("hidden_size", "n_embd", "dim", "d_model", "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "hidden_dim"),
    *("word_embed_proj_dim", "moe_intermediate_size", "shared_expert_intermediate_size", "time_step_rank"),
)
"""Widths that keep their ratio to the hidden width."""


def tiny_copy(model: HuggingFaceConfig, num_layers: int) -> HuggingFaceConfig:
    """A copy with at most `num_layers` layers, and small widths if possible. Raises ManifestError if no copy can be built and tried.

    A subspace keeps its share of the width.
    """
    if model.tells_tokens:
        plain = tiny_copy(model.plain, num_layers)
        rank = max(1, model.boundary_rank * plain.d_model // model.d_model)
        return dataclasses.replace(plain, boundary=model.boundary, boundary_rank=rank)
    few = min(model.num_layers, num_layers)
    small = _shrunken(model, few)
    try:
        empty_model(library_config(small), small.objective)
    except ManifestError:
        return _shallow(model, few)
    return small


def _shallow(model: HuggingFaceConfig, few: int) -> HuggingFaceConfig:
    fields = model.fields
    shallow = dataclasses.replace(model, config=json.dumps(_fewer_layers(fields, model.num_layers, few)), num_layers=few)
    num_parameters = sum(each.numel() for each in empty_model(library_config(shallow), shallow.objective).parameters())
    if num_parameters > MAX_TRIED_PARAMETERS:
        raise ManifestError(
            f"a copy of this {fields['model_type']} that is small enough to be checked cannot be built",
            "give the run a config of smaller widths",
        )
    return shallow


def _shrunken(model: HuggingFaceConfig, few: int) -> HuggingFaceConfig:
    fields = _fewer_layers(model.fields, model.num_layers, few)
    heads = next((fields[name] for name in _HEADS if isinstance(fields.get(name), int)), MAX_HEADS)
    few_heads = min(heads, MAX_HEADS)
    width = HEAD_WIDTH * few_heads
    for name in _HEADS:
        if name in fields:
            fields[name] = few_heads
    for name in _GROUPS:
        if isinstance(fields.get(name), int):
            fields[name] = few_heads if fields[name] == heads else 1 if fields[name] == 1 else max(1, few_heads // 2)
    for name in _SCALED:
        if isinstance(fields.get(name), int):
            scaled = fields[name] * width / model.d_model
            fields[name] = max(1, round(scaled)) if scaled < HEAD_WIDTH else HEAD_WIDTH * round(scaled / HEAD_WIDTH)
    for name, most in _AT_MOST.items():
        if isinstance(fields.get(name), int):
            fields[name] = min(fields[name], most)
    vocabulary = min(model.vocab_size, MAX_VOCABULARY)
    fields["vocab_size"] = vocabulary
    for name, value in fields.items():
        if name.endswith("token_id"):
            fields[name] = min(value, vocabulary - 1) if isinstance(value, int) else None
    _shorten_rope(fields)
    return dataclasses.replace(model, config=json.dumps(fields), num_layers=few, d_model=width, vocab_size=vocabulary, mask_token=0)


def _fewer_layers(fields: dict[str, Any], num_layers: int, few: int) -> dict[str, Any]:
    """The fields for fewer layers. Lists with an entry per layer keep one of each kind; lists of layer numbers keep the low ones."""
    kept = _one_of_each_kind([value for value in fields.values() if isinstance(value, list) and len(value) == num_layers], few)
    shorter = dict(fields)
    for name, value in fields.items():
        if name in _LAYERS or (name == "max_window_layers" and isinstance(value, int)):
            shorter[name] = min(value, few)
        elif isinstance(value, list) and ("idx" in name or (name.endswith("_layers") and len(value) != num_layers)):
            shorter[name] = [entry for entry in value if isinstance(entry, int) and entry < few]
        elif isinstance(value, list) and len(value) == num_layers:
            shorter[name] = [value[layer] for layer in kept]
    if "attention_types" in fields and "attention_layers" in shorter:  # GPT-Neo's list of patterns and repetitions
        shorter["attention_types"] = [[shorter["attention_layers"], 1]]
    return shorter


def _one_of_each_kind(lists: list[list[Any]], few: int) -> list[int]:
    """`few` layers in their order, including one of each kind as far as there is room."""
    rows = [json.dumps(row) for row in zip(*lists, strict=True)]
    firsts = sorted({rows.index(row) for row in rows})[:few]
    rest = [layer for layer in range(max(len(rows), few)) if layer not in firsts]
    return sorted(firsts + rest[: few - len(firsts)])


def _shorten_rope(fields: dict[str, Any]) -> None:
    """Shorten the lists of long-context rotary scaling, which have one factor per pair of a head's dimensions."""
    rope = fields.get("rope_parameters")
    if isinstance(rope, dict):
        width = int(HEAD_WIDTH * rope.get("partial_rotary_factor", 1.0))
        fields["rope_parameters"] = {name: value[: width // 2] if isinstance(value, list) else value for name, value in rope.items()}
