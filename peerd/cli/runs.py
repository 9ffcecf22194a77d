"""The verb runs: a list of runs that look for volunteers, and the organiser's line in one."""

from __future__ import annotations

import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from peerd.cli.devices import ask_each
from peerd.cli.options import chosen_home, daemon_command, is_printed
from peerd.cli.pages import is_link, read_page, secure_parts
from peerd.errors import BadMessageError, NoDaemonError, SignatureError, UsageError, disk_error

if TYPE_CHECKING:
    from peerd.config.paths import Home
    from peerd.config.run_list import ListedRun, RunList

WIDTH = 80


@click.command()
@click.argument("source", metavar="FILE|URL")
@click.option("--add", "run_file", metavar="RUN.toml", help="Sign a line about this run, and put it into FILE.")
@click.option("--at", "addresses", metavar="ADDRESS", multiple=True, help="Where others join it.  [default: at this home's daemon]")
@daemon_command
def runs(context: click.Context, /, source: str, run_file: str | None, addresses: tuple[str, ...], as_json: bool) -> None:
    """Show a list of runs, with the command that joins each.

    Each line of a list is signed by the organiser of its run, so nobody else can describe that run or name other addresses for it. Which
    runs are in the list is the word of whoever publishes it.

    An organiser writes a line with --add: organiser.key lies beside RUN.toml, the texts come from its [about]. The file can be published as
    it is, and lines of several organisers can be put into one file.

    \b
    Examples:
      peerd runs https://example.org/runs.txt
      peerd runs runs.txt --add my-run --at https://train.example.org
    """
    from peerd.control.protocol import SCHEMA

    if run_file is None:
        if addresses:
            raise UsageError("--at is for a run that is added", "name the run with --add")
        found = _read(source)
        for told in found.wrong:
            click.echo(f"peerd: warning: {source}: {told}; this line is left out", err=True)
        if found.wrong and not found.runs:
            raise SignatureError(f"{source}: no line of it holds", "ask whoever publishes it for a new one")
    else:
        found = _add(source, run_file, addresses, chosen_home(context))
    if not is_printed({"schema": SCHEMA, "runs": [_described(each) for each in found.runs], "wrong": list(found.wrong)}, as_json):
        _show(found, source)


def _read(source: str) -> RunList:
    from peerd.config.run_list import MAX_LIST_BYTES, read_runs

    try:
        return read_runs(read_page(secure_parts(source).geturl(), MAX_LIST_BYTES) if is_link(source) else _bytes_of(Path(source)))
    except BadMessageError as error:
        raise UsageError(f"{source} is no list of runs: {error.message}", "check the address or the file") from None


def _bytes_of(path: Path) -> bytes:
    """The file, and one byte more than a list may have of a longer one."""
    from peerd.config.run_list import MAX_LIST_BYTES

    try:
        with path.expanduser().open("rb") as file:
            return file.read(MAX_LIST_BYTES + 1)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file", "name a list of runs, or its address") from None
    except OSError as error:
        raise disk_error(path, error, "name a file that you can read") from None


def _add(source: str, run_file: str, addresses: tuple[str, ...], home: Home) -> RunList:
    """Sign a line about the run, and put it into the file in place of an older one."""
    from peerd.cli.organise import run_file_path
    from peerd.config import manifest
    from peerd.config.atomic import replace_file
    from peerd.config.organiser import KEY_FILE, load_key, public_bytes
    from peerd.config.run_list import HEAD, read_runs, sign_run, with_run

    if is_link(source):
        raise UsageError(f"{source}: a line is added to a file, not to a page", "name a file, and publish that")
    path, run_path = Path(source).expanduser().absolute(), run_file_path(run_file)
    run, key = manifest.load(run_path), load_key(run_path.parent / KEY_FILE)
    run_id = manifest.run_id(public_bytes(key), run.name)
    places = [address if "#" in address else f"{address}#{run_id}" for address in addresses] or [_address_here(home, run_id)]
    try:
        line = sign_run(key, run.name, places, run.about, int(time.time()))
        changed = with_run(_bytes_of(path) if path.exists() else HEAD.encode(), line)
    except ValueError as error:
        raise UsageError(f"this run cannot be listed: {error}", "name addresses of this run with --at, or shorten [about]") from None
    except BadMessageError as error:
        raise UsageError(f"{path} is no list of runs: {error.message}", "name another file") from None
    replace_file(path, changed)
    return read_runs(changed)


def _address_here(home: Home, run_id: str) -> str:
    """The address of this home's daemon, if it is in the run and others can reach it."""
    remedy = "name the run's address with --at"
    try:
        told = [answer.reply for answer in ask_each(home, "status") if answer.reply is not None]
    except NoDaemonError:
        told = []
    address: str = next((reply["join"] for reply in told if reply["run"]["id"] == run_id), "")
    if not address:
        raise UsageError("no daemon of this home is in the run, so its address is not known", remedy)
    if address.startswith("/ip4/127."):
        raise UsageError("the daemon of this home listens on this machine only", remedy)
    return address


def _described(run: ListedRun) -> dict[str, Any]:
    """A run as plain values."""
    return {"name": run.name, "run": run.run, "addresses": list(run.addresses), "about": run.about.told, "signed": run.signed_s}


def _show(found: RunList, source: str) -> None:
    if not found.runs:
        click.echo(f"{source} lists no run")
        return
    for run in found.runs:
        click.echo(run.name)
        about = run.about
        told = [about.purpose, *(f"{name}: {text}" for name, text in about.told.items() if name != "purpose")]
        signed = f"signed by its organiser on {time.strftime('%Y-%m-%d', time.gmtime(run.signed_s))}"
        for paragraph in (*filter(None, told), signed):
            click.echo(textwrap.fill(paragraph, WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False))
        click.echo(f"  peerd join {' '.join(run.addresses)}\n")  # unbroken, to be copied
    click.echo("These texts and addresses are each organiser's own. Which runs are listed is the word of whoever publishes the list.")
