"""Gathers the state of a run, with any number of stages, into one file by parameter name.

It reads exported folders or peers' homes. A run that starts from that file may have another number of stages (as in Universal
Checkpointing).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from torch import Tensor

from peerd.config import manifest as manifest_files
from peerd.config.manifest import Manifest
from peerd.config.paths import Home
from peerd.errors import ManifestError, UsageError, disk_error
from peerd.models.stages import layers_of, whole_parameter_spec
from peerd.stage.checkpoints import Checkpoint, read_checkpoint, scan_folder
from peerd.stage.history import HistoryEntry
from peerd.stage.optimizer import optimizer_spec
from peerd.stage.snapshots import Downloaded
from peerd.stage.start import write_start
from peerd.swarm.identity import LocalState
from peerd.swarm.signed import unpack_manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class RepartitionRequest:
    sources: list[str]
    out: str
    before: int | None = None
    """Only steps before this one are taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredState:
    """A whole model at one step. `optimizer` is empty if the source has no optimizer state."""

    manifest: Manifest
    step: int
    parameters: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    history: tuple[HistoryEntry, ...]
    inexact_steps: int = 0


def gather(sources: Sequence[Path], before: int | None = None) -> GatheredState:
    """The newest step, before `before`, that the sources hold whole.

    Raises ManifestError if there is none, UsageError if the sources do not go together.
    """
    exports = [source for source in sources if (source / "model.safetensors").exists()]
    if exports and len(sources) > 1:
        raise UsageError(f"{exports[0]} is an export, which holds a whole model", "name it alone, or only peers' homes")
    if not exports:
        return gather_checkpoints([Home(source) for source in sources], before)
    found = read_export(exports[0])
    if before is not None and found.step >= before:
        raise UsageError(f"{exports[0]} is the run at step {found.step}", "name peers' homes, which keep earlier steps")
    return found


def read_export(folder: Path) -> GatheredState:
    """Read what `peerd export` wrote."""
    manifest = manifest_files.load(folder / "run.toml")
    parameters, step = _read_tensors(folder / "model.safetensors")
    optimizer_file = folder / "optimizer.safetensors"
    optimizer = _read_tensors(optimizer_file)[0] if optimizer_file.exists() else {}
    try:
        lines = (folder / "history.jsonl").read_text(encoding="utf-8").splitlines()
        history = tuple(TypeAdapter(HistoryEntry).validate_json(line) for line in lines)
    except FileNotFoundError:
        history = ()
    except (OSError, ValueError) as error:
        raise ManifestError(f"{folder / 'history.jsonl'} is not an export's history: {error}", "export the run anew") from None
    return GatheredState(manifest=manifest, step=step, parameters=parameters, optimizer=optimizer, history=history)


def gather_checkpoints(homes: Sequence[Home], before: int | None = None) -> GatheredState:
    """The newest step (before `before`) for which the homes' checkpoints together hold every parameter."""
    manifest, found = _checkpoints_of(homes)
    wanted = whole_parameter_spec(manifest)
    for step in sorted({checkpoint.step for checkpoint in found if before is None or checkpoint.step < before}, reverse=True):
        parts = _best_of_each_place([checkpoint for checkpoint in found if checkpoint.step == step])
        tensors = {name: value for part in parts for name, value in part.tensors.items()}
        newest = "ahead/" if manifest.train.delayed_updates else "parameters/"
        parameters = {name: tensors[newest + name] for name in wanted if newest + name in tensors}
        if parameters.keys() != wanted.keys():
            continue
        return GatheredState(
            manifest=manifest,
            step=step,
            parameters=parameters,
            optimizer={name: tensors[f"optimizer/{name}"] for name in optimizer_spec(manifest.train, wanted)},
            history=max((part.history for part in parts), key=len),
            inexact_steps=sum(part.lineage.inexact for part in parts),
        )
    places = sorted({(c.stage, c.num_stages, c.step) for c in found})
    held = ", ".join(f"stage {stage} of {num_stages} at step {step}" for stage, num_stages, step in places) or "none"
    bound = "" if before is None else f" before {before}"
    raise ManifestError(
        f"the checkpoints hold no step of the whole model{bound}; found: {held}", "name homes of peers of every stage, or export the run"
    )


def _checkpoints_of(homes: Sequence[Home]) -> tuple[Manifest, list[Checkpoint]]:
    """The manifest of the run that all homes were last in, and their checkpoints of it."""
    runs = [_run_of(home) for home in homes]
    run, manifest = runs[0]
    for home, (other, _) in zip(homes, runs, strict=True):
        if other != run:
            raise UsageError(f"{home.folder} was last in run {other}, the others in {run}", "name homes of one run")
    return manifest, [checkpoint for home in homes for checkpoint in scan_folder(home.checkpoints(run))]


def _run_of(home: Home) -> tuple[str, Manifest]:
    """Id and manifest of the run that a home was last in."""
    local = LocalState(home)
    if local.manifest is None:
        raise UsageError(f"{home.folder} is neither an exported run nor a peer's home", "name what `peerd export` wrote, or homes")
    return local.run, unpack_manifest(local.manifest).manifest


def _best_of_each_place(checkpoints: Sequence[Checkpoint]) -> list[Downloaded]:
    """The state with the best lineage for each stage."""
    best: dict[tuple[int, int], Downloaded] = {}
    for checkpoint in checkpoints:
        state, place = read_checkpoint(checkpoint), (checkpoint.stage, checkpoint.num_stages)
        if state is not None and (place not in best or state.lineage < best[place].lineage):
            best[place] = state
    return list(best.values())


def _read_tensors(path: Path) -> tuple[dict[str, Tensor], int]:
    """The tensors of a file, and the number of updates they have had."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            return tensors, int((file.metadata() or {})["step"])
    except OSError as error:
        raise disk_error(path, error) from None
    except (SafetensorError, KeyError, ValueError) as error:
        raise ManifestError(f"{path} is not an exported model: {error}", "export the run anew") from None


def with_boundaries(manifest: Manifest) -> Manifest:
    """The manifest with its narrow boundaries fixed: after another cut it would otherwise be another model."""
    if not manifest.model.narrows_at_cuts:
        return manifest
    cuts = tuple(layers_of(manifest, stage).start for stage in range(1, manifest.train.num_stages))
    return replace(manifest, model=replace(manifest.decoder, boundary_layers=cuts))


def run(request: RepartitionRequest) -> dict[str, Any]:
    """The whole command. Returns the fields to print."""
    if not request.sources:
        raise UsageError("no source given", "name an exported run or peers' homes")
    reached = gather([Path(source) for source in request.sources], request.before)
    write_start(Path(request.out), reached.step, reached.parameters, reached.optimizer, reached.history)
    return {
        "step": reached.step,
        "num_parameters": sum(tensor.numel() for tensor in reached.parameters.values()),
        "optimizer": bool(reached.optimizer),
        "inexact_steps": reached.inexact_steps,
        "manifest": asdict(with_boundaries(reached.manifest)),
    }
