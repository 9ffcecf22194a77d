"""The verb simulate: simulates thousands of peers in virtual time, without a daemon or a network."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from peerd import SCHEMA
from peerd.cli.options import SEED, FiniteRange, is_printed, reply_options
from peerd.errors import UsageError

if TYPE_CHECKING:
    from peerd.sim.comparison import ComparisonRow

MAX_STAGES = 512
PLACINGS = ("random", "joining", "greedy", "search")
LIES = ("part x -1", "part x -10", "part x 1000", "noise as activations", "gradients x 100", "free riding", "framing")
SHARE = FiniteRange(0.001, 1)


class StageCounts(click.ParamType[tuple[int, ...]]):
    """One or several numbers of stages, separated by commas."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = str(value).split(",")
        if not all(part.strip().isascii() and part.strip().isdigit() and 1 <= int(part) <= MAX_STAGES for part in parts):
            self.fail(f"{value!r} is not a number of stages from 1 to {MAX_STAGES}, or several with commas between.", param, ctx)
        return tuple(int(part) for part in parts)


@click.group(subcommand_metavar="WHAT [ARGS]...")
def simulate() -> None:
    """Try decisions on simulated swarms.

    The simulator runs the daemon's own decisions in virtual time. `peerd help simulate` says what it assumes.
    """


@simulate.command()
@click.option("--trace", type=click.Path(path_type=Path), metavar="FILE.csv", help="Lines of time_s,change.  [default: generated, 32 h]")
@click.option("--stages", type=StageCounts(), multiple=True, metavar="S", help="May be repeated.  [default: 4, 8, 16, 32]")
@click.option("--peers", "num_peers", type=click.IntRange(1, 100_000), help="At the start.  [default: 100 per stage]")
@click.option("--download", "download_s", type=FiniteRange(0, 86400), default=0.0, metavar="SECONDS", help="To fetch a stage's state.")
@click.option("--unlike", is_flag=True, help="Machines and links that differ by up to 8 times.")
@click.option("--view-delay", "view_delay_s", type=FiniteRange(0, 3600), default=0.0, metavar="SECONDS", help="Age of what planners see.")
@click.option("--noise", type=FiniteRange(0, 0.9), default=0.0, metavar="SHARE", help="Error of measured speeds and queues.")
@click.option("--seed", type=SEED, default=0, show_default=True, help="Of everything that is chance.")
@click.option("--runs", "num_runs", type=click.IntRange(1, 100), default=1, show_default=True, help="Take the mean over so many seeds.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Draw throughput over time as .png or .svg.")
@reply_options
def rebalance(trace: Path | None, stages: tuple[tuple[int, ...], ...], plot: Path | None, as_json: bool, **fields: Any) -> None:
    """Compare rules that move peers between stages while peers come and go.

    Prints the percent of optimal throughput that each rule reaches: over all the time, in its first and in its last hour.

    \b
    Examples:
      peerd simulate rebalance
      peerd simulate rebalance --stages 4 --download 240 --plot moves.png
      peerd simulate rebalance --trace my-churn.csv --peers 60 --json
    """
    from peerd.sim import plot as picture
    from peerd.sim.comparison import PAPER_STAGES, ComparisonSettings, compare
    from peerd.sim.trace import read_changes

    if plot is not None:
        picture.check(plot)
    chosen = tuple(dict.fromkeys(number for numbers in stages for number in numbers)) or PAPER_STAGES
    question = ComparisonSettings(num_stages=chosen, changes=read_changes(trace) if trace else None, **fields)
    rows = []
    if not as_json:
        click.echo(_HEADING)
    for row in compare(question):
        rows.append(row)
        if not as_json:
            click.echo(_told(row))
    is_printed({"schema": SCHEMA, "rows": [_fields(row) for row in rows]}, as_json)
    if plot is not None:
        picture.draw(rows, plot)
        click.echo(f"drew {plot}", err=True)


_HEADING = "percent of optimal throughput\nrule          T, s  stages  download, s  overall  first h  last h  moves"


def _told(row: ComparisonRow) -> str:
    period = f"{row.period_s:g}" if row.period_s else "-"
    percents = f"{row.overall:>7.1f}  {row.first:>7.1f}  {row.last:>6.1f}"
    return f"{row.rule:<12}{period:>6}  {row.stages:>6}  {row.download_s:>11g}  {percents}  {row.moves:>5.0f}"


