"""Converts a run's model for Hugging Face's libraries: config.json, tensors under their names, tokenizer files.

A transformers model is published as it is. The built-in decoder is mathematically a StableLM with a certain config: LayerNorm
before each sub-layer, rotary embeddings over whole heads, a gated GELU, and no biases except in the norms. Layers that share
weights are written one by one, each with the same values. With a subspace its fixed matrices are multiplied out.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from peerd.config.manifest import Manifest, ModelConfig
from peerd.config.model_kinds import HuggingFaceConfig
from peerd.errors import UsageError
from peerd.models.chosen import Chosen
from peerd.models.subspace import Unfolded

_DECODER_FIELDS = frozenset({"kind", "num_layers", "d_model", "num_heads", "d_ff", "vocab_size", "layers_per_group", "tie_word_embeddings"})
_SUBSPACE_FIELDS = frozenset({"boundary", "boundary_rank"})
"""The fields that the StableLM below covers; a decoder that sets any other field is another model."""
_LAYER_NAMES = {
    "attention_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
    "attention.output": "self_attn.o_proj",
    "feed_forward.output": "mlp.down_proj",
}
_OUTER_NAMES = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}
"""With tied embeddings there is no head: transformers uses the embedding, which is stored once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedModel:
    config: dict[str, Any]
    tensors: Chosen
    """Each is made of its parameter when it is asked for."""


def check_publishable(manifest: Manifest) -> None:
    """UsageError if no architecture of transformers is exactly this model."""
    model, remedy = manifest.model, "leave --format hf out"
    if not model.publishes_as:
        raise UsageError(f"a {model.title} is not an architecture of transformers", remedy)
    usual, covered = ModelConfig(), _DECODER_FIELDS | (_SUBSPACE_FIELDS if getattr(model, "boundary", "") == "subspace" else frozenset())
    for field in dataclasses.fields(model) if model.publishes_as == "stablelm" else ():
        if field.name not in covered and getattr(model, field.name) != getattr(usual, field.name):
            raise UsageError(f"no architecture of transformers is exactly a decoder with model.{field.name}", remedy)


def publish(manifest: Manifest, parameters: Mapping[str, Tensor], tokenizer: str = "") -> PublishedModel:
    """The whole model's parameters under transformers' names. Their memory is shared. Raises UsageError as `check_publishable`.

    `tokenizer` is the content of the run's tokenizer.json, if it has one.
    """
    check_publishable(manifest)
    ends = _token_ids(manifest, tokenizer)
    is_itself, tensors = manifest.model.publishes_as == "itself", Chosen()
    if manifest.model.tells_tokens:
        config = manifest.model_as(HuggingFaceConfig) if is_itself else manifest.decoder
        parameters = Unfolded(config, manifest.seed, parameters)
    for theirs in parameters:
        named = [(theirs, 0, 1)] if is_itself else _stablelm_names(theirs, manifest.decoder.layers_per_group)
        for name, part, parts in named:
            tensors.add(name, parameters, theirs, part, parts)
    fields = _library_config(manifest.model_as(HuggingFaceConfig)) if is_itself else _stablelm_config(manifest)
    return PublishedModel(config=fields | ends, tensors=tensors)


def _token_ids(manifest: Manifest, tokenizer: str) -> dict[str, int | None]:
    """The config fields for the token that ends a text, and for none that begins one, from the run's own tokenizer.

    A config has the numbers of its architecture's usual tokenizer. In the run's tokenizer they are other tokens: generation would
    end at a quote, for example.
    """
    data = manifest.data
    if manifest.model.publishes_as == "itself" and data.tokenizer != "bytes" and not data.tokenizer.startswith("bpe:"):
        return {}  # the organiser's tokenizer, which the config probably belongs to
    added = json.loads(tokenizer).get("added_tokens", []) if tokenizer else []
    return {"bos_token_id": None, "eos_token_id": next((each["id"] for each in added if each["content"] == data.end_of_text), None)}


def _library_config(model: HuggingFaceConfig) -> dict[str, Any]:
    from peerd.models.hf.library import class_name

    return model.fields | {"architectures": [class_name(model)], "tie_word_embeddings": model.tie_word_embeddings, "dtype": "float32"}


def _stablelm_config(manifest: Manifest) -> dict[str, Any]:
    model = manifest.decoder
    return {
        "model_type": "stablelm",
        "architectures": ["StableLmForCausalLM"],
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.d_model,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_heads,
        "intermediate_size": model.d_ff,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": manifest.train.sequence_length,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        "partial_rotary_factor": 1.0,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "use_qkv_bias": False,
        "qk_layernorm": False,
        "use_parallel_residual": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tie_word_embeddings": model.tie_word_embeddings,
        "dtype": "float32",
    }


def _stablelm_names(name: str, layers_per_group: int) -> list[tuple[str, int, int]]:
    """Name, number and count of the parts of one of the decoder's parameters: one tensor for each layer that shares it."""
    outer, _, leaf = name.partition(".")
    if outer in _OUTER_NAMES:
        return [(f"{_OUTER_NAMES[outer]}.{leaf}", 0, 1)]
    _, first, inner = name.split(".", 2)
    layers = range(int(first), int(first) + layers_per_group)
    own = _names_in_layer(inner)
    return [(f"model.layers.{layer}.{each}", part, len(own)) for layer in layers for part, each in enumerate(own)]


def _names_in_layer(inner: str) -> list[str]:
    """The tensors of a parameter within a layer; stacked projections are split."""
    module, _, leaf = inner.rpartition(".")
    if module == "attention.query_key_value":
        return [f"self_attn.{each}_proj.{leaf}" for each in "qkv"]
    if module == "feed_forward.gate_and_value":
        return [f"mlp.{each}_proj.{leaf}" for each in ("gate", "up")]
    return [f"{_LAYER_NAMES[module]}.{leaf}"]


def tokenizer_files(manifest: Manifest, own: str = "") -> dict[str, str]:
    """File name -> content, as the library tokenizers reads them. `own` is the run's tokenizer.json, empty for bytes.

    The byte tokenizer is written as a byte-level BPE without merges.
    """
    if own:
        ends = {"eos_token": manifest.data.end_of_text} if manifest.data.end_of_text else {}
        special = ends | _mask_of(manifest, own)
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special}
        return {"tokenizer.json": own, "tokenizer_config.json": json.dumps(settings)}
    if manifest.data.tokenizer != "bytes" or manifest.model.makes_samples:
        return {}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": {sign: byte for byte, sign in enumerate(byte_signs())}, "merges": []}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": level, "decoder": level, "model": model}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return {"tokenizer.json": json.dumps(tokenizer), "tokenizer_config.json": json.dumps(settings)}


def _mask_of(manifest: Manifest, own: str) -> dict[str, str]:
    """The tokenizer's name of the mask token that a masked model was trained with; empty if the tokenizer has no such token."""
    model = manifest.model
    if not model.masked_share:
        return {}
    added = json.loads(own).get("added_tokens", [])
    name = next((each["content"] for each in added if each["id"] == model.mask_token), None)
    return {"mask_token": name} if name else {}


def byte_signs() -> list[str]:
    """The printable character that stands for each byte in byte-level tokenizers, as GPT-2 chose them."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
