"""The only access to transformers: config and model from a run's manifest, or one clear error. No code but the library's is run.

Models are built without memory for their parameters, but with real buffers: the model's own constructor computes the rotary
tables, so they equal those of the whole model.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from peerd.config.model_kinds import HuggingFaceConfig
from peerd.errors import ManifestError
from peerd.models.hf.experts import experts_together
from peerd.models.kernels import keep_kernels_in_cache
from peerd.models.weights import Uninitialised

INSTALL = "install it with `pip install 'peerd[hf]'`"


def load_library() -> Any:
    """The module transformers, prevented from fetching compiled kernels. Raises ManifestError if it is not installed."""
    os.environ["USE_HUB_KERNELS"] = "NO"  # read when transformers is imported: kernels from a hub are remote code
    keep_kernels_in_cache()
    try:
        import transformers
    except ImportError:
        raise ManifestError("this run's model needs the package transformers, which is not installed here", INSTALL) from None
    transformers.logging.set_verbosity_error()
    return transformers


def auto_class(objective: str) -> Any:
    """The library's class that chooses a model class for a config, by the objective that the model is trained for."""
    library = load_library()
    return {"causal": library.AutoModelForCausalLM, "masked": library.AutoModelForMaskedLM}[objective]


def library_config(model: HuggingFaceConfig) -> Any:
    """A new PreTrainedConfig. Raises ManifestError if this transformers cannot read it or it contradicts the manifest."""
    library = load_library()
    fields = model.fields
    kind = fields.pop("model_type")
    try:
        config = library.AutoConfig.for_model(kind, **fields)
    except Exception as error:  # each config class has its own checks and exceptions
        raise ManifestError(f"model.config is not one that transformers {library.__version__} can read: {first_line(error)}") from None
    config.tie_word_embeddings = model.tie_word_embeddings
    found = {name: getattr(config, name, None) for name in ("num_hidden_layers", "hidden_size", "vocab_size")}
    stated = {"num_hidden_layers": model.num_layers, "hidden_size": model.d_model, "vocab_size": model.vocab_size}
    for name, value in stated.items():
        if found[name] != value:
            raise ManifestError(f"model.config has {name} {found[name]} and [model] says {value}", "correct one of them")
    return config


def empty_model(config: Any, objective: str) -> Any:
    """The whole model, a PreTrainedModel in evaluation mode, with parameters on the meta device and real buffers on the CPU."""
    kind = auto_class(objective)
    from transformers.initialization import no_init_weights

    _expect_no_packing()
    try:
        model_class = kind._model_mapping[type(config)]
    except KeyError:
        raise ManifestError(f"transformers has no {objective} language model of the type {config.model_type}") from None
    config._attn_implementation = "sdpa" if model_class._supports_sdpa else "eager"
    config._experts_implementation = experts_together()
    with torch.device("cpu"), Uninitialised(), _without_memory(), no_init_weights():
        try:
            whole = kind.from_config(config, dtype=torch.float32).eval()
        except Exception as error:  # constructors raise anything for numbers that do not fit together
            raise ManifestError(f"transformers cannot build a {config.model_type} from model.config: {first_line(error)}") from None
    if config.tie_word_embeddings:
        _tie(whole, tied_parameters(whole))
    return whole


def _expect_no_packing() -> None:
    """Have the library take for granted that a row is one sequence, as peerd's are.

    It looks into each row's positions for the end of a sequence, in each forward pass, and so has the processor wait for a GPU. For rows of
    one sequence the answer is None. A release without this function looks elsewhere, or not at all (tests/stage/test_device_life.py).
    """
    from transformers import masking_utils

    if hasattr(masking_utils, "find_packed_sequence_indices"):
        masking_utils.find_packed_sequence_indices = _no_packing


def _no_packing(*_positions: Any, **_more: Any) -> None:
    return None


def tied_parameters(whole: Any) -> dict[str, str]:
    """Names that are one parameter in a model with tied embeddings: the later name in the model -> the first, which stages use.

    Raises ManifestError for an architecture that ties nothing.
    """
    order = {name: number for number, (name, _) in enumerate(whole.named_parameters(remove_duplicate=False))}
    pairs = [pair for pair in whole.get_expanded_tied_weights_keys(all_submodels=True).items() if order.keys() >= set(pair)]
    if not pairs:
        raise ManifestError(f"{type(whole).__name__} has no input and output embeddings that could be one", "leave them untied")
    return {max(pair, key=order.__getitem__): min(pair, key=order.__getitem__) for pair in pairs}


def _tie(whole: nn.Module, pairs: Mapping[str, str]) -> None:
    for name, source in pairs.items():
        path, _, leaf = name.rpartition(".")
        setattr(whole.get_submodule(path), leaf, whole.get_parameter(source))


def class_name(model: HuggingFaceConfig) -> str:
    """The transformers class of a run's model, as config.json names it."""
    return type(empty_model(library_config(model), model.objective)).__name__


@contextmanager
def _without_memory() -> Iterator[None]:
    """Move parameters that this thread creates to the meta device at once, before anything is written into them."""
    here = threading.get_ident()

    def to_meta(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or threading.get_ident() != here:
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


def first_line(error: Exception) -> str:
    """An error's type and first line; also the second line if the first ends with a colon."""
    first, *rest = [*str(error).strip().splitlines(), ""]
    told = f"{first} {rest[0].strip()}" if first.endswith(":") else first
    if type(error).__name__.startswith("StrictDataclass"):  # of the library's own validators: their names say nothing to a user
        return told.rpartition("Error: ")[2][:300]
    return f"{type(error).__name__}: {told[:300].strip() or 'no reason given'}"
