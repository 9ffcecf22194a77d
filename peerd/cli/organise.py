"""The organiser's verbs: new, start, export, reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from peerd.cli.options import (
    FACTOR,
    OUTPUT_FOLDER,
    SEED,
    STAGES,
    STAND_IN_MS,
    STEPS,
    FiniteRange,
    chosen_home,
    create_folder,
    dashboard_options,
    existing_source,
    home_option,
    json_option,
)
from peerd.errors import DiskError, ManifestError, UsageError

if TYPE_CHECKING:
    from peerd.config.manifest import Manifest
    from peerd.config.settings import Settings

EXPORT_SILENCE_S = 600.0

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
@click.option("--data", "source", default="stdlib", show_default=True, metavar="SOURCE", help="Text file or folder to train on.")
@click.option("--steps", type=click.IntRange(0, 10**9), default=0, show_default=True, help="End after so many steps; 0: never.")
@click.option("--learning-rate", type=FiniteRange(0, 100), default=3e-3, show_default=True, help="Of AdamW.")
@click.option("--seed", type=SEED, default=0, show_default=True, help="First weights and order of the text.")
@click.option("--accumulate", type=click.Choice(["float32", "float64"]), default="float32", show_default=True, help="Gradient sums.")
@click.option("--force", is_flag=True, help="Overwrite an existing run.toml (never the key).")
@home_option
@json_option
def new(folder: str, force: bool, as_json: bool, **fields: Any) -> None:
    """Write DIR/run.toml and the organiser's key.

    run.toml says what is trained, on what and how; edit it as you like before the run starts. organiser.key signs the
    run: keep it, and keep it to yourself. An existing key is used again.

    \b
    Example:
      peerd new my-run --stages 2 --steps 1000
      peerd start my-run
    """
    from peerd.config.manifest import run_id
    from peerd.config.organiser import KEY_FILE, create_key, load_key, public_bytes
    from peerd.config.run_file import explained

    target = Path(folder).expanduser().absolute()
    manifest = _manifest_of(target, fields)
    create_folder(target)
    run_file, key_file = target / "run.toml", target / KEY_FILE
    if run_file.exists() and not force:
        raise UsageError(f"{run_file} exists", "choose another folder, or overwrite it with --force")
    key = load_key(key_file) if key_file.exists() else create_key(key_file)
    try:
        run_file.write_text(explained(manifest), encoding="utf-8")
    except OSError as error:
        raise DiskError(f"cannot write {run_file}: {error.strerror}") from None
    run = run_id(public_bytes(key), manifest.name)
    if as_json:
        click.echo(json.dumps({"schema": 1, "run": run, "run_file": str(run_file), "key_file": str(key_file)}))
        return
    click.echo(f"wrote {run_file} (edit it as you like) and {key_file} (keep it secret)")
    click.echo(f"run id: {run}")
    click.echo(f"next:   peerd start {run_file}")


def _manifest_of(folder: Path, fields: dict[str, Any]) -> Manifest:
    from peerd.config.manifest import DataConfig, Manifest, ModelConfig, TrainConfig

    name = fields["name"] if fields["name"] is not None else _name_from(folder)
    num_layers = fields["num_layers"] or max(4, fields["num_stages"])
    d_ff = fields["d_ff"] or 4 * fields["d_model"]
    source = existing_source(fields["source"], "--data")
    train = ("num_stages", "microbatches_per_step", "microbatch_size", "sequence_length", "steps", "learning_rate", "accumulate")
    try:
        return Manifest(
            name=name,
            seed=fields["seed"],
            model=ModelConfig(num_layers=num_layers, d_model=fields["d_model"], num_heads=fields["num_heads"], d_ff=d_ff),
            data=DataConfig(source=source),
            train=TrainConfig(**{field: fields[field] for field in train}),
        )
    except ValueError as error:
        raise UsageError(str(error), "correct that flag; `peerd new --help` lists them") from None


def _name_from(folder: Path) -> str:
    """The folder's name as far as a run may be called so."""
    allowed = "".join(character for character in folder.name if character.isascii() and (character.isalnum() or character in "-_."))
    return allowed[:64] or "run"


