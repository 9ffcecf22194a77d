"""The exported files of a run: run.toml, model and optimizer as safetensors, and the history of its losses."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from peerd.config import manifest as manifest_files
from peerd.config.atomic import commit, draft, replace_file
from peerd.config.manifest import Manifest
from peerd.stage.history import HistoryEntry
from peerd.stage.state_file import free_cache, write_large
from peerd.table.record import Evaluation
from peerd.wire.tensors import bodies_of, header_of

EVALUATIONS_FILE = "evaluations.jsonl"


def write_export(
    folder: Path,
    manifest: Manifest,
    parameters: Mapping[str, Tensor],
    optimizer_state: Mapping[str, Tensor] | None,
    history: Iterable[HistoryEntry],
) -> None:
    """Write the four files, each whole or not at all; they replace those of an earlier export.

    Without an optimizer state there is no optimizer.safetensors. Both safetensors files carry the number of updates, which is
    the number of finished steps, as metadata `step`. Raises DiskError.
    """
    entries = list(history)
    lines = "".join(json.dumps(dataclasses.asdict(entry)) + "\n" for entry in entries)
    step = entries[-1].step + 1 if entries else num_updates(optimizer_state or {})
    metadata = {"format": "pt", "step": str(step)}
    replace_file(folder / "run.toml", manifest_files.dump(manifest))
    write_tensors(folder / "model.safetensors", parameters, metadata)
    if optimizer_state is None:
        (folder / "optimizer.safetensors").unlink(missing_ok=True)
    else:
        write_tensors(folder / "optimizer.safetensors", optimizer_state, metadata)
    replace_file(folder / "history.jsonl", lines)


def write_evaluations(folder: Path, evaluations: Sequence[Evaluation]) -> None:
    """Write evaluations.jsonl, one line {"step", "loss"} for each; without evaluations there is no file. Raises DiskError."""
    target = folder / EVALUATIONS_FILE
    if evaluations:
        replace_file(target, "".join(json.dumps(dataclasses.asdict(each)) + "\n" for each in evaluations))
    else:
        target.unlink(missing_ok=True)


def num_updates(optimizer_state: Mapping[str, Tensor]) -> int:
    """The number of updates that led to this optimizer state."""
    return max((int(optimizer_state[name]) for name in optimizer_state if name.endswith(".step")), default=0)


def write_tensors(target: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file of float32 tensors, whole or not at all. Raises DiskError."""
    with draft(target.parent) as path:
        write_large(path, itertools.chain([header_of(tensors, metadata)], bodies_of(tensors)))
        commit(path, target)
    free_cache(target)
