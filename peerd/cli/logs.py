"""The verb logs: shows the log of a daemon in the background. It reads the file, so it also works after the daemon has ended."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click

from peerd.cli.options import chosen_home, home_option
from peerd.errors import NoDaemonError, disk_error

if TYPE_CHECKING:
    from peerd.config.paths import Home

POLL_S = 0.2
TAIL_BYTES = 4 << 20
"""Number of bytes at the end of a log that are searched for its last lines."""
MAX_LINE_CHARS = 4000
_STYLES = {"debug": "dim", "warning": "yellow", "error": "red", "critical": "red"}


@click.command()
@click.option("--follow", "-f", is_flag=True, help="Go on with what is written, until Ctrl-C.")
@click.option("--lines", "-n", "most", type=click.IntRange(0, 100_000), default=50, show_default=True, metavar="N", help="The last N.")
@click.option("--json", "as_json", is_flag=True, help="Print the lines as JSON also on a terminal.")
@home_option
@click.pass_context
def logs(context: click.Context, follow: bool, most: int, as_json: bool) -> None:
    """Show the log of this home's daemon, where it runs in the background.

    One JSON object a line where the output is not a terminal, for people otherwise. Secrets are hidden.

    \b
    Examples:
      peerd logs -f
      peerd logs -n 1000 | jq 'select(.level == "warning")'
    """
    home = chosen_home(context)
    if not home.log.exists():
        raise NoDaemonError(f"no daemon of {home.folder} has run in the background", "one started without --detach writes to its terminal")
    show = _show_raw if as_json or not sys.stdout.isatty() else _show_readable
    try:
        with contextlib.suppress(KeyboardInterrupt):
            for line in lines_of(home, most, follow=follow):
                show(line)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        raise disk_error(home.log, error, "check its permissions") from None


def lines_of(home: Home, most: int, *, follow: bool) -> Iterator[str]:
    """The last lines, then new ones. A log that is truncated or replaced is read to its end, then the new one from its beginning."""
    stream = home.log.open("rb")
    try:
        *last, rest = _tail(stream)
        for full in home.full_logs:
            if len(last) >= most or not full.exists():
                break
            with full.open("rb") as before:
                last = [*_tail(before)[:-1], *last]
        yield from (text_of(line) for line in last[len(last) - min(most, len(last)) :])
        replaced = False
        while follow:
            chunk = stream.read()
            if chunk:
                *whole, rest = (rest + chunk).split(b"\n")
                yield from (text_of(line) for line in whole)
            elif replaced:
                stream.close()
                stream, rest, replaced = home.log.open("rb"), b"", False
            elif not (replaced := _is_another(home.log, stream)):  # if replaced, read once more: last lines may have just arrived
                time.sleep(POLL_S)
        if rest:
            yield text_of(rest)
    finally:
        stream.close()


def _tail(stream: IO[bytes]) -> list[bytes]:
    """The last lines of a file, and the unfinished line after them."""
    stream.seek(max(0, stream.seek(0, os.SEEK_END) - TAIL_BYTES))
    return stream.read().split(b"\n")


def text_of(line: bytes) -> str:
    """A line that is safe to print, without secrets and control characters."""
    from peerd.config.secret import redacted

    text = redacted(line.decode(errors="replace"))[:MAX_LINE_CHARS]
    return "".join(character if character.isprintable() else " " for character in text)


def _is_another(path: Path, stream: IO[bytes]) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False  # the next log does not exist yet
    return there.st_ino != os.fstat(stream.fileno()).st_ino or there.st_size < stream.tell()


def _show_raw(line: str) -> None:
    click.echo(line)
    sys.stdout.flush()


def _show_readable(line: str) -> None:
    from rich.text import Text

    from peerd.cli.render import console

    console().print(Text.assemble(*readable(line)), soft_wrap=True)


def local_time(stamp: str) -> str:
    """The time of day here of a time stamp in UTC, as the log has it; its first 8 characters if it is none."""
    try:
        return datetime.fromisoformat(stamp).astimezone().strftime("%H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return stamp[:8]


def readable(line: str) -> list[tuple[str, str]]:
    """A JSON line as time, level, event and fields, each with its style; other lines are unchanged."""
    try:
        fields = json.loads(line)
        event, level, stamp = str(fields.pop("event")), str(fields.pop("level", "")), str(fields.pop("timestamp", ""))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return [(line, "")]
    told = " ".join(f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in fields.items())
    return [
        (f"{local_time(stamp)} ", "dim"),
        (f"{level:<8}", _STYLES.get(level, "")),
        (event, "bold"),
        (f"  {told}" if told else "", "dim"),
    ]
