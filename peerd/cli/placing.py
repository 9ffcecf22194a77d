"""Notes a plan's placement in a run.toml: `peerd start --placement`."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import click

from peerd.cli.new_estimate import loads_of
from peerd.config import manifest
from peerd.config.access import is_peer_id
from peerd.config.atomic import replace_file
from peerd.config.manifest import Manifest
from peerd.errors import ManifestError, UsageError
from peerd.planner.cutting import stage_layers

_LINE = re.compile(r"^placement *=.*$", re.MULTILINE)
_SECTION = re.compile(r"^\[swarm\] *$", re.MULTILINE)


def note_placement(run_file: Path, placement: Path) -> None:
    """Write the wishes of a placement into the run's file, and say how many there are. Raises UsageError, ManifestError or DiskError."""
    wishes = wishes_in(placement, manifest.load(run_file))
    text = with_wishes(run_file.read_text(encoding="utf-8"), wishes)
    try:
        noted = manifest.parse(tomllib.loads(text), str(run_file)).swarm.placement
    except tomllib.TOMLDecodeError:
        noted = ()
    if noted != wishes:
        raise ManifestError(f"{run_file}: swarm.placement cannot be written there", "write it on one line of its own, below [swarm]")
    replace_file(run_file, text)
    click.echo(f"noted in {run_file}: the stages of {len(wishes)} peers", err=True)


def wishes_in(placement: Path, run: Manifest) -> tuple[str, ...]:
    """What a placement wishes of peers, as swarm.placement has it. Raises UsageError if it is of another cut, or names no peers' ids."""
    try:
        stages = json.loads(placement.read_bytes())["stages"]
        layers = [tuple(map(int, stage["layers"])) for stage in stages]
        names = [[str(name) for name in stage["peers"]] for stage in stages]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise UsageError(f"--placement {placement}: no such placement", "name a file that `peerd plan --write` wrote") from None
    cut = [(each.start, each.stop) for each in stage_layers(run, loads_of(run))]
    if layers != cut:
        counts = ", ".join(str(stop - start) for start, *_, stop in layers)
        remedy = f"set train.num_stages = {len(layers)} and train.cut = [{counts}], or plan with --method search"
        raise UsageError(f"--placement {placement}: it cuts the model at other layers than the run", remedy)
    strangers = [name for stage in names for name in stage if not is_peer_id(name)]
    if strangers:
        remedy = "name devices by their peers' ids, which `peerd peers --json` shows, or plan with --swarm"
        raise UsageError(f"--placement {placement}: {strangers[0]!r} is no peer's id", remedy)
    return tuple(f"{name}={stage}" for stage, found in enumerate(names) for name in found)


def with_wishes(text: str, wishes: tuple[str, ...]) -> str:
    """The text of a run.toml with these wishes in place of those that it has."""
    line = f"placement = {json.dumps(wishes)}"
    if _LINE.search(text):
        return _LINE.sub(line, text, count=1)
    if _SECTION.search(text):
        return _SECTION.sub(f"[swarm]\n{line}", text, count=1)
    return f"{text.rstrip()}\n\n[swarm]\n{line}\n"
