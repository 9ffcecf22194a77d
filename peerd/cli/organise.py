"""The organiser's verbs data, start, export and reference; new has its own module."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, Literal

import click

from peerd import SCHEMA
from peerd.cli.calling import pasteable
from peerd.cli.devices import ask_each, check_devices, first_of, plan_devices
from peerd.cli.options import (
    OUTPUT_FOLDER,
    STEPS,
    TIMEOUT_S,
    ask,
    chosen_home,
    create_folder,
    daemon_command,
    daemon_options,
    existing_source,
    is_printed,
    relay_settings,
    reply_options,
    told_settings,
)
from peerd.errors import ExitCode, ManifestError, NoDaemonError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from peerd.cli.launch import Ready
    from peerd.config.device_homes import DeviceHomes
    from peerd.config.settings import Settings

EXPORT_SILENCE_S = 600.0
_SAME_SETTINGS = (
    *("port", "direct_port", "quic_port", "device", "nice", "nickname", "team", "unlisted", "compute_stand_in_ms", "slow_factor"),
    *("dashboard_port", "dashboard_public", "sample"),
)
"""Flags whose values are the settings of the same name."""


@click.command()
@click.argument("run_file", metavar="RUN.toml")
@click.option(
    "--placement",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="What `peerd plan --write` wrote: which peer is to serve which stage.",
)
@daemon_options(
    data="The text, where it lies elsewhere: a file, a folder or an address.",
    host="127.0.0.1",
    host_help="IPv4 address to listen on; 0.0.0.0 lets other machines join.",
    detach="Return once others can join; the daemon goes on in the background.",
)
@click.pass_context
def start(context: click.Context, /, run_file: str, placement: Path | None, detach: bool, as_json: bool, **flags: Any) -> int:
    """Start a run's first peer and print the line that others paste to join.

    RUN.toml is what `peerd new DIR` wrote (DIR alone will do); organiser.key must lie beside it. Runs in the foreground
    unless --detach: Ctrl-C leaves the swarm gracefully, a second Ctrl-C leaves at once. A peer serves one stage, and a step needs
    a peer at each: --device cpu:0,cpu:1 starts two peers on this machine, and --device all one for each GPU.

    --placement notes in RUN.toml the stage that each peer of a plan takes when it joins, where it fits its memory.

    \b
    Examples:
      peerd start my-run
      peerd start my-run --device cpu:0,cpu:1
      peerd start my-run --host 0.0.0.0 --port 31337 --detach
      peerd start my-run --placement placement.json
    """
    from peerd.config import manifest
    from peerd.config.organiser import KEY_FILE, load_key

    path = run_file_path(run_file)
    if placement is not None:
        from peerd.cli.placing import note_placement

        note_placement(path, placement.expanduser())
    run = manifest.load(path)
    load_key(path.parent / KEY_FILE)
    if flags["stage"] is not None and flags["stage"] >= run.train.num_stages:
        raise UsageError(f"--stage {flags['stage']}: the run has stages 0 to {run.train.num_stages - 1}", "name one of those")
    settings = settings_of(context, flags, run_file=str(path))
    if detach:  # tokenizing may take hours, and a daemon in the background shows no progress
        _prepare(path, settings.data)
    return launch(context, settings, detach=detach, as_json=as_json)


@click.command()
@click.argument("run_file", metavar="RUN.toml")
@click.option("--data", metavar="SOURCE", help="The text, where it lies elsewhere: a file, a folder or an address.")
@reply_options
def data(run_file: str, data: str | None, as_json: bool) -> None:
    """Turn a run's text into tokens, and say what they are.

    `peerd start` does so too; this is for a large text ahead of the start. A bar shows how far it is, and what is
    interrupted goes on with the next command. The file stays in your cache folder.

    \b
    Example:
      peerd data my-run
    """
    reply = _prepare(run_file_path(run_file), existing_source(data, "--data") if data else "")
    if is_printed(reply, as_json):
        return
    ends = f", documents end with {reply['end_of_text']}" if reply["end_of_text"] else ""
    click.echo(f"text:       {reply['source']}")
    click.echo(f"tokenizer:  {reply['tokenizer']}, {reply['vocab_size']:,} tokens{ends}")
    click.echo(f"tokens:     {reply['num_tokens']:,} of {reply['token_bytes']} bytes; one pass is {reply['steps_per_pass']:,.1f} steps")
    click.echo(f"evaluation: {reply['num_evaluation_tokens']:,} of them are kept for it")
    click.echo(f"file:       {reply['file']}")


def _prepare(path: Path, source: str) -> dict[str, Any]:
    """Make the token file in a child process, so that the client does not load the libraries for it."""
    from peerd.cli.launch import run_child

    return run_child("peerd.data.prepare", {"run_file": str(path), "data": source}, what="making the token file")


def run_file_path(value: str) -> Path:
    """The path of a run.toml, named by its own path or by its folder."""
    path = Path(value).expanduser().absolute()
    if path.is_dir() or path.suffix != ".toml":
        path = path / "run.toml"
    if not path.exists():
        raise ManifestError(f"{path}: no such file", f"write one with `peerd new {quote(str(path.parent))}`")
    return path


def settings_of(context: click.Context, flags: dict[str, Any], *, run_file: str = "", join: str = "") -> Settings:
    """The daemon's settings from the flags of `start` or `join`."""
    from peerd.config.settings import Settings

    check_devices(flags["device"])
    same = {name: flags[name] for name in _SAME_SETTINGS}
    same |= {name: not flags[f"no_{name}"] for name in ("port_mapping", "direct", "quic", "local", "dashboard")}
    try:
        return Settings(
            home=str(chosen_home(context).folder),
            run_file=run_file,
            join=join,
            host=ipv4(flags["host"]),
            spares_laptop=True,
            **same,
            **relay_settings(flags),
            stage=-1 if flags["stage"] is None else flags["stage"],
            keeps_stage=flags["stage"] is not None,
            stays_s=3600 * flags["stay_hours"],
            data=_source_of(flags["data"], joins=not run_file),
            dashboard_host=_address("--dashboard-host", flags["dashboard_host"], "IP"),
            **told_settings(flags),
        )
    except ValueError as error:
        raise UsageError(str(error)) from None


