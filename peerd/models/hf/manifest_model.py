"""Makes the manifest's [model], and weights, from a transformers model: an architecture's name, a config.json, a folder or a hub's name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from peerd.config.model_kinds import HuggingFaceConfig
from peerd.errors import ManifestError, PeerdError, UnreachableError, UsageError
from peerd.models.hf.library import auto_class, empty_model, first_line, library_config, load_library

_NOT_THE_MODEL = (
    *("architectures", "dtype", "torch_dtype", "id2label", "label2id", "transformers_version", "_name_or_path", "_commit_hash"),
    *("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation", "problem_type"),
)
"""Fields of a config that do not describe the model itself."""
_INNER_WIDTHS = ("intermediate_size", "n_inner", "ffn_dim", "hidden_dim", "ffn_hidden_size")
_HUB_FILES = ("config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer*", "special_tokens_map.json")


def find_checkpoint(model: str) -> Path | None:
    """The folder that `model` names: a local one, or a hub's checkpoint downloaded into its cache. None for `hf:ARCHITECTURE`.

    Raises UsageError for a folder without config.json, UnreachableError if the hub does not provide the checkpoint.
    """
    kind, _, name = model.partition(":")
    if kind == "hf" and "/" not in name:
        return None
    if kind == "hf":
        return _from_hub(name)
    folder = Path(model).expanduser()
    if not (folder / "config.json").is_file():
        raise UsageError(f"--model {model}: no folder with a config.json", "name one, or hf:ARCHITECTURE, or blocks:ENTRY, or decoder")
    return folder


def _from_hub(name: str) -> Path:
    load_library()
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # network errors have many unrelated classes
        raise UnreachableError(
            f"the hub does not give {name}: {first_line(error)}", "download it where you can, and name its folder"
        ) from None


def choose_model(name: str, config: Mapping[str, Any], changes: Mapping[str, Any], tied: bool = False) -> HuggingFaceConfig:
    """The manifest's [model] from an architecture's defaults or a config.json, with `changes` applied; `tied` ties the embeddings.

    Raises UsageError for an unknown architecture or field, ManifestError for a config that peerd cannot train.
    """
    library = load_library()
    fields = dict(config.get("text_config") or config)
    kind = fields.pop("model_type", None) or name
    named = name if name in library.CONFIG_MAPPING else ""
    if named and config and named not in (kind, config.get("model_type")):
        raise UsageError(f"--config is of a {kind}, and --model says hf:{name}", "leave one of them out")
    if kind not in library.CONFIG_MAPPING:
        raise UsageError(f"transformers {library.__version__} knows no architecture {kind!r}", "name another, such as hf:llama")
    if "auto_map" in config:
        raise ManifestError(
            "the config has auto_map, which names code of its own", f"remove that field if transformers' own {kind} is what it means"
        )
    made = _make(library, _of_text(library, kind), {key: value for key, value in fields.items() if key not in _NOT_THE_MODEL}, changes)
    stated = {key: value for key, value in made.to_dict().items() if key not in _NOT_THE_MODEL}
    stated["model_type"] = made.model_type
    model = HuggingFaceConfig(
        config=json.dumps(stated, indent=1, sort_keys=True),
        num_layers=made.num_hidden_layers,
        d_model=made.hidden_size,
        vocab_size=made.vocab_size,
        objective=_objective(library, made, config),
        tie_word_embeddings=tied or changes.get("tie_word_embeddings") is True,
    )
    library_config(model)  # raises if the stored config does not give the same model
    return model


def _of_text(library: Any, kind: str) -> str:
    """The architecture of the language model inside a multimodal one."""
    inner = library.CONFIG_MAPPING[kind].sub_configs.get("text_config")
    inner_kind = getattr(inner, "model_type", "")
    return inner_kind if inner_kind in library.CONFIG_MAPPING else kind


def _make(library: Any, kind: str, fields: dict[str, Any], changes: Mapping[str, Any]) -> Any:
    """A PreTrainedConfig of a language model that can be split."""
    config_class = library.CONFIG_MAPPING[kind]
    try:
        for key, value in changes.items():
            fields[_own_name(config_class, key, kind)] = value
        _keep_head_groups(config_class, fields, changes)
        made = config_class(**fields)
        if getattr(made, "num_key_value_heads", 0) is None:  # as many as heads, which not every model of the library understands
            made = config_class(**{**fields, "num_key_value_heads": made.num_attention_heads})
    except PeerdError:
        raise
    except Exception as error:  # each config class has its own checks and exceptions
        raise ManifestError(f"this is not a config of a {kind}: {first_line(error)}", "correct it") from None
    if made.is_encoder_decoder:
        raise ManifestError(f"{kind} is an encoder with a decoder: only models that are one stack of layers can be split")
    missing = [key for key in ("num_hidden_layers", "hidden_size", "vocab_size") if not isinstance(getattr(made, key, None), int)]
    if missing:
        raise ManifestError(f"the config of {kind} has no {missing[0]}: it is not a language model that can be split")
    return made


def _keep_head_groups(config_class: Any, fields: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """If the number of heads changes, scale the number of key-value heads so that as many heads share one as before."""
    if "num_attention_heads" not in changes:
        return
    usual = config_class()
    groups = next((name for name in ("num_key_value_heads", "num_kv_heads") if isinstance(getattr(usual, name, None), int)), None)
    if groups is None or groups in changes:
        return
    share = getattr(usual, groups) / usual.num_attention_heads
    fields[groups] = max(1, round(share * changes["num_attention_heads"]))


def _own_name(config_class: Any, key: str, kind: str) -> str:
    """This architecture's name of a field."""
    key = getattr(config_class, "attribute_map", {}).get(key, key)
    usual = config_class()
    if key == "intermediate_size" and not hasattr(usual, key):
        key = next((each for each in _INNER_WIDTHS if hasattr(usual, each)), key)
    if not hasattr(usual, key):
        raise UsageError(f"the config of {kind} has no field {key}", "name one of its config.json")
    return key


