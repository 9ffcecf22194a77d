"""What the last race found, which `scripts/bench race --results` has written into race.toml."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from peerd.planner.contenders import RaceRow

FILE = Path(__file__).with_name("race.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class RacedLine:
    """How long rows take on one line, in the race's run of home size."""

    mbit_per_s: float
    """Each way, of every peer."""
    round_trip_ms: float
    time_s: Mapping[str, float]
    """To the loss, by row; infinite if it does not get there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceResults:
    command: str
    date: str
    size: str
    """Of the trained model and its data, in words."""
    seeds: int
    rows: tuple[RaceRow, ...]
    lines: tuple[RacedLine, ...]


@functools.cache
def race_results() -> RaceResults:
    """The results that this release of peerd has."""
    return parsed(FILE.read_text())


def parsed(text: str) -> RaceResults:
    """What a file of results says. Raises KeyError or TypeError if it is none."""
    document = tomllib.loads(text)
    names = ("updates", "loss", "learning_rate", "outer_learning_rate", "outer_momentum")
    return RaceResults(
        command=document["command"],
        date=str(document["date"]),
        size=document["size"],
        seeds=document["seeds"],
        rows=tuple(RaceRow(row=row, **{name: found[name] for name in names}) for row, found in document["rows"].items()),
        lines=tuple(RacedLine(**line) for line in document["lines"]),
    )
