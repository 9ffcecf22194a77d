"""Views of a demo: live on a terminal, one line per step elsewhere. With --json they leave standard output alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import IO, Any, Protocol

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from peerd.cli.demo_daemons import DemoSwarm
from peerd.cli.demo_figures import STAND_IN_NOTE, tokens_per_second
from peerd.cli.render import amount, console, exactness, plain, print_rows, sparkline, swarm_table


class DemoView(Protocol):
    """A view of the demo's progress."""

    def say(self, text: str) -> None: ...
    def show(self, swarm: DemoSwarm) -> None: ...


@contextlib.contextmanager
def view_of(*, as_json: bool) -> Iterator[DemoView]:
    """The view for the stream of progress: standard error with --json, else standard output."""
    out = console(to_stderr=as_json)
    if out.is_terminal:
        with Live(console=out, auto_refresh=False, transient=True) as live:
            yield TerminalView(live)
    else:
        yield LineView(out.file)


class LineView:
    """One line per step and event, for logs."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self._shown = 0

    def say(self, text: str) -> None:
        print(plain(text, 400), file=self._out, flush=True)

    def show(self, swarm: DemoSwarm) -> None:
        steps = swarm.steps
        for count in range(self._shown + 1, len(steps) + 1):
            speed = tokens_per_second(steps[:count])
            pace = f"  {speed:>8,.0f} tokens/s" if speed is not None else ""
            self.say(f"step {count:>3}/{swarm.plan.steps}  loss {steps[count - 1]['loss']:.4f}{pace}")
        self._shown = len(steps)


class TerminalView:
    """The table of the swarm, redrawn in place."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def say(self, text: str) -> None:
        self._live.console.print(plain(text, 400), markup=False)

    def show(self, swarm: DemoSwarm) -> None:
        parts: list[Text | Table] = [Text(_progress_line(swarm))]
        table = swarm.table()
        if table is not None:
            parts.append(swarm_table(table, swarm.labels()))
        self._live.update(Group(*parts), refresh=True)


def _progress_line(swarm: DemoSwarm) -> str:
    steps = swarm.steps
    losses = [step["loss"] for step in steps]
    loss = f"{losses[-1]:.4f} {sparkline(losses, 24)}" if losses else "-"
    speed = tokens_per_second(steps)
    pace = f"  {amount(speed)} tokens/s" if speed is not None else ""
    return f"step {len(steps)}/{swarm.plan.steps}  loss {loss}{pace}"


def print_summary(summary: dict[str, Any]) -> None:
    """Print the summary as text."""
    out = console()
    print_rows(out, summary_rows(summary))
    if summary["compute_stand_in_ms"]:
        out.print(Text(f"note: {STAND_IN_NOTE}", style="yellow"))


def summary_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Name and value of each row of the summary."""
    speed = summary["tokens_per_second"]
    shares = ", ".join(
        f"peer {peer} (stage {stage}): {count}"
        for peer, (stage, count) in enumerate(zip(summary["stage_of_peer"], summary["microbatches_by_peer"], strict=True))
    )
    rows = [
        ("swarm", f"{summary['peers']} peers, {summary['stages']} stages, {summary['steps']} steps in {summary['duration_s']:.0f} s"),
        ("loss", f"{summary['loss_first']:.4f} -> {summary['loss_last']:.4f}  {sparkline(summary['losses'])}"),
        ("speed", f"{speed:,.0f} tokens/s" if speed is not None else "-"),
        ("microbatches", shares),
        ("exactness", exactness(summary)),
        ("repairs", f"{summary['replayed_microbatches']} launched again, {summary['suppressed_microbatches']} recognised as already done"),
    ]
    if summary["transfers_per_boundary"] is not None:
        rows.append(("boundary", _boundary_line(summary)))
    rows += [("fault", f"{f['t_s']:.1f} s: peer {f['peer']} (stage {f['stage']}, {f['phase']}) {f['detail']}") for f in summary["faults"]]
    return rows


def _boundary_line(summary: dict[str, Any]) -> str:
    crossing, tensor = amount(summary["bytes_per_boundary_crossing"] or 0), amount(summary["boundary_tensor_bytes"])
    return f"{summary['transfers_per_boundary']:.2f} transfers per microbatch, {crossing}B each (activations: {tensor}B)"
