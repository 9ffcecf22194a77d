"""The verb new: writes a run.toml, for a run from first weights or for one that goes on where another has come to."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click
from click.core import ParameterSource

from peerd.cli.options import (
    MEMORY,
    SEED,
    STAGES,
    FiniteRange,
    create_folder,
    existing_path,
    existing_source,
    home_option,
    json_option,
)
from peerd.errors import DiskError, UsageError

if TYPE_CHECKING:
    from peerd.config.manifest import DataConfig, Manifest
    from peerd.planner.workload import StageEstimate

START_FILE = "start.safetensors"

_TRAIN_FIELDS = (
    *("num_stages", "microbatches_per_step", "microbatch_size", "sequence_length", "steps", "learning_rate", "accumulate"),
    *("evaluate_every_steps", "evaluation_microbatches"),
)
_MODEL_FLAGS = {"num_layers": "--layers", "d_model": "--d-model", "num_heads": "--heads", "d_ff": "--d-ff"}
_POSITIVE = click.IntRange(1, 1_000_000)


@click.command()
@click.argument("folder", metavar="DIR")
@click.option("--name", help="Name of the run; part of its id.  [default: the folder's name]")
@click.option("--stages", "num_stages", type=STAGES, default=2, show_default=True, help="Parts the model is cut into.")
@click.option("--layers", "num_layers", type=_POSITIVE, help="Layers of the model.  [default: 4, or one per stage]")
@click.option("--d-model", type=_POSITIVE, default=128, show_default=True, help="Width of the model.")
@click.option("--heads", "num_heads", type=_POSITIVE, default=4, show_default=True, help="Attention heads.")
@click.option("--d-ff", type=_POSITIVE, help="Width of the hidden layer.  [default: 4 x d-model]")
@click.option("--sequence-length", type=click.IntRange(2, 1 << 20), default=128, show_default=True, help="Tokens per sequence.")
@click.option("--microbatch-size", type=click.IntRange(1, 65536), default=4, show_default=True, help="Sequences per microbatch.")
@click.option("--microbatches", "microbatches_per_step", type=click.IntRange(1, 8192), default=16, show_default=True, help="Per step.")
@click.option("--data", "source", default="stdlib", show_default=True, metavar="SOURCE", help="Text to train on; see below.")
@click.option("--field", metavar="NAME", help="Where jsonl and parquet files have the text.  [default: text]")
@click.option("--tokenizer", default="bytes", show_default=True, metavar="NAME", help="bytes, bpe:SIZE, a tokenizer.json or its folder.")
@click.option("--evaluation-fraction", type=FiniteRange(0, 0.5), default=0.0, show_default=True, help="Share of the text kept for it.")
@click.option(
    "--evaluate-every", "evaluate_every_steps", type=click.IntRange(0, 10**9), default=0, show_default=True, help="Steps; 0: never."
)
@click.option("--evaluation-microbatches", type=click.IntRange(1, 8192), default=16, show_default=True, help="Per evaluation.")
@click.option("--steps", type=click.IntRange(0, 10**9), default=0, show_default=True, help="End after so many steps; 0: never.")
@click.option("--learning-rate", type=FiniteRange(0, 100), default=3e-3, show_default=True, help="Of AdamW.")
@click.option("--seed", type=SEED, default=0, show_default=True, help="First weights and order of the text.")
@click.option("--accumulate", type=click.Choice(["float32", "float64"]), default="float32", show_default=True, help="Gradient sums.")
@click.option("--from", "sources", multiple=True, metavar="FOLDER", help="Go on from an earlier run's state; see below.")
@click.option("--device-memory", type=MEMORY, metavar="SIZE", help="Cut so that each stage fits a device with so much, e.g. 8GB.")
@click.option("--force", is_flag=True, help="Overwrite an existing run.toml (never the key).")
@home_option
@json_option
@click.pass_context
def new(
    context: click.Context, /, folder: str, sources: tuple[str, ...], device_memory: int | None, force: bool, as_json: bool, **fields: Any
) -> None:
    """Write DIR/run.toml and the organiser's key.

    run.toml says what is trained, on what and how; edit it as you like before the run starts. organiser.key signs the
    run: keep it, and keep it to yourself. An existing key is used again.

    SOURCE is a file or folder of text, jsonl or parquet files, an http(s) address, hub:OWNER/NAME on a model hub, or stdlib.
    It is turned into tokens when the run starts. bpe:SIZE trains a tokenizer on the text itself.

    With --from the run goes on where an earlier one has come to, with its optimizer's state and all its fields but those
    that flags name; the number of stages may be another. FOLDER is what `peerd export` wrote; or, repeated, the homes of
    peers that hold every stage between them: then the newest step of which their checkpoints have every parameter is taken.

    With --device-memory the model is cut into --stages, or into as few as it takes, so that the smallest device can serve each
    of them. What each stage takes is printed: memory, and the upload that its speed needs.

    \b
    Examples:
      peerd new my-run --stages 2 --steps 1000
      peerd start my-run
      peerd new my-run --tokenizer bpe:2048 --evaluation-fraction 0.02
      peerd new wider --from exported --stages 4 --steps 2000
    """
    target = Path(folder).expanduser().absolute()
    given = {name for name in fields if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    fixed = [flag for name, flag in _MODEL_FLAGS.items() if sources and name in given]
    if fixed:
        raise UsageError(f"{fixed[0]} cannot go with --from", "the model is the earlier run's: leave it out")
    if not sources:
        manifest = _manifest_of(target, fields)
    create_folder(target)
    run_file = target / "run.toml"
    if run_file.exists() and not force:
        raise UsageError(f"{run_file} exists", "choose another folder, or overwrite it with --force")
    if sources:
        manifest = _continued(target, sources, {name: fields[name] for name in given})
    if device_memory:
        manifest = _fitted(manifest, device_memory, "num_stages" in given)
    _write(target, manifest, as_json)


def _write(folder: Path, manifest: Manifest, as_json: bool) -> None:
    from peerd.cli.render_estimate import estimate_fields, estimate_lines
    from peerd.config.manifest import run_id
    from peerd.config.organiser import KEY_FILE, create_key, load_key, public_bytes
    from peerd.config.run_file import explained

    run_file, key_file = folder / "run.toml", folder / KEY_FILE
    key = load_key(key_file) if key_file.exists() else create_key(key_file)
    try:
        run_file.write_text(explained(manifest), encoding="utf-8")
    except OSError as error:
        raise DiskError(f"cannot write {run_file}: {error.strerror}") from None
    run = run_id(public_bytes(key), manifest.name)
    stages = _estimates(manifest)
    if as_json:
        reply = {"schema": 1, "run": run, "run_file": str(run_file), "key_file": str(key_file), "step": manifest.start.step}
        reply["stages"] = [estimate_fields(stage) for stage in stages]
        click.echo(json.dumps(reply))
        return
    click.echo(f"wrote {run_file} (edit it as you like) and {key_file} (keep it secret)")
    if manifest.start.state:
        click.echo(f"begins: at step {manifest.start.step}, in {manifest.train.num_stages} stages")
    for line in estimate_lines(stages, manifest.slots) if stages else []:
        click.echo(line)
    click.echo(f"run id: {run}")
    click.echo(f"next:   peerd start {run_file}")


def _estimates(manifest: Manifest) -> list[StageEstimate]:
    """What each stage takes; nothing for a model that must be built to know."""
    from peerd.planner.cutting import stage_layers
    from peerd.planner.kinds import planned_loads
    from peerd.planner.workload import estimate_stage

    loads = planned_loads(manifest)
    return [estimate_stage(manifest, loads, layers) for layers in stage_layers(manifest, loads)] if loads else []


def _fitted(manifest: Manifest, device_bytes: int, stages_given: bool) -> Manifest:
    """Cut for devices with so much memory."""
    from peerd.config.cut import cut_points
    from peerd.planner.cutting import fitted
    from peerd.planner.kinds import planned_loads

    loads = planned_loads(manifest)
    if loads is None:
        raise UsageError(f"--device-memory: what a model of kind {manifest.model.kind} takes is not known", "set train.cut in run.toml")
    numbers = [manifest.train.num_stages] if stages_given else range(1, len(cut_points(manifest.model)) + 2)
    return fitted(manifest, loads, device_bytes, numbers)


def _continued(folder: Path, sources: tuple[str, ...], given: dict[str, Any]) -> Manifest:
    """The earlier run's manifest with what flags name, and its state beside it as START_FILE."""
    from peerd.cli.launch import run_child
    from peerd.config import manifest as manifests

    request = {"sources": [str(Path(source).expanduser().absolute()) for source in sources], "out": str(folder / START_FILE)}
    reply = run_child("peerd.repartition", json.dumps(request), timeout_s=None, what="reading the earlier run")
    earlier = manifests.parse(cast("dict[str, Any]", reply["manifest"]), "the earlier run")
    tokenizer = given.get("tokenizer") or _known_tokenizer(earlier)
    data = _data_of({"source": earlier.data.source, "field": earlier.data.field} | given | {"tokenizer": tokenizer})
    fraction = given.get("evaluation_fraction", earlier.data.evaluation_fraction)
    if not reply["optimizer"]:
        click.echo("peerd: the state comes without the optimizer's, whose averages begin anew", err=True)
    if reply["inexact_steps"]:
        click.echo(f"peerd: {reply['inexact_steps']} steps of the earlier run were not exact", err=True)
    try:
        manifest = dataclasses.replace(
            earlier,
            name=given["name"] if given.get("name") else _name_from(folder),
            seed=given.get("seed", earlier.seed),
            data=dataclasses.replace(data, evaluation_fraction=fraction),
            start=manifests.StartConfig(state=START_FILE, step=cast("int", reply["step"])),
            train=dataclasses.replace(earlier.train, **recut(earlier, {name: given[name] for name in _TRAIN_FIELDS if name in given})),
        )
    except ValueError as error:
        raise UsageError(str(error), "correct that flag; `peerd new --help` lists them") from None
    if 0 < manifest.train.steps <= manifest.start.step:
        raise UsageError(f"the earlier run has {manifest.start.step} steps behind it", "name more with --steps, or 0 for no end")
    return manifest


