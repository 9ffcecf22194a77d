"""The output of all benchmarks: a table of medians and ratios, or with --json the same rows as one object."""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from peerd.errors import ExitCode, PeerdError

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One side of a comparison. A ratio above 1 means faster than the baseline."""

    name: str
    median: float
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    """The 95 % confidence interval of the ratio's true median; None if there were too few pairs."""
    baseline: str | None = None
    loss: float | None = None


def paired_ratio(baseline: Sequence[float], ours: Sequence[float]) -> float:
    """Median over rounds of the baseline's time divided by ours. Sides of one round saw the same load of the machine."""
    return statistics.median(theirs / mine for theirs, mine in zip(baseline, ours, strict=True))


def paired_interval(baseline: Sequence[float], ours: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """The confidence interval of the ratios' median, by order statistics (Thompson 1936), for any noise. None below 6 pairs."""
    ratios = sorted(theirs / mine for theirs, mine in zip(baseline, ours, strict=True))
    outside, chance = 0, 0.0
    while (chance := chance + 2 * math.comb(len(ratios), outside) / 2 ** len(ratios)) <= 1 - confidence:
        outside += 1
    return (ratios[outside - 1], ratios[-outside]) if outside else None


def interrupt(_number: int, _frame: FrameType | None) -> None:
    """A handler for SIGTERM and SIGHUP, which ends a benchmark as Ctrl-C does, with everything cleaned up."""
    raise KeyboardInterrupt


def run(main: Callable[[], int]) -> int:
    """Run a benchmark and return its exit code. SIGTERM and SIGHUP end it like Ctrl-C; a PeerdError is printed as one line."""
    for kind in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(kind, interrupt)
    try:
        return main()
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except PeerdError as error:
        print(f"{Path(sys.argv[0]).stem}: error: {error}", file=sys.stderr)
        return error.exit_code


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def print_json(rows: Sequence[Row], **more: Any) -> None:
    print(json.dumps({"schema": SCHEMA, "rows": [dataclasses.asdict(row) for row in rows], **more}))


def print_table(title: str, unit: str, rows: Sequence[Row]) -> None:
    width = max(len(row.name) for row in rows)
    print(title)
    between = any(row.interval for row in rows)
    head = f"{'95 % of it':>14}  " if between else ""
    print(f"{'':<{width}}  {unit:>10}  {'ratio':>6}  {head}{'loss':>10}  against")
    for row in rows:
        ratio = f"{row.ratio:.3f}" if row.ratio is not None else ""
        loss = f"{row.loss:.6f}" if row.loss is not None else ""
        span = (f"{row.interval[0]:.3f} - {row.interval[1]:.3f}" if row.interval else "").rjust(14) + "  " if between else ""
        print(f"{row.name:<{width}}  {row.median:>10.3f}  {ratio:>6}  {span}{loss:>10}  {row.baseline or ''}".rstrip())