def _source_of(data: str | None, *, joins: bool) -> str:
    """The value of --data for the daemon. Only a joining daemon can fetch the data from the swarm."""
    if joins and data == "swarm":
        return data
    return existing_source(data, "--data") if data else ""


def ipv4(host: str) -> str:
    """The value of --host for the daemon. UsageError if it is not an IPv4 address."""
    return _address("--host", host, "IPv4") if host else ""


def _address(flag: str, host: str, kind: Literal["IPv4", "IP"]) -> str:
    import ipaddress

    parse = ipaddress.IPv4Address if kind == "IPv4" else ipaddress.ip_address
    try:
        return str(parse("127.0.0.1" if host == "localhost" else host))
    except ValueError:
        raise UsageError(f"{flag} {host}: not an {kind} address", "name one of this machine's, or 0.0.0.0 for all") from None


def launch(context: click.Context, settings: Settings, *, detach: bool, as_json: bool) -> int:
    """Run the daemon in place of this process, or detached and print its address. With several devices this process minds their daemons."""
    from peerd.cli.launch import run_detached, run_in_foreground

    homes, each = plan_devices(settings, chosen_home(context))
    if homes.are_several:
        return _launch_each(homes, each, detach=detach, as_json=as_json)
    if not detach:
        run_in_foreground(each[0], as_json=as_json)
    with telling_doing(as_json) as hear:
        ready = run_detached(each[0], homes.root, hear)
    if is_printed({"schema": SCHEMA, **dataclasses.asdict(ready)}, as_json):
        return ExitCode.OK
    click.echo(f"peerd join {ready.join}")
    click.echo(f"the daemon goes on in the background (process {ready.pid}); its log: {homes.root.log}", err=True)
    _tell_more(homes)
    return ExitCode.OK


@contextlib.contextmanager
def telling_doing(as_json: bool) -> Iterator[Callable[[str], None]]:
    """Show what a daemon does until it can be reached: beside a spinner on a terminal, else a line each. Nothing for scripts."""
    if as_json:
        yield lambda _text: None
        return
    if not sys.stderr.isatty():
        yield lambda text: click.echo(f"peerd: {text}", err=True)
        return
    from peerd.cli.render import console, plain

    with console(to_stderr=True).status("starting") as status:
        yield lambda text: status.update(plain(text))


def _launch_each(homes: DeviceHomes, each: Sequence[Settings], *, detach: bool, as_json: bool) -> int:
    """Start a daemon for each device, and print where others join and which devices take part."""
    from peerd.cli.supervise import Foreground, detach_each

    begun: list[dict[str, Any]] = []

    def tell(device: str, ready: Ready) -> None:
        begun.append({"device": device, **dataclasses.asdict(ready)})
        if not as_json:
            if len(begun) == 1:
                click.echo(f"peerd join {ready.join}")
            home = homes.homes[homes.devices.index(device)]
            log = f"; its log: {home.log}" if detach else ""
            click.echo(f"{device}: peer {ready.peer}, process {ready.pid}{log}", err=True)

    def tell_all() -> None:
        is_printed({"schema": SCHEMA, **{name: value for name, value in begun[0].items() if name != "device"}, "devices": begun}, as_json)
        if not as_json:
            _tell_more(homes)

    if not detach:
        return Foreground(each, tell).run(tell_all)
    try:
        with telling_doing(as_json) as hear:
            detach_each(each, homes.homes, tell, hear)
    finally:
        if begun:
            tell_all()
    return ExitCode.OK