def recut(earlier: Manifest, fields: dict[str, Any]) -> dict[str, Any]:
    """[train] as flags change it. In another number of stages, a cut that was chosen is chosen anew, where the model can be cut."""
    chosen = earlier.train.cut != "even" or bool(earlier.model.boundary_layers)
    moves = fields.get("num_stages", earlier.train.num_stages) != earlier.train.num_stages
    return {**fields, "cut": "cost"} if chosen and moves else fields


def _manifest_of(folder: Path, fields: dict[str, Any]) -> Manifest:
    from peerd.config.manifest import Manifest, ModelConfig, TrainConfig

    name = fields["name"] if fields["name"] is not None else _name_from(folder)
    num_layers = fields["num_layers"] or max(4, fields["num_stages"])
    d_ff = fields["d_ff"] or 4 * fields["d_model"]
    data = _data_of(fields)
    vocab_size = _vocab_size(data.tokenizer)
    try:
        return Manifest(
            name=name,
            seed=fields["seed"],
            model=ModelConfig(
                num_layers=num_layers, d_model=fields["d_model"], num_heads=fields["num_heads"], d_ff=d_ff, vocab_size=vocab_size
            ),
            data=dataclasses.replace(data, evaluation_fraction=fields["evaluation_fraction"]),
            train=TrainConfig(**{field: fields[field] for field in _TRAIN_FIELDS}),
        )
    except ValueError as error:
        raise UsageError(str(error), "correct that flag; `peerd new --help` lists them") from None


