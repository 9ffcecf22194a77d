"""The verb doctor: checks whether this machine can take part in a run. A child process makes the checks."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from peerd import SCHEMA
from peerd.cli.calling import pasteable
from peerd.cli.options import chosen_home, daemon_command, is_printed

if TYPE_CHECKING:
    from rich.table import Table

DOCTOR_SILENCE_S = 300.0
"""It waits for answers from the network, and hashes the checkpoints, which takes as long as they are large."""
STARTING = "checking this machine and its connection"
PARTS = {
    "versions": "installed libraries",
    "device": "the device that computes",
    "disk": "free disk space",
    "open-files": "the limit of open files",
    "pauses": "connections after a pause",
    "home": "files of this home",
    "checkpoints": "checkpoints of this home",
    "port": "the port",
    "direct": "the port for direct connections",
    "leftovers": "what a crash left",
    "p2pd": "starting the networking process",
    "reach": "asking the peer at the address",
    "clock": "comparing clocks",
    "dial-back": "peers try to reach this machine",
    "upload": "measuring the line (at most 10 MB)",
}
"""What is said while a part of the checkup is under way; parts that are not here are told by their code."""
CODE_WIDTH = 16
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
    at most 10 MB. This takes about ten seconds without ADDRESS, and up to a minute with one. Each finding is printed as soon as it is
    known; the last line says whether this machine is ready.
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
    from peerd.cli.join_link import addresses_behind
    from peerd.cli.launch import ChildFailedError, run_child
    from peerd.cli.organise import ipv4
    from peerd.errors import TimedOutError

    order = {"home": str(chosen_home(context).folder), "addresses": addresses_behind(addresses), **checked, "host": ipv4(checked["host"])}
    order |= {"device": checked["device"] or "auto", "self_test": checked["device"] is not None}
    told: list[dict[str, Any]] = []
    with _telling(as_json) as tell:

        def hear(line: bytes) -> None:
            told.append(json.loads(line))
            tell(told[-1])

        try:
            reply = run_child(
                "peerd.checkup.doctor", order, what="the checkup", silence_s=DOCTOR_SILENCE_S, hear=hear, must_tell=order["self_test"]
            )
        except (ChildFailedError, TimedOutError) as error:
            unfinished = report_of(told, error.message, order["self_test"])
            if unfinished is None:
                raise
            reply = unfinished
            tell({"found": reply["checks"][-1]})
    if not is_printed(reply, as_json):
        click.echo(pasteable(conclusion(reply["checks"], addresses, order["self_test"])))
    return 1 if reply["worst"] == "problem" else 0


@contextlib.contextmanager
def _telling(as_json: bool) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Print each finding as it comes, in a table's layout on a terminal, and show on a terminal which part is under way."""
    from peerd.cli.render import console, plain

    shows_table = sys.stdout.isatty() and not as_json
    screen = console(to_stderr=not shows_table)  # one for both, so that findings do not disturb what moves below them
    with contextlib.ExitStack() as stack:
        status = stack.enter_context(screen.status(STARTING)) if sys.stderr.isatty() else None

        def tell(line: Mapping[str, Any]) -> None:
            if status is not None and "begins" in line:
                status.update(f"{STARTING}: {plain(PARTS.get(line['begins'], line['begins']))}")
            check = line.get("found")
            if check is None or as_json:
                return
            if shows_table:
                screen.print(checkup_table([check]))
                return
            remedy = f"; {pasteable(plain(check['remedy']))}" if check["remedy"] else ""
            click.echo(f"{plain(check['verdict'])}: {plain(check['code'])}: {plain(check['title'])}{remedy}")
            sys.stdout.flush()

        yield tell


def conclusion(checks: Sequence[Mapping[str, str]], addresses: Sequence[str], self_test: bool = False) -> str:
    """The last line: whether this machine is ready, and the command that joins."""
    from peerd.cli.render import counted

    verdicts = [check["verdict"] for check in checks]
    problems, warnings = verdicts.count("problem"), verdicts.count("warning")
    warned = f" ({counted(warnings, 'warning')})" if warnings else ""
    if problems:
        return f"not ready: {counted(problems, 'problem')} above{warned}"
    if self_test:
        return f"the device passed{warned}"
    if addresses:
        return f"ready{warned}: peerd join {shlex.join(addresses)}"
    if any(check["code"] == "daemon" for check in checks):
        return f"a daemon of this home runs, and there is no problem{warned}"
    return f"this machine is ready{warned}; `peerd doctor ADDRESS` checks the connection to a run as well"


def report_of(lines: Sequence[Mapping[str, Any]], how: str, self_test: bool) -> dict[str, Any] | None:
    """The report of a checkup that did not come to its end, from the lines that it told: what was found, and the part under way.

    None if it had begun with no part.
    """
    parts = [line["begins"] for line in lines if "begins" in line]
    if not parts:
        return None
    last = {
        "code": parts[-1],
        "verdict": "problem",
        "title": f"the {'self-test' if self_test else 'checkup'} ended in this part: {how}",
        "remedy": "a device that crashes or hangs needs another driver or torch, or is broken; until then use another --device"
        if self_test
        else "try again; if it happens again, report it with these lines",
    }
    return {"schema": SCHEMA, "worst": "problem", "checks": [*(line["found"] for line in lines if "found" in line), last]}


def checkup_table(checks: Sequence[Mapping[str, str]]) -> Table:
    """A table of verdict, check, and finding with its remedy below. The first two columns have a fixed width, as rows come one by one."""
    from rich.table import Table
    from rich.text import Text

    from peerd.cli.render import plain

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=len("problem"))
    table.add_column(width=CODE_WIDTH)
    table.add_column()
    for check in checks:
        told = Text(plain(check["title"]))
        if check["remedy"]:
            told.append(f"\n{pasteable(plain(check['remedy']))}", style="bold")
        table.add_row(Text(check["verdict"], style=_STYLES.get(check["verdict"], "")), Text(plain(check["code"]), style="dim"), told)
    return table
