"""Shows plans as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from peerd.planner.dtfm import StudySizes

MOST_NAMES = 8
"""Names of a stage's devices that a table shows."""


def print_study(rows: Sequence[dict[str, Any]], sizes: StudySizes) -> None:
    """The costs of each method, and the stages of the cheapest."""
    click.echo(f"{sizes.num_stages} stages of {sizes.num_replicas}; seconds of communication an iteration, by DT-FM's model")
    click.echo(f"{'method':<10}{'cost, s':>10}{'averaging':>11}{'pipeline':>10}")
    for row in rows:
        click.echo(f"{row['method']:<10}{row['comm_cost_s']:>10.3f}{row['averaging_s']:>11.3f}{row['pipeline_s']:>10.3f}")
    best = min(rows, key=lambda row: row["comm_cost_s"])
    click.echo(f"\nstages by {best['method']}")
    for stage, names in enumerate(best["stages"]):
        click.echo(f"{stage:>5}  {shortened(names)}")


def shortened(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def print_run(rows: Sequence[dict[str, Any]], best: str) -> None:
    """Each method's speed, and the stages and the traffic of the fastest."""
    click.echo(f"{'method':<10}{'tokens/s':>11}{'step, s':>10}{'averaging':>11}{'stages':>8}{'left out':>10}")
    for row in rows:
        if not row["stages"]:
            click.echo(f"{row['method']:<10}{'  no placement that fits'}")
            continue
        figures = f"{row['tokens_per_s']:>11,.1f}{row['step_s']:>10,.2f}{row['averaging_s']:>11,.2f}"
        click.echo(f"{row['method']:<10}{figures}{len(row['stages']):>8}{len(row['left_out']):>10}")
    chosen = next(row for row in rows if row["method"] == best)
    click.echo(f"\nstages by {best}\nstage    layers   samples/s  bound by")
    for number, stage in enumerate(chosen["stages"]):
        layers = f"{stage['layers'][0]}-{stage['layers'][1] - 1}"
        click.echo(f"{number:>5}{layers:>10}{stage['samples_per_s']:>12,.2f}  {stage['bound_by']}: {shortened(stage['peers'])}")
    sent = sorted(chosen["sent_gb_a_day"].items(), key=lambda each: -each[1])
    click.echo("\nsent a day: " + ", ".join(f"{name} {amount:,.1f} GB" for name, amount in sent[:MOST_NAMES]))
    if chosen["left_out"]:
        click.echo(f"left out:   {shortened(chosen['left_out'])}")


def print_sweep(rows: Sequence[dict[str, Any]]) -> None:
    """The square-cube law: the wider the model, the smaller the share of links. The bar is the utilisation."""
    click.echo(" d_model    tokens/s  utilisation")
    for row in rows:
        bar = "#" * round(20 * min(1.0, row["utilisation"]))
        click.echo(f"{row['d_model']:>8}{row['tokens_per_s']:>12,.1f}{100 * row['utilisation']:>11.1f} %  {bar:<20}  {row['bound_by'][0]}")
