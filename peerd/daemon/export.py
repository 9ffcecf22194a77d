"""Downloads all stages at one step from the swarm and writes the files of an export."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog
from torch import Tensor

from peerd.config.data_config import LOCAL
from peerd.config.manifest import Manifest
from peerd.config.paths import cache_folder
from peerd.control.server import Say
from peerd.control.teller import Teller
from peerd.daemon.comparing import Compared, Comparing
from peerd.daemon.peer import Peer
from peerd.daemon.run_data import SWARM
from peerd.data.tokenizer import tokenizer_path
from peerd.errors import StageError, TimedOutError, disk_error
from peerd.models.chosen import Chosen
from peerd.models.published import check_publishable
from peerd.models.stages import whole_parameter_spec
from peerd.policy.step.proving import PATIENCE_TIMES, Acceptance, Opinion, StateVerdict
from peerd.stage.export import EVALUATIONS_FILE, write_evaluations, write_export
from peerd.stage.hf_export import write_hf_export
from peerd.stage.snapshots import Downloaded
from peerd.step.proving import LEAST_PATIENCE_S
from peerd.table.record import Phase
from peerd.table.swarm_view import CONDEMNED_LIVES
from peerd.table.view import LiveView

LOG = structlog.get_logger()
LOOK_PERIOD_S = 1.0
FILES = ("run.toml", "model.safetensors", "optimizer.safetensors", "history.jsonl")


async def export_run(peer: Peer, folder: Path, say: Say, timeout_s: float = math.inf, hugging_face: bool = False) -> Mapping[str, Any]:
    """Write the newest step that every stage can give; with `hugging_face` in the format of transformers.

    Raises TimedOutError if the stages cannot give one step within `timeout_s`, UsageError if transformers has no such model.
    """
    if hugging_face:
        check_publishable(peer.place.manifest)
    teller = Teller(say)
    return await teller.through(_export(peer, folder, teller, timeout_s, hugging_face))


async def _export(peer: Peer, folder: Path, say: Say, timeout_s: float, hugging_face: bool) -> Mapping[str, Any]:
    compared = await _of_one_step(peer, say, timeout_s)
    found = [part.found for part in compared]
    unproven = [why for stage, part in enumerate(compared) if (why := part.opinion.why_unproven(stage))]
    for why in unproven:
        say(f"warning: not proven: {why}")
    step = min(part.step for part in found)
    parameters, optimizer = assemble(found, step)
    if optimizer is None and not hugging_face:
        say("the swarm trains on: parameters are of one step, the optimizer's state is left out")
    history = [entry for entry in found[-1].history if entry.step < step]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(folder, error, "choose another folder") from None
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
    num_parameters = sum(map(math.prod, whole_parameter_spec(manifest).values()))  # to look at the tensors would read them
    return {"step": step, "folder": str(folder), "files": files, "num_parameters": num_parameters, "unproven": unproven}


def with_paths(manifest: Manifest, source: str, start: str) -> Manifest:
    """Return the manifest as a run.toml of this machine, with the local paths of its text, tokenizer and start state."""
    kept = tokenizer_path(manifest.data, cache_folder())
    tokenizer = str(kept) if kept and manifest.data.tokenizer == LOCAL else manifest.data.tokenizer
    data = dataclasses.replace(manifest.data, tokenizer=tokenizer, source=source if source not in ("", SWARM) else manifest.data.source)
    manifest = dataclasses.replace(manifest, data=data)
    return dataclasses.replace(manifest, start=dataclasses.replace(manifest.start, state=start)) if start else manifest


async def _of_one_step(peer: Peer, say: Say, timeout_s: float) -> list[Compared]:
    """Return the states of all stages at one step. The limit applies to waiting, not to the downloads."""
    left_s, trust = timeout_s, Acceptance()
    while True:
        train = peer.place.manifest.train
        waits = "this peer is paused" if peer.is_resting else waits_for(peer.membership.live(), train.num_stages)
        if not waits:
            say(f"gathering {train.num_stages} stages")
            compared, waits = await _download(peer)
            waits = waits or trust.why_not([part.opinion for part in compared], why_apart(compared), is_last=left_s <= 0)
            if not waits:
                return compared
        if left_s <= 0:
            raise TimedOutError(
                f"the stages did not come to one step in time: {waits}", "wait longer with --timeout, or look at `peerd peers`"
            )
        say(f"waiting: {waits}")
        began_s = time.monotonic()
        await peer.membership.changed(min(left_s, LOOK_PERIOD_S))
        left_s -= time.monotonic() - began_s


def waits_for(live: LiveView, num_stages: int) -> str:
    """Return why an export has to wait; empty if every stage can give its state."""
    serving = [live.serving(stage) for stage in range(num_stages)]
    if not all(serving):
        return f"nobody serves {_named([stage for stage, peers in enumerate(serving) if not peers])}"
    newest = [max(record.step for record in peers) for peers in serving]
    late = [stage for stage, step in enumerate(newest) if step < max(newest) - 1]
    return f"the others are steps ahead of {_named(late)}" if late else ""


def _named(stages: Sequence[int]) -> str:
    return f"stage{'s' if len(stages) > 1 else ''} {' and '.join(map(str, stages))}"


async def _download(peer: Peer) -> tuple[list[Compared], str]:
    """Return the state of every stage; an empty list and the reason if one cannot be had."""
    failed = ""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_get(peer, stage)) for stage in range(peer.place.manifest.train.num_stages)]
    except* StageError as errors:
        failed = ", ".join(str(error.args[0]) for error in errors.exceptions)
    if failed or any(task.cancelled() for task in tasks):  # the executor drops the jobs of a stage that is left
        return [], failed or "this peer has left its stage"
    return [task.result() for task in tasks], ""


def why_apart(compared: Sequence[Compared]) -> str:
    """Return why these states have no step in common; empty if they have one."""
    found = [part.found for part in compared]
    step = min(part.step for part in found)
    if all(part.step == step or (part.step == step + 1 and _holds(part, "previous/")) for part in found):
        return ""
    return "the stages were caught at different steps"


async def _get(peer: Peer, stage: int) -> Compared:
    """Return the state of a stage; that of the own stage comes from this daemon.

    Where the run certifies, others of another stage are asked whether they hold it: rule 21 (prove). What most contradict is asked for
    elsewhere from then on.
    """
    record, downloader, life_s = peer.seat.state.record, peer.seat.downloader, peer.membership.view.ttl_s
    if stage == record.stage and record.phase is not Phase.JOINING:
        return Compared(await peer.seat.snapshots.own(), Opinion())
    if not peer.place.manifest.swarm.certifies:
        return Compared(await downloader.download(stage), Opinion())
    found = await Comparing(downloader, peer.membership.live, stage, PATIENCE_TIMES * max(LEAST_PATIENCE_S, life_s)).download()
    if found.opinion.verdict is StateVerdict.WRONG:
        LOG.warning("a stage's state is refused", stage=stage, reason=found.opinion.why_unproven(stage))
        downloader.distrust(found.opinion.givers, CONDEMNED_LIVES * life_s)
    return found


def _holds(part: Downloaded, prefix: str) -> bool:
    return any(name.startswith(prefix) for name in part.tensors)


def _newest(part: Downloaded) -> str:
    """Return the prefix of the parameters to which all updates before the part's step are applied."""
    return "ahead/" if _holds(part, "ahead/") else "parameters/"


def assemble(found: list[Downloaded], step: int) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor] | None]:
    """Return the parameters of `step`, and the optimizer's state if every stage is exactly at that step."""
    parameters, optimizer = Chosen(), Chosen()
    for part in found:
        prefix = _newest(part) if part.step == step else "previous/" if _newest(part) == "parameters/" else "parameters/"
        for name in part.tensors:
            if name.startswith(prefix):
                parameters.add(name.removeprefix(prefix), part.tensors, name)
            if name.startswith("optimizer/"):
                optimizer.add(name.removeprefix("optimizer/"), part.tensors, name)
    return parameters, optimizer if all(part.step == step for part in found) else None
