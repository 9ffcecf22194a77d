"""Draws a comparison: throughput over time (as in SWARM's figures 5 and 6) and in percent of optimal, one row per number of stages.

This needs matplotlib, which only the extra `plot` installs; it is loaded when a plot is requested.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from peerd.errors import UsageError, disk_error
from peerd.policy.swarm.rebalance import Rule
from peerd.sim.comparison import ComparisonRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg")


def check(path: Path) -> None:
    """UsageError if no plot can be drawn to `path`; called before the long simulation begins."""
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"--plot {path}: unknown kind of picture", "name a file that ends in .png or .svg")
    if not path.parent.is_dir() or path.is_dir():
        raise UsageError(f"--plot {path}: no file can be written there", "name a file in a folder that exists")
    try:
        import matplotlib as _  # noqa: F401 - only tests that it is installed
    except ImportError:
        remedy = f"install it with: {sys.executable} -m pip install matplotlib"
        raise UsageError("--plot needs matplotlib, which is not installed", remedy) from None


def draw(rows: Sequence[ComparisonRow], path: Path) -> None:
    """Write the picture; the file's suffix chooses the format."""
    from matplotlib.figure import Figure

    panels = [list(found) for _, found in groupby(rows, key=lambda row: row.stages)]
    figure = Figure(figsize=(13, 3.6 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), 2, squeeze=False)
    for (left, right), found in zip(axes, panels, strict=True):
        _draw_throughput(left, found)
        _draw_percent(right, found)
    for panel in axes[-1]:
        panel.set_xlabel("hours")
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise disk_error(path, error) from None


def _draw_throughput(panel: Axes, rows: Sequence[ComparisonRow]) -> None:
    hours = [point.hour for point in rows[0].course]
    panel.plot(hours, [point.optimum for point in rows[0].course], color="black", linewidth=2, label="optimal")
    for row in rows:
        panel.plot(hours, [point.throughput for point in row.course], linewidth=0.9, label=_name(row))
    panel.set_title(f"{rows[0].stages} stages", fontsize=10)
    panel.set_ylabel("samples/s")
    panel.set_ylim(bottom=0)
    panel.legend(fontsize=8, loc="lower left")


def _draw_percent(panel: Axes, rows: Sequence[ComparisonRow]) -> None:
    """Shows differences that the throughput curves hide. The rule that never moves is left out of the scale."""
    lowest = 100.0
    for row in rows:
        percents = [100 * point.throughput / point.optimum if point.optimum else 100.0 for point in row.course]
        panel.plot([point.hour for point in row.course], percents, linewidth=0.9, label=f"{_name(row)}: {row.overall:.1f} %")
        if row.rule != Rule.NONE:
            lowest = min(lowest, *percents)
    panel.axhline(100, color="black", linewidth=1.2)
    panel.set_title(f"{rows[0].download_s:g} s to download a stage", fontsize=10)
    panel.set_ylabel("percent of optimal")
    panel.set_ylim(lowest - (101 - lowest) / 3, 100.5)
    panel.legend(fontsize=8, loc="lower left", ncols=2)


def _name(row: ComparisonRow) -> str:
    return f"{row.rule}, T = {row.period_s:g} s" if row.period_s else row.rule
