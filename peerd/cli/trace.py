"""The verb trace: shows the activity of every peer in the next steps, as a timeline in a file and as a table."""

from __future__ import annotations

import json
from pathlib import Path

import click

from peerd.cli.options import STEPS, TIMEOUT_S, ask, daemon_command, is_printed
from peerd.errors import UsageError, disk_error

MAX_STEPS = 1000
GRACE_S = 30.0
"""Time for the daemon to ask the other peers after the steps."""


@click.command()
@click.option("--steps", type=STEPS, default=1, show_default=True, metavar="N", help="The step under way and those after it, N in all.")
@click.option("--out", "-o", metavar="FILE", help="Write the timeline there, for ui.perfetto.dev or chrome://tracing.")
@click.option("--timeout", "timeout_s", type=TIMEOUT_S, default=600.0, show_default=True, metavar="S", help="Seconds to wait at most.")
@daemon_command
def trace(context: click.Context, steps: int, out: str | None, timeout_s: float, as_json: bool) -> None:
    """Show what the peers did in the next steps: compute, wait, wire, step end.

    Waits until the steps are over, then asks the peers. The table says what each stage's time went into, and what the
    critical path consists of. A peer that cannot be reached is named and left out. Of a run that has ended it takes the last
    steps.

    \b
    Examples:
      peerd trace --steps 3 -o timeline.json
      peerd trace --json | jq .critical_path.compute
    """
    if steps > MAX_STEPS:
        raise UsageError(f"--steps {steps}: a trace takes at most {MAX_STEPS}", "ask for fewer")
    file = _writable(out) if out else None
    reply = ask(
        context,
        "trace",
        steps=steps,
        timeout_s=timeout_s,
        silence_s=min(timeout_s, 30.0) + GRACE_S,
        on_progress=lambda text: click.echo(f"peerd: {text}", err=True),
    )
    from peerd.cli.render_trace import print_trace, summary, timeline_file

    if file is not None:
        try:
            file.write_text(json.dumps(timeline_file(reply), separators=(",", ":")), encoding="utf-8")
        except OSError as error:
            raise disk_error(file, error, "name a file you can write to") from None
    if is_printed(summary(reply), as_json):
        return
    print_trace(reply)
    if file is not None:
        click.echo(f"timeline: {file} (open it at https://ui.perfetto.dev)", err=True)


def _writable(name: str) -> Path:
    """The file, checked to be writable before the command waits for the steps."""
    file = Path(name).expanduser().absolute()
    if file.is_dir():
        raise UsageError(f"-o {file}: a folder", "name a file")
    try:
        with file.open("ab"):
            return file
    except OSError as error:
        raise UsageError(f"-o {file}: {error.strerror}", "name a file you can write to") from None
