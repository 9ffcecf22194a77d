"""Flags that several verbs share, and the types of flag values."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from peerd.errors import UsageError, disk_error

if TYPE_CHECKING:
    from peerd.config.paths import Home
    from peerd.control.client import ControlClient

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

USUAL_NICE = 10
"""Niceness of a daemon that is started from the command line, unless --nice says otherwise."""
EXPORTED_FILES = frozenset(
    {"run.toml", "model.safetensors", "optimizer.safetensors", "history.jsonl", "evaluations.jsonl"}
    | {"config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json"}
)
EXPORTED_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


class FiniteRange(click.FloatRange):
    """A float range that refuses NaN and infinity. Comparisons with the limits do not catch them."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


class MemorySize(click.ParamType[int]):
    """A number of bytes, written as `8GB` or `24GiB`."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?([MGT]i?)B", str(value), re.ASCII)
        size = int(float(found[1]) * _UNITS[found[2]]) if found else 0
        if size <= 0:
            self.fail(f"{value!r} is not a size such as 8GB or 24GiB.", param, ctx)
        return size


class OutputFolder(click.ParamType[Path]):
    """A folder for an exported model: absent, empty, or holding nothing but an earlier export."""

    name = "directory"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        folder = Path(value).expanduser().absolute()
        if folder.exists() and not folder.is_dir():
            self.fail(f"{folder} is a file, not a folder.", param, ctx)
        try:
            names = [entry.name for entry in folder.iterdir()] if folder.exists() else []
        except OSError as error:
            self.fail(f"{folder} cannot be read: {error.strerror}.", param, ctx)
        foreign = sorted(name for name in names if name not in EXPORTED_FILES and not EXPORTED_SHARD.fullmatch(name))
        if foreign:
            self.fail(f"{folder} already holds {foreign[0]!r}; name an empty folder, or one that holds only an earlier export.", param, ctx)
        return folder


OUTPUT_FOLDER = OutputFolder()
_UNITS = {"M": 10**6, "G": 10**9, "T": 10**12, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
MEMORY = MemorySize()
SEED = click.IntRange(0, 2**63 - 1)
STEPS = click.IntRange(1, 10**9)
STAGES = click.IntRange(1, 4096)
STAND_IN_MS = FiniteRange(0, 3_600_000)
TIMEOUT_S = FiniteRange(0, 30 * 86400)
STAY_HOURS = FiniteRange(0, 10 * 366 * 24)


def create_folder(folder: Path) -> None:
    """Create a folder for the user's results. UsageError or DiskError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UsageError(f"cannot make the folder {folder}: a file is in the way", "name another folder") from None
    except OSError as error:
        raise disk_error(folder, error, "name a folder you can write to") from None


def home_option(command: Decorated) -> Decorated:
    """Add --home to a verb. The group has it, too, so that it may also stand before the verb."""
    return click.option(
        "--home",
        metavar="DIR",
        expose_value=False,
        callback=_remember_home,
        help="Folder of the daemon's identity, state and control socket (PEERD_HOME).",
    )(command)


def daemon_options(*, data: str, host: str, host_help: str, detach: str) -> Callable[[Decorated], Decorated]:
    """Add the options of a daemon that takes part in a run. The arguments are the differences between `start` and `join`."""
    port = click.IntRange(0, 65535)
    options = (
        click.option("--stage", type=click.IntRange(0, 4095), help="Stage to serve.  [default: the one that needs help most]"),
        click.option("--stay", "stay_hours", type=STAY_HOURS, default=0.0, metavar="HOURS", help="How long this machine means to stay."),
        click.option(
            "--device",
            default="auto",
            show_default=True,
            help="auto, cpu, cuda, cuda:N or mps; all, cuda:0,cuda:1 or cpu:0,cpu:1: a daemon for each.",
        ),
        click.option("--nickname", metavar="NAME", help="What others see beside this peer's id.  [default: the last; '' for none]"),
        click.option("--team", metavar="NAME", help="The name of a team, shown beside it and added up.  [default: the last]"),
        click.option("--unlisted/--listed", default=None, help="Be named in no table of who computed how much.  [default: the last]"),
        click.option(
            "--nice",
            type=click.IntRange(0, 19),
            default=USUAL_NICE,
            show_default=True,
            help="Give way to other programs; 0: as much as they do.",
        ),
        click.option("--data", metavar="SOURCE", help=data),
        click.option("--host", default=host, show_default=bool(host), help=host_help),
        click.option("--port", type=port, default=0, show_default=True, help="TCP port to listen on; 0: any free one."),
        click.option("--no-port-mapping", is_flag=True, help="Do not ask the router to forward the port."),
        click.option("--direct-port", type=port, default=0, show_default=True, help="TCP port for direct connections; 0: any free one."),
        click.option("--no-direct", is_flag=True, help="Let the libp2p tunnel carry everything, through one port."),
        click.option("--no-quic", is_flag=True, help="No direct connections through routers, where the package for them is installed."),
        click.option(
            "--quic-port", type=port, default=0, show_default=True, help="UDP port for connections through routers; 0: any free one."
        ),
        click.option("--no-local", is_flag=True, help="TLS also to your other daemons on this machine, in place of a local socket."),
        click.option("--relay", is_flag=True, help="Volunteer as a relay for peers that nobody can dial."),
        click.option("--relay-rate", metavar="RATE", default="none", help="Relay at most that much, like 20Mbit."),
        click.option("--relay-daily", metavar="SIZE", default="none", help="Relay at most that much a day, like 50GB."),
        click.option("--detach", is_flag=True, help=detach),
        click.option("--compute-stand-in", "compute_stand_in_ms", type=STAND_IN_MS, default=0.0, metavar="MS", hidden=True),
        click.option("--slow", "slow_factor", type=FiniteRange(1, 1000), default=1.0, metavar="FACTOR", hidden=True),
        click.option("--dashboard-port", type=port, default=0, show_default=True, help="Port of the dashboard; 0: any free one."),
        click.option("--dashboard-host", default="127.0.0.1", show_default=True, help="IP address it listens on."),
        click.option("--dashboard-public", "--public", is_flag=True, help="Anybody may look at it, nobody may act in it."),
        click.option(
            "--sample", metavar="TEXT", default="", help="After each evaluation the dashboard shows how the model goes on from it."
        ),
        click.option("--no-dashboard", is_flag=True, help="No dashboard and no metrics."),
        click.option("--otel", is_flag=True, help="Export OpenTelemetry traces of some microbatches (OTEL_* variables)."),
        click.option("--tensorboard", metavar="DIR", default="", help="Write scalars for TensorBoard there."),
        click.option("--wandb", metavar="PROJECT", default="", help="Log scalars to Weights & Biases."),
        click.option("--moves", metavar="DIR", default="", help="Note local steps there, for `peerd reference --replay`."),
        home_option,
        json_option,
    )

    def decorate(command: Decorated) -> Decorated:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def told_settings(flags: dict[str, Any]) -> dict[str, Any]:
    """The daemon's settings from --otel, --tensorboard, --wandb and --moves. UsageError where a library is missing."""
    from importlib.util import find_spec

    wanted = (("otel", "opentelemetry", "otel"), ("tensorboard", "tensorboardX", "tensorboard"), ("wandb", "wandb", "wandb"))
    for flag, module, extra in wanted:
        if flags[flag] and find_spec(module) is None:
            raise UsageError(f"--{flag} needs a library that is not installed", f"pip install 'peerd[{extra}]'")
    folders = {flag: str(Path(flags[flag]).expanduser().absolute()) if flags[flag] else "" for flag in ("tensorboard", "moves")}
    for folder in filter(None, folders.values()):
        create_folder(Path(folder))
    return {"otel": flags["otel"], "wandb": flags["wandb"], **folders}


