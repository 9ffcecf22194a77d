"""Draws a comparison: throughput against the optimal over time (as SWARM's figures 5 and 6), one panel per number of stages.

Needs matplotlib, which only the extra `plot` brings; it is loaded when a plot is asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from peerd.errors import DiskError, UsageError
from peerd.sim.comparison import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg")


def check(path: Path) -> None:
    """That a plot can be drawn there, before anything long begins."""
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"--plot {path}: unknown kind of picture", "name a file that ends in .png or .svg")
    if not path.parent.is_dir() or path.is_dir():
        raise UsageError(f"--plot {path}: no file can be written there", "name a file in a folder that exists")
    try:
        import matplotlib as _  # noqa: F401 - asked for early, used below
    except ImportError:
        remedy = f"install it with: {sys.executable} -m pip install matplotlib"
        raise UsageError("--plot needs matplotlib, which is not installed", remedy) from None


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write the picture; its kind follows from the file's name."""
    from matplotlib.figure import Figure

    panels = [list(found) for _, found in groupby(rows, key=lambda row: row.stages)]
    figure = Figure(figsize=(9, 3.2 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for panel, found in zip(axes, panels, strict=True):
        _draw_panel(panel, found)
    axes[-1].set_xlabel("hours")
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise DiskError(f"cannot write {path}: {error.strerror}") from None


def _draw_panel(panel: Axes, rows: Sequence[Row]) -> None:
    hours = [point.hour for point in rows[0].course]
    panel.plot(hours, [point.optimum for point in rows[0].course], color="black", linewidth=1.2, label="optimal")
    for row in rows:
        period = f", T = {row.period_s:g} s" if row.period_s else ""
        panel.plot(hours, [point.throughput for point in row.course], linewidth=0.9, label=f"{row.rule}{period}: {row.overall:.1f} %")
    panel.set_title(f"{rows[0].stages} stages", fontsize=10)
    panel.set_ylabel("samples/s")
    panel.set_ylim(bottom=0)
    panel.legend(fontsize=8, loc="lower left")