def _data_of(fields: dict[str, Any]) -> DataConfig:
    """Where the text is and what its tokens are; paths are checked and made absolute."""
    from peerd.config.data_config import LOCAL, REMOTE, DataConfig
    from peerd.data.sources import guess_field

    if fields["source"] == LOCAL:
        raise UsageError("the earlier run's text is its organiser's own", "say where it lies with --data")
    source, tokenizer = existing_source(fields["source"], "--data"), fields["tokenizer"]
    field = fields.get("field")
    if tokenizer != "bytes" and not tokenizer.startswith(("bpe:", *REMOTE)):
        tokenizer = existing_path(tokenizer, "--tokenizer", "bytes, bpe:SIZE, a tokenizer.json or its folder")
        tokenizer = tokenizer if "." in Path(tokenizer).name else tokenizer + "/"
    try:
        return DataConfig(source=source, field=guess_field(source) if field is None else field, tokenizer=tokenizer)
    except ValueError as error:
        raise UsageError(str(error), "correct --tokenizer") from None


def _known_tokenizer(earlier: Manifest) -> str:
    """The earlier run's tokenizer as this machine has it."""
    from peerd.config.data_config import LOCAL
    from peerd.config.paths import cache_folder
    from peerd.data.tokenizer import tokenizer_path

    kept = tokenizer_path(earlier.data, cache_folder())
    if kept is None and earlier.data.tokenizer == LOCAL:
        raise UsageError("the earlier run's tokenizer is its organiser's own", "say where it lies with --tokenizer")
    return str(kept) if kept is not None else earlier.data.tokenizer


def _vocab_size(tokenizer: str) -> int:
    """Of a BPE that is still to be trained, as many tokens as it is asked for."""
    from peerd.config.paths import cache_folder
    from peerd.data.download import obtain_tokenizer
    from peerd.data.progress import silent
    from peerd.data.tokenizer import BYTE_VOCABULARY, TOKENIZER_FILE, FileTokenizer

    if tokenizer == "bytes":
        return BYTE_VOCABULARY
    if tokenizer.startswith("bpe:"):
        return int(tokenizer.removeprefix("bpe:"))
    path = obtain_tokenizer(tokenizer, cache_folder(), silent)
    return FileTokenizer(path / TOKENIZER_FILE if path.is_dir() else path, "").vocab_size


def _name_from(folder: Path) -> str:
    """The folder's name as far as a run may be called so."""
    allowed = "".join(character for character in folder.name if character.isascii() and (character.isalnum() or character in "-_."))
    return allowed[:64] or "run"