def relay_settings(flags: dict[str, Any]) -> dict[str, Any]:
    """The daemon's settings from --relay, --relay-rate and --relay-daily. UsageError for an invalid value."""
    from peerd.config.limits import parse_rate, parse_size

    settings: dict[str, Any] = {"relay": flags["relay"]}
    for name, parse in (("relay_rate", parse_rate), ("relay_daily", parse_size)):
        flag, value = "--" + name.replace("_", "-"), flags[name]
        try:
            settings[name] = parse(value)
        except ValueError as error:
            raise UsageError(f"{flag}: {error}") from None
        if settings[name] and not flags["relay"]:
            raise UsageError(f"{flag} limits relaying, which is off", "add --relay to volunteer")
    return settings


def json_option(command: Decorated) -> Decorated:
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")(command)


def reply_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --home and --json to a verb."""
    return home_option(json_option(command))


def daemon_command(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --home and --json to a verb, and pass it the context, which knows the home."""
    return reply_options(click.pass_context(command))


def is_printed(reply: Mapping[str, Any], as_json: bool) -> bool:
    """Print the reply if it is wanted as JSON. Returns False if it remains to be printed as text."""
    if as_json:
        click.echo(json.dumps(reply))
    return as_json


def _remember_home(context: click.Context, _parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        if not value or "\0" in value:
            raise click.BadParameter("must name a folder", ctx=context)
        context.find_root().obj = value


def chosen_home(context: click.Context) -> Home:
    """The home named by --home, else by PEERD_HOME, else the platform's state folder."""
    from peerd.config.paths import resolve_home

    home = resolve_home(context.find_root().obj)
    if home.folder.exists() and not home.folder.is_dir():
        raise UsageError(f"the home {home.folder} is a file", "name a folder with --home")
    return home


def daemon_of(context: click.Context) -> ControlClient:
    """A client of the chosen home's daemon; of the first that runs if it has one for each of several devices."""
    from peerd.cli.devices import running_client

    return running_client(chosen_home(context))


def ask(context: click.Context, verb: str, **arguments: Any) -> Any:
    """The reply of the chosen home's daemon."""
    return daemon_of(context).request(verb, **arguments)


def existing_source(value: str, flag: str) -> str:
    """A data source for the daemon: `stdlib`, an address, `hub:NAME`, or the absolute path of a readable file or folder."""
    from peerd.config.data_config import REMOTE

    return value if value == "stdlib" or value.startswith(REMOTE) else existing_path(value, flag, "a text file or folder, or stdlib")


def existing_path(value: str, flag: str, wanted: str) -> str:
    """The absolute path of a file or folder. UsageError if it cannot be read."""
    path = Path(value).expanduser().absolute()
    try:
        if not path.exists():
            raise UsageError(f"{flag}: {path}: no such file or folder", f"name {wanted}")
        if path.is_dir():
            next(path.iterdir(), None)
        else:
            with path.open("rb"):
                pass
    except OSError as error:
        raise UsageError(f"{flag}: {path}: {error.strerror}", f"name {wanted}, that you can read") from None
    return str(path)