def _objective(library: Any, made: Any, config: Mapping[str, Any]) -> Literal["causal", "masked"]:
    """The objective of the checkpoint's training; without a checkpoint "causal", or "masked" for architectures that usually are."""
    named = " ".join(config.get("architectures") or ())
    masked = type(made) in library.MODEL_FOR_MASKED_LM_MAPPING
    if type(made) not in library.MODEL_FOR_CAUSAL_LM_MAPPING and not masked:
        raise ManifestError(f"transformers has no language model of the architecture {made.model_type}")
    if type(made) not in library.MODEL_FOR_CAUSAL_LM_MAPPING or "ForMaskedLM" in named:
        return "masked"
    return "masked" if masked and "ForCausalLM" not in named and not getattr(made, "is_decoder", False) else "causal"


def load_weights(folder: Path, model: HuggingFaceConfig) -> dict[str, Tensor] | None:
    """The parameters of a checkpoint by name, float32; None if the folder has no safetensors.

    Raises ManifestError if they do not fit the model. The whole model is read into memory.
    """
    if not any(folder.glob("*.safetensors")):
        return None
    kind = auto_class(model.objective)
    try:
        loaded, told = kind.from_pretrained(
            folder, dtype=torch.float32, use_safetensors=True, local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
    except Exception as error:  # the library raises anything for malformed files
        raise ManifestError(f"the weights in {folder} cannot be read: {first_line(error)}", "name another folder") from None
    wanted = {name: parameter.shape for name, parameter in empty_model(library_config(model), model.objective).named_parameters()}
    found = {name: parameter.detach().clone() for name, parameter in loaded.named_parameters(remove_duplicate=False)}
    for name, shape in wanted.items():
        if name in told["missing_keys"] or name not in found or found[name].shape != shape:
            raise ManifestError(f"the weights in {folder} have no {name} of the shape {list(shape)}", "leave --set and the sizes out")
    return {name: found[name] for name in wanted}


def remarks_on(model: HuggingFaceConfig, weights: Mapping[str, Tensor] | None) -> list[str]:
    """Remarks for the organiser on how this model is trained here."""
    fields = model.fields
    remarks = []
    if fields.get("tie_word_embeddings", False) and not model.tie_word_embeddings:
        remarks.append("its input and output embeddings, tied elsewhere, are trained apart; --tie-word-embeddings keeps them one")
    if any(isinstance(value, float) and value > 0 and ("dropout" in name or "pdrop" in name) for name, value in fields.items()):
        remarks.append("its dropout is left out unless [train] dropout says how much")
    if weights is not None:
        remarks.append("training starts from its weights, with the optimizer's averages at zero")
    return remarks
