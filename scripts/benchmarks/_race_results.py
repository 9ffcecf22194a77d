"""The file of `scripts/bench race --results`, from which `peerd new --link` chooses (peerd/planner/race_results.py reads it)."""

from __future__ import annotations

import datetime
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from peerd.planner.contenders import BASE, CONTENDERS
from scripts.benchmarks._race import Link
from scripts.benchmarks._race_lines import Line
from scripts.benchmarks._race_training import Size

HEAD = """\
# Written by `scripts/bench race --results`; not to be edited.
# `updates` and learning rates are by those of the first row, `loss` is less its loss. Times are in seconds, at home size.
"""


def write(path: Path, size: Size, tables: Mapping[Link, Sequence[Line]]) -> None:
    """Write what rows need and how long they take on each line. Rows that were trained with fewer seeds than the base are left out."""
    base = next(line for line in next(iter(tables.values())) if line.row == BASE)
    trained = {link: [line for line in lines if line.seeds == base.seeds] for link, lines in tables.items()}
    first = next(iter(trained.values()))
    document = {
        "command": shlex.join(["scripts/bench", "race", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).date(),
        "size": size.name,
        "seeds": base.seeds,
        "rows": {line.row: _row(line, base) for line in first if CONTENDERS[line.row].codec != "auto"},
        "lines": [
            {
                "mbit_per_s": link.mbit_per_s,
                "round_trip_ms": link.round_trip_ms,
                "time_s": {line.row: _rounded(line.time_s) for line in lines},
            }
            for link, lines in trained.items()
        ],
    }
    path.write_text(HEAD + tomli_w.dumps(document))


def _row(line: Line, base: Line) -> dict[str, Any]:
    assert line.tuning is not None
    assert base.tuning is not None
    assert base.updates is not None
    assert base.loss is not None
    assert line.loss is not None
    return {
        "updates": _rounded(None if line.updates is None else line.updates / base.updates),
        "updates_by_seed": [_rounded(updates) for updates in line.updates_by_seed],
        "loss": _rounded(line.loss - base.loss),
        "learning_rate": _rounded(line.tuning.rate / base.tuning.rate),
        "outer_learning_rate": line.tuning.outer_rate,
        "outer_momentum": line.tuning.outer_momentum,
    }


def _rounded(value: float | None) -> float:
    """To five digits; infinite for None."""
    return math.inf if value is None else float(f"{value:.5g}")