def _tell_more(homes: DeviceHomes) -> None:
    """Say which part this machine has, what to do next, and whether the line is too slow for the run."""
    from peerd.cli.render import plain

    next_steps = pasteable("others join with the line above; watch with `peerd status`, end with `peerd leave`")
    try:
        status = first_of(ask_each(homes.root, "status"))
    except NoDaemonError:
        click.echo(next_steps, err=True)
        return  # they were told to end meanwhile
    if not homes.are_several:
        stage, run = status["peer"]["stage"], status["run"]
        click.echo(f"peerd: this machine serves stage {stage} of {run['num_stages']} in run {plain(run['name'], 64)}", err=True)
    click.echo(next_steps, err=True)
    for item in status["health"]:
        if item["code"] == "slow-line":
            click.echo(f"peerd: warning: {item['title']}; {item['remedy']}", err=True)


@click.command()
@click.argument("folder", metavar="DIR", type=OUTPUT_FOLDER)
@click.option("--format", "file_format", type=click.Choice(["peerd", "hf"]), default="peerd", show_default=True, help="See below.")
@click.option("--timeout", "timeout_s", type=TIMEOUT_S, metavar="S", help="Seconds to wait for the stages at most.  [default: no limit]")
@daemon_command
def export(context: click.Context, folder: Path, file_format: str, timeout_s: float | None, as_json: bool) -> None:
    """Write the whole model, of one consistent step, into DIR.

    Gathers every stage from the swarm and writes run.toml, model.safetensors, optimizer.safetensors and history.jsonl. With
    --format hf it writes what transformers' from_pretrained loads: shards, their index, config.json and a tokenizer's files.
    While a stage has nobody who serves it, or the stages are not at one step, it waits and says for what; Ctrl-C ends it.

    \b
    Examples:
      peerd export trained
      peerd export trained-hf --format hf
    """
    other = folder / ("run.toml" if file_format == "hf" else "config.json")
    if other.exists():
        raise UsageError(f"{folder} holds an export of the other format", "name another folder")
    create_folder(folder)
    limit = {} if timeout_s is None else {"timeout_s": timeout_s}
    reply = ask(
        context,
        "export",
        folder=str(folder),
        format=file_format,
        on_progress=lambda text: click.echo(f"peerd: {text}", err=True),
        silence_s=EXPORT_SILENCE_S,
        **limit,
    )
    if is_printed(reply, as_json):
        return
    click.echo(f"step {reply['step']}: {reply['num_parameters']:,} parameters in {reply['folder']}: {', '.join(reply['files'])}")


@click.command()
@click.argument("run_file", metavar="RUN.toml")
@click.option("--steps", type=STEPS, required=True, help="Steps to train.")
@click.option("--out", type=OUTPUT_FOLDER, required=True, metavar="DIR", help="Folder for the result.")
@click.option("--data", metavar="SOURCE", help="The text, where it lies elsewhere: a file, a folder or an address.")
@click.option("--replicas", type=click.IntRange(1), default=1, show_default=True, help="Copies of each stage, where steps are local.")
@click.option("--replay", metavar="DIR", help="Play what peers have done in local steps, from what they noted with --moves.")
@reply_options
def reference(run_file: str, out: Path, data: str | None, replay: str | None, as_json: bool, **numbers: int) -> None:
    """Train the same run in one process: what the swarm must equal.

    Where the run has local steps (train.local_batch), it is what as many peers of each stage as --replicas might make of it, or with
    --replay what a swarm has made of it.

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
    moves = str(Path(replay).expanduser().absolute()) if replay else ""
    request = {"run_file": str(path), "out": str(out), "data": source, "replay": moves, **numbers}
    reply = run_child("peerd.reference", request, what="the reference run")
    if is_printed(reply, as_json):
        return
    click.echo(
        f"{reply['steps']} steps in one process: loss {reply['loss_first']:.4f} -> {reply['loss_last']:.4f},"
        f" {reply['tokens_per_second']:,.0f} tokens/s; written to {out}"
    )
