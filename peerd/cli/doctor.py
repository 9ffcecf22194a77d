"""The verb doctor: checks whether this machine can take part in a run. A child process makes the checks."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from peerd import SCHEMA
from peerd.cli.options import chosen_home, daemon_command, is_printed

if TYPE_CHECKING:
    from rich.table import Table

DOCTOR_SILENCE_S = 300.0
"""It waits for answers from the network, and hashes the checkpoints, which takes as long as they are large."""
_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


@click.command()
@click.argument("addresses", metavar="[ADDRESS]...", nargs=-1)
@click.option(
    "--device", is_flag=False, flag_value="auto", help="Test this device alone, for a minute: auto (if not said), cpu, cuda, cuda:N or mps."
)
@click.option("--host", default="", help="IPv4 address that a daemon would listen on.  [default: all]")
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default=True, help="TCP port of a daemon; 0: that of last time.")
@click.option("--direct-port", type=click.IntRange(0, 65535), default=0, show_default=True, help="Its port for direct connections; 0: any.")
@daemon_command
def doctor(context: click.Context, /, addresses: tuple[str, ...], as_json: bool, **checked: Any) -> int:
    """Check everything that can keep this machine out of a run, and say what to do about it.

    Versions, device, memory, disk, limits, ports, networking process and what a crash left. With ADDRESS, or where this home knows peers
    of a run, also: clock, whether others reach this machine, also for direct connections, bandwidth, the DHT. It joins nothing, and moves
    at most 10 MB.
    Exits 0 where nothing is worse than a warning, 1 where there is a problem.

    The device that a daemon would use makes one small product then. With --device a device is tested as a whole, for a minute, and
    nothing else is: every codec, kernel and precision, a stage's life, memory and speed, naming the part that is broken. That report is
    what to send with a question about a device.

    \b
    Examples:
      peerd doctor
      peerd doctor --device cuda:0
      peerd doctor /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW... --port 31337
    """
    from peerd.cli.launch import ChildFailedError, run_child
    from peerd.cli.organise import ipv4
    from peerd.errors import TimedOutError

    order = {"home": str(chosen_home(context).folder), "addresses": addresses, **checked, "host": ipv4(checked["host"])}
    order |= {"device": checked["device"] or "auto", "self_test": checked["device"] is not None}
    told: list[bytes] = []
    with _patience():
        try:
            lines = told if order["self_test"] else None
            reply = run_child("peerd.checkup.doctor", order, what="the checkup", silence_s=DOCTOR_SILENCE_S, told=lines)
        except (ChildFailedError, TimedOutError) as error:
            unfinished = report_of(told, error.message)
            if unfinished is None:
                raise
            reply = unfinished
    if not is_printed(reply, as_json):
        print_checkup(reply)
    return 1 if reply["worst"] == "problem" else 0


@contextlib.contextmanager
def _patience() -> Iterator[None]:
    """Show a spinner if standard error is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from peerd.cli.render import console

    with console(to_stderr=True).status("checking this machine and its connection"):
        yield


def report_of(told: Sequence[bytes], how: str) -> dict[str, Any] | None:
    """The report of a self-test that did not come to its end, from the lines that it told: what was found, and the part under way.

    None if it had begun with no part.
    """
    lines = [json.loads(line) for line in told]
    parts = [line["begins"] for line in lines if "begins" in line]
    if not parts:
        return None
    last = {
        "code": parts[-1],
        "verdict": "problem",
        "title": f"the self-test ended in this part: {how}",
        "remedy": "a device that crashes or hangs needs another driver or torch, or is broken; until then use another --device",
    }
    return {"schema": SCHEMA, "worst": "problem", "checks": [*(line["found"] for line in lines if "found" in line), last]}


def print_checkup(reply: dict[str, Any]) -> None:
    """Print a table on a terminal, else one line for each check."""
    from peerd.cli.render import console, plain

    if sys.stdout.isatty():
        console().print(checkup_table(reply))
        return
    for check in reply["checks"]:
        remedy = f"; {plain(check['remedy'])}" if check["remedy"] else ""
        click.echo(f"{plain(check['verdict'])}: {plain(check['code'])}: {plain(check['title'])}{remedy}")


def checkup_table(reply: dict[str, Any]) -> Table:
    """A table of verdict, check, and finding with its remedy below."""
    from rich.table import Table
    from rich.text import Text

    from peerd.cli.render import plain

    table = Table.grid(padding=(0, 2, 0, 0))
    for check in reply["checks"]:
        told = Text(plain(check["title"]))
        if check["remedy"]:
            told.append(f"\n{plain(check['remedy'])}", style="bold")
        table.add_row(Text(check["verdict"], style=_STYLES.get(check["verdict"], "")), Text(plain(check["code"]), style="dim"), told)
    return table