@click.command()
@click.argument("run_file", metavar="RUN.toml")
@click.option("--stage", type=click.IntRange(0, 4095), help="Stage to serve.  [default: the one that needs help most]")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:N or mps.")
@click.option("--data", metavar="PATH", help="Text file or folder, where it lies elsewhere on this machine.")
@click.option("--host", default="127.0.0.1", show_default=True, help="IPv4 address to listen on; 0.0.0.0 lets other machines join.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default=True, help="TCP port to listen on; 0: any free one.")
@click.option("--detach", is_flag=True, help="Return once others can join; the daemon goes on in the background.")
@click.option("--compute-stand-in", "stand_in_ms", type=STAND_IN_MS, default=0.0, metavar="MS", hidden=True)
@click.option("--slow", "slow_factor", type=FACTOR, default=1.0, metavar="FACTOR", hidden=True)
@dashboard_options
@home_option
@json_option
@click.pass_context
def start(context: click.Context, /, run_file: str, detach: bool, as_json: bool, **flags: Any) -> None:
    """Start a run's first peer and print the line that others paste to join.

    RUN.toml is what `peerd new DIR` wrote (DIR alone will do); organiser.key must lie beside it. Runs in the foreground
    unless --detach: Ctrl-C leaves the swarm gracefully, a second Ctrl-C leaves at once.

    \b
    Examples:
      peerd start my-run
      peerd start my-run --host 0.0.0.0 --port 31337 --detach
    """
    from peerd.config import manifest
    from peerd.config.organiser import KEY_FILE, load_key

    path = run_file_path(run_file)
    run = manifest.load(path)
    load_key(path.parent / KEY_FILE)
    if flags["stage"] is not None and flags["stage"] >= run.train.num_stages:
        raise UsageError(f"--stage {flags['stage']}: the run has stages 0 to {run.train.num_stages - 1}", "name one of those")
    launch(context, settings_of(context, flags, run_file=str(path)), detach=detach, as_json=as_json)


def run_file_path(value: str) -> Path:
    """A run.toml by its own path or its folder's."""
    path = Path(value).expanduser().absolute()
    if path.is_dir() or path.suffix != ".toml":
        path = path / "run.toml"
    if not path.exists():
        raise ManifestError(f"{path}: no such file", f"write one with `peerd new {path.parent}`")
    return path


def settings_of(context: click.Context, flags: dict[str, Any], *, run_file: str = "", join: str = "") -> Settings:
    """What `start` and `join` were told, as the daemon takes it."""
    from peerd.config.settings import Settings

    if not _is_device(flags["device"]):
        raise UsageError(f"--device {flags['device']}: unknown", "name auto, cpu, cuda, cuda:N or mps")
    try:
        return Settings(
            home=str(chosen_home(context).folder),
            run_file=run_file,
            join=join,
            host=_ipv4(flags["host"]),
            port=flags["port"],
            stage=-1 if flags["stage"] is None else flags["stage"],
            stay=flags["stage"] is not None,
            device=flags["device"],
            data=existing_source(flags["data"], "--data") if flags["data"] else "",
            compute_stand_in_ms=flags["stand_in_ms"],
            slow_factor=flags["slow_factor"],
            dashboard=not flags["no_dashboard"],
            dashboard_host=_address(flags["dashboard_host"]),
            dashboard_port=flags["dashboard_port"],
            dashboard_public=flags["dashboard_public"],
        )
    except ValueError as error:
        raise UsageError(str(error)) from None


def _is_device(name: str) -> bool:
    return name in ("auto", "cpu", "cuda", "mps") or (name.startswith("cuda:") and name[5:].isascii() and name[5:].isdigit())


def _ipv4(host: str) -> str:
    import ipaddress

    if not host:
        return ""
    try:
        return str(ipaddress.IPv4Address("127.0.0.1" if host == "localhost" else host))
    except ValueError:
        raise UsageError(f"--host {host}: not an IPv4 address", "name one of this machine's, or 0.0.0.0 for all") from None


def _address(host: str) -> str:
    import ipaddress

    try:
        return str(ipaddress.ip_address("127.0.0.1" if host == "localhost" else host))
    except ValueError:
        raise UsageError(f"--dashboard-host {host}: not an IP address", "name one of this machine's, or 0.0.0.0 for all") from None


def launch(context: click.Context, settings: Settings, *, detach: bool, as_json: bool) -> None:
    """Run the daemon here, or detached and say how to reach it."""
    from peerd.cli.launch import run_detached, run_in_foreground

    if not detach:
        run_in_foreground(settings, as_json=as_json)
    home = chosen_home(context)
    ready = run_detached(settings, home)
    if as_json:
        import dataclasses

        click.echo(json.dumps({"schema": 1, **dataclasses.asdict(ready)}))
        return
    click.echo(f"peerd join {ready.join}")
    click.echo(f"the daemon goes on in the background (process {ready.pid}); its log: {home.log}", err=True)
    click.echo("others join with the line above; watch with `peerd status`, end with `peerd leave`", err=True)


@click.command()
@click.argument("folder", metavar="DIR", type=OUTPUT_FOLDER)
@home_option
@json_option
@click.pass_context
def export(context: click.Context, folder: Path, as_json: bool) -> None:
    """Write the whole model, of one consistent step, into DIR.

    Gathers every stage from the swarm and writes run.toml, model.safetensors, optimizer.safetensors and history.jsonl.

    \b
    Example:
      peerd export trained
    """
    from peerd.control.client import ControlClient

    client = ControlClient(chosen_home(context))
    create_folder(folder)
    reply = client.request(
        "export", folder=str(folder), silence_s=EXPORT_SILENCE_S, on_progress=lambda text: click.echo(f"peerd: {text}", err=True)
    )
    if as_json:
        click.echo(json.dumps(reply))
        return
    click.echo(f"step {reply['step']}: {reply['num_parameters']:,} parameters in {reply['folder']}: {', '.join(reply['files'])}")


@click.command()
@click.argument("run_file", metavar="RUN.toml")
@click.option("--steps", type=STEPS, required=True, help="Steps to train.")
@click.option("--out", type=OUTPUT_FOLDER, required=True, metavar="DIR", help="Folder for the result.")
@click.option("--data", metavar="PATH", help="Text file or folder, where it lies elsewhere on this machine.")
@home_option
@json_option
def reference(run_file: str, steps: int, out: Path, data: str | None, as_json: bool) -> None:
    """Train the same run in one process: what the swarm must equal.

    \b
    Example:
      peerd demo --steps 5 --accumulate float64 --out A
      peerd reference A/run.toml --steps 5 --out B
    """
    from peerd.cli.launch import run_child
    from peerd.config import manifest

    path = run_file_path(run_file)
    manifest.load(path)
    source = existing_source(data, "--data") if data else ""
    create_folder(out)
    request = json.dumps({"run_file": str(path), "steps": steps, "out": str(out), "data": source})
    reply = run_child("peerd.reference", request, timeout_s=None, what="the reference run")
    if as_json:
        click.echo(json.dumps(reply))
        return
    click.echo(
        f"{reply['steps']} steps in one process: loss {reply['loss_first']:.4f} -> {reply['loss_last']:.4f},"
        f" {reply['tokens_per_second']:,.0f} tokens/s; written to {out}"
    )
