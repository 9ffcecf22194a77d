"""Assembles all stages of one consistent step from the swarm into the files of an export."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from peerd.config.data_config import LOCAL
from peerd.config.manifest import Manifest
from peerd.config.paths import cache_folder
from peerd.control.server import Say
from peerd.daemon.peer import Peer
from peerd.daemon.run_data import SWARM
from peerd.data.tokenizer import tokenizer_path
from peerd.errors import DiskError, StageError
from peerd.models.published import check_publishable
from peerd.models.stages import estimate_stage_memory_bytes
from peerd.stage.export import EVALUATIONS_FILE, write_evaluations, write_export
from peerd.stage.hf_export import write_hf_export
from peerd.stage.snapshots import Downloaded

ATTEMPTS = 8
FILES = ("run.toml", "model.safetensors", "optimizer.safetensors", "history.jsonl")


async def export_run(peer: Peer, folder: Path, say: Say, hugging_face: bool = False) -> Mapping[str, Any]:
    """Write the newest step that every stage can give; with `hugging_face` as transformers loads it.

    StageError when the stages cannot be caught at one step; UsageError where transformers has no such model.
    """
    if hugging_face:
        check_publishable(peer.place.manifest)
    num_stages = peer.place.manifest.train.num_stages
    for _ in range(ATTEMPTS):
        found = await asyncio.gather(*(_get(peer, stage, say) for stage in range(num_stages)))
        step = min(part.step for part in found)
        if all(part.step == step or (part.step == step + 1 and _holds(part, "previous/")) for part in found):
            break
        say("the stages were at different steps; trying again")
    else:
        raise StageError("the stages could not be caught at one step", "try again")
    parameters, optimizer = assemble(found, step)
    if optimizer is None and not hugging_face:
        say("the swarm trains on: parameters are of one step, the optimizer's state is left out")
    history = [entry for entry in found[-1].history if entry.step < step]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DiskError(f"{folder}: {error.strerror}", "choose another folder") from None
    manifest = with_paths(peer.place.manifest, peer.place.data_source, peer.place.start_path)
    await peer.fetcher.fetch_tokenizer()
    if hugging_face:
        kept = tokenizer_path(peer.place.manifest.data, cache_folder())
        tokenizer = await asyncio.to_thread(kept.read_text, encoding="utf-8") if kept else ""
        files = await asyncio.to_thread(write_hf_export, folder, manifest, parameters, step, tokenizer)
    else:
        await asyncio.to_thread(write_export, folder, manifest, parameters, optimizer, history)
        files = [name for name in FILES if name != "optimizer.safetensors" or optimizer is not None]
        evaluations = [each for each in await peer.past.all_evaluations() if each.step <= step]
        await asyncio.to_thread(write_evaluations, folder, evaluations)
        files += [EVALUATIONS_FILE] if evaluations else []
    num_parameters = sum(tensor.numel() for tensor in parameters.values())
    return {"step": step, "folder": str(folder), "files": files, "num_parameters": num_parameters}


def with_paths(manifest: Manifest, source: str, start: str) -> Manifest:
    """The manifest as a run.toml of this machine: with the paths that its text, its tokenizer and its start are read from here."""
    kept = tokenizer_path(manifest.data, cache_folder())
    tokenizer = str(kept) if kept and manifest.data.tokenizer == LOCAL else manifest.data.tokenizer
    data = dataclasses.replace(manifest.data, tokenizer=tokenizer, source=source if source not in ("", SWARM) else manifest.data.source)
    manifest = dataclasses.replace(manifest, data=data)
    return dataclasses.replace(manifest, start=dataclasses.replace(manifest.start, state=start)) if start else manifest


async def _get(peer: Peer, stage: int, say: Say) -> Downloaded:
    """One stage's state; my own stage's from this daemon."""
    if stage == peer.seat.state.record.stage:
        return await peer.seat.snapshots.own()
    say(f"downloading stage {stage}")
    needed = await asyncio.to_thread(estimate_stage_memory_bytes, peer.place.manifest, stage, 0)
    return await peer.seat.downloader.download(stage, 2 * needed)


def _holds(part: Downloaded, prefix: str) -> bool:
    return any(name.startswith(prefix) for name in part.tensors)


def _newest(part: Downloaded) -> str:
    """Where the parameters lie that all updates before its step lead to."""
    return "ahead/" if _holds(part, "ahead/") else "parameters/"


def assemble(found: list[Downloaded], step: int) -> tuple[dict[str, Tensor], dict[str, Tensor] | None]:
    """Parameters of `step`; the optimizer's state too where every stage is exactly there."""
    parameters: dict[str, Tensor] = {}
    optimizer: dict[str, Tensor] = {}
    for part in found:
        prefix = _newest(part) if part.step == step else "previous/" if _newest(part) == "parameters/" else "parameters/"
        parameters |= {name.removeprefix(prefix): value for name, value in part.tensors.items() if name.startswith(prefix)}
        optimizer |= {name.removeprefix("optimizer/"): value for name, value in part.tensors.items() if name.startswith("optimizer/")}
    return parameters, optimizer if all(part.step == step for part in found) else None
