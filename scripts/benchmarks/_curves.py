"""Draws the losses of a swarm over those of one machine, one panel per option. Needs matplotlib, like the plots of `peerd simulate`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from scripts.benchmarks._equality import Outcome

COLUMNS = 3


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    """Write the picture; the file's suffix chooses the format."""
    num_rows = -(-len(outcomes) // COLUMNS)
    figure = Figure(figsize=(4.2 * COLUMNS, 3.0 * num_rows), layout="constrained")
    panels = figure.subplots(num_rows, COLUMNS, squeeze=False, sharex=True).flat
    for found, panel in zip(outcomes, panels, strict=False):
        steps = range(1, found.steps + 1)
        panel.plot(steps, found.reference, color="tab:orange", linewidth=4, alpha=0.45, label="one machine")
        panel.plot(steps, found.swarm, color="tab:blue", linewidth=1.2, linestyle="--", label="the swarm")
        model = " (built-in decoder)" if found.why_decoder else ""
        apart = f"at most {found.losses_apart:.0e} apart" if found.losses_apart else "equal to the last bit"
        panel.set_title(f"{found.option}{model}: {apart}", fontsize=9)
        panel.set_ylabel("loss, nats per token")
        panel.legend(fontsize=8)
    for panel in panels:  # the remaining panels stay empty
        panel.set_axis_off()
    figure.supxlabel("step")
    figure.savefig(path, dpi=120)