def _fields(row: ComparisonRow) -> dict[str, str | int | float]:
    percents = {name: round(getattr(row, name), 2) for name in ("overall", "first", "last")}
    return {
        "rule": row.rule,
        "period_s": row.period_s,
        "stages": row.stages,
        "download_s": row.download_s,
        **percents,
        "moves": round(row.moves, 1),
    }


@simulate.command()
@click.argument("run_file", metavar="RUN.toml")
@click.option("--network", "network_file", type=click.Path(path_type=Path), metavar="FILE", help="Devices and links, as for `peerd plan`.")
@click.option("--peers", "num_peers", type=click.IntRange(1, 100_000), metavar="N", help="Or so many homes with lines as they are drawn.")
@click.option("--method", "methods", multiple=True, type=click.Choice(PLACINGS), help="May be repeated.  [default: all, or joining]")
@click.option("--steps", "num_steps", type=click.IntRange(1, 1000), default=5, show_default=True, help="Steps to simulate.")
@click.option("--noise", type=FiniteRange(0, 0.9), default=0.05, show_default=True, metavar="SHARE", help="Spread of computing times.")
@click.option("--unreliable", type=FiniteRange(0, 1), default=0.0, metavar="SHARE", help="So many of the peers come and go.")
@click.option("--departures", type=FiniteRange(0, 1), default=0.5, show_default=True, metavar="SHARE", help="Of those, that go in a step.")
@click.option("--seed", type=SEED, default=0, show_default=True, help="Of everything that is chance.")
@click.option(
    "--out", "-o", type=click.Path(path_type=Path), metavar="FILE", help="Write the last method's timeline as `peerd trace` does."
)
@reply_options
def run(run_file: str, network_file: Path | None, num_peers: int | None, methods: tuple[str, ...], as_json: bool, **fields: Any) -> None:
    """Simulate steps of a run: its microbatches over the lines of all peers, by the daemon's own policies.

    Shows tokens per second beside those that `peerd plan` expects, what each stage's time goes into, and the critical path.

    \b
    Examples:
      peerd simulate run my-run --network devices.csv
      peerd simulate run my-run --network devices.csv --method search -o timeline.json
      peerd simulate run my-run --peers 1000 --json
      peerd simulate run my-run --peers 100 --unreliable 0.4 --departures 0.3
    """
    from peerd.cli import simulate_run

    network = network_file if num_peers is None else num_peers
    if network is None or (network_file is not None and num_peers is not None):
        raise UsageError("a simulation is of one network", "give either --network FILE or --peers N")
    out = fields.pop("out")
    simulate_run.run(run_file, network, methods, simulate_run.Wanted(**fields), as_json, out)


@simulate.command()
@click.option("--lie", "lies", multiple=True, type=click.Choice(LIES), metavar="LIE", help="May be repeated.  [default: all]")
@click.option("--peers", "num_peers", type=click.IntRange(2, 256), metavar="N", help="Of the stage, the liars included.")
@click.option("--liars", "num_liars", type=click.IntRange(1, 255), metavar="K", help="[default: 1 of 4 peers, and 3 of 9]")
@click.option("--share", "shares", multiple=True, type=SHARE, metavar="F", help="Of its work that a liar falsifies.  [default: 1 and 0.1]")
@click.option("--microbatches", type=click.IntRange(1, 4096), default=16, show_default=True, help="That a peer does in a step.")
@click.option("--begins", type=click.IntRange(0, 10_000), default=10, show_default=True, help="Steps that liars are honest before.")
@click.option("--rate", type=SHARE, default=0.025, show_default=True, help="Share of all work that is computed again.")
@click.option("--settled", type=SHARE, help="The same after 100 clean steps.  [default: as --rate]")
@click.option("--protect", "protects", is_flag=True, help="Liars call one another's work right.")
@click.option("--runs", "num_runs", type=click.IntRange(1, 10_000), default=100, show_default=True, help="Simulate so many runs.")
@click.option("--seed", type=SEED, default=0, show_default=True, help="Of everything that is chance.")
@reply_options
def liars(as_json: bool, **fields: Any) -> None:
    """Show how much liars in a stage falsify before audits find them.

    Peers compute some work of their mates again, by the rules of a daemon with swarm.trust "audits". A liar is out once most of its
    stage have convicted it.

    \b
    Examples:
      peerd simulate liars
      peerd simulate liars --lie "part x -1" --peers 9 --liars 3 --runs 1000
      peerd simulate liars --rate 0.02 --settled 0.01 --begins 100 --json
    """
    from peerd.cli import simulate_liars

    simulate_liars.run(simulate_liars.WantedLiars(**fields), as_json)
