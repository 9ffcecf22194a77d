"""Imports a model that is not peerd's own: makes a manifest's [model] from a config, a checkpoint's folder or an installed entry.

The answer is what to write into the run file; if there are weights, the state to start from is written. Before anything is written, the
model is checked to split exactly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from peerd.config.manifest import Manifest, TrainConfig
from peerd.config.model_kinds import BlocksConfig, HuggingFaceConfig
from peerd.data.download import HUB_PREFIX
from peerd.data.tokenizer import TOKENIZER_FILE
from peerd.equality import check_split
from peerd.errors import DiskError, ManifestError, UsageError
from peerd.models.hf.manifest_model import choose_model, find_checkpoint, load_weights, remarks_on
from peerd.stage.start import write_start

NO_WEIGHTS = "there are no safetensors beside its config: training starts from first weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeRequest:
    model: str
    """`hf:NAME`, `blocks:ENTRY` or a folder."""
    config: str = ""
    """Path of a config.json."""
    changes: dict[str, Any] = field(default_factory=dict)
    """New values for fields of the config, under the config's own or transformers' general names."""
    tie_word_embeddings: bool = False
    num_stages: int = 2
    seed: int = 0
    start: str
    """Where to write the state to start from, if the model comes with weights."""


def take_in(request: IntakeRequest) -> dict[str, Any]:
    """The whole command. Returns the fields to print."""
    kind, _, name = request.model.partition(":")
    if kind == "blocks" and name:
        from peerd.models.blocks import describe_entry

        if request.tie_word_embeddings:
            raise UsageError("a model of blocks has no word embeddings to tie", "leave --tie-word-embeddings out")
        if request.config or request.changes:
            raise UsageError("a model of blocks has no config", "leave --config, --set and the model's sizes out")
        _check(describe_entry(name), request)
        return {"model": asdict(describe_entry(name)), "start": False, "tokenizer": "", "remarks": []}
    folder = find_checkpoint(request.model)
    config = Path(request.config) if request.config else folder / "config.json" if folder else None
    named, fields = name if kind == "hf" else "", _read(config) if config else {}
    try:
        model = choose_model(named, fields, request.changes, request.tie_word_embeddings)
    except UsageError:
        if request.changes:
            choose_model(named, fields, {})  # that the architecture is unfit comes before the names of its fields
        raise
    _check(model, request)
    weights = load_weights(folder, model) if folder else None
    if weights is not None:
        write_start(Path(request.start), 0, weights, {}, ())
    remarks = [*remarks_on(model, weights), *([NO_WEIGHTS] if folder and weights is None else [])]
    tokenizer = _tokenizer_of(request.model, folder) if folder else ""
    return {"model": asdict(model), "start": weights is not None, "tokenizer": tokenizer, "remarks": remarks}


def _tokenizer_of(model: str, folder: Path) -> str:
    """The value of data.tokenizer for the checkpoint's tokenizer; empty if it has no tokenizer.json."""
    if not (folder / TOKENIZER_FILE).is_file():
        return ""
    kind, _, name = model.partition(":")
    return f"{HUB_PREFIX}{name}" if kind == "hf" else f"{folder.absolute()}/"


def _check(model: HuggingFaceConfig | BlocksConfig, request: IntakeRequest) -> None:
    train = replace(TrainConfig(), num_stages=min(request.num_stages, model.num_layers))
    check_split(Manifest(model=model, seed=request.seed, train=train))


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", "name a config.json, or a folder that has one") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {error}", "name a model's config.json") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path} is not a JSON object", "name a model's config.json")
    return found


def run(request: IntakeRequest) -> dict[str, Any]:
    try:
        return take_in(request)
    except OSError as error:
        raise DiskError(str(error)) from None
    except ValueError as error:  # raised by the manifest's dataclasses
        raise ManifestError(str(error)) from None
