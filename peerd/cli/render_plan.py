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
