"""What `scripts/bench race` has to train, and the table that it makes of what was trained."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from peerd.planner.contenders import BASE, CONTENDERS, Contender
from scripts.benchmarks._race import HomeSize, Link, update_s
from scripts.benchmarks._race_training import Cell, Losses, Size, Tuning

Known = dict[Cell, Losses]


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """What is trained and shown."""

    size: Size
    rows: tuple[str, ...]
    links: tuple[Link, ...]
    seeds: int
    rates: tuple[float, ...]
    muon_rates: tuple[float, ...]
    outer: tuple[tuple[float, float], ...]
    """Rates and momenta of the averages of local steps."""
    target: float
    home: HomeSize = field(default_factory=HomeSize)

    def tunings(self, row: Contender) -> list[Tuning]:
        """What seed 0 tries."""
        rates = self.muon_rates if row.optimizer == "muon" else self.rates
        return [Tuning(rate, *outer) for rate in rates for outer in (self.outer if row.is_local else [(0.0, 0.0)])]

    def trained_rows(self) -> list[Contender]:
        """Rows that are one training on all links are one."""
        return list(dict.fromkeys(self.home.on(CONTENDERS[name], link) for name in self.rows for link in self.links))

    def best(self, row: Contender, known: Known) -> Tuning | None:
        """Of those that seed 0 has tried, the one that ends with the lowest loss. None: nothing was tried."""
        tried = [tuning for tuning in self.tunings(row) if Cell(row, 0, tuning) in known]
        return min(tried, key=lambda tuning: known[Cell(row, 0, tuning)][-1][1], default=None)

    def next_cell(self, known: Known) -> Cell | None:
        """What is trained next: all rows once before any twice, and all tunings of seed 0 before other seeds. None: all is there."""
        rows = self.trained_rows()
        wanted = [
            Cell(row, 0, self.tunings(row)[turn])
            for turn in range(max(len(self.tunings(row)) for row in rows))
            for row in rows
            if turn < len(self.tunings(row))
        ]
        if all(cell in known for cell in wanted):
            best = {row: tuning for row in rows if (tuning := self.best(row, known)) is not None}
            wanted = [Cell(row, seed, tuning) for seed in range(1, self.seeds) for row, tuning in best.items()]
        return next((cell for cell in wanted if cell not in known), None)

    def runs(self, row: Contender, known: Known) -> dict[int, Losses]:
        """The losses of a row with its best tuning, by seed."""
        tuning = self.best(row, known)
        cells = {seed: Cell(row, seed, tuning) for seed in range(self.seeds)} if tuning is not None else {}
        return {seed: known[cell] for seed, cell in cells.items() if cell in known}


def reaches_at(losses: Sequence[tuple[float, float]], target: float) -> float:
    """Updates until the loss is at the target; infinite if it never is. `losses`: those of evaluations, with the updates before each."""
    if losses[0][1] <= target:
        return losses[0][0]
    for (before, higher), (after, lower) in pairwise(losses):
        if lower <= target:
            return before + (after - before) * (higher - target) / (higher - lower)
    return math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One row on one link. Times in seconds; None: it never gets there, or was not trained."""

    link: str
    row: str
    codec: str
    tuning: Tuning | None
    seeds: int
    update_s: float
    loss: float | None
    """At the end, mean of the seeds."""
    spread: float | None
    """Of the seeds' losses at the end."""
    updates: float | None
    """Until the target, mean of the seeds."""
    updates_by_seed: tuple[float | None, ...]
    time_s: float | None
    sooner_than_int8: float | None
    sooner_by_seed: tuple[float, ...] = ()
    """Of the seeds in which both get there."""


def lines_on(race: Race, link: Link, known: Known) -> list[Line]:
    dense = race.runs(race.home.on(CONTENDERS[BASE], link), known)
    targets = {seed: min(loss for updates, loss in losses if updates <= race.target * losses[-1][0]) for seed, losses in dense.items()}
    lines = []
    for name in race.rows:
        row = race.home.on(CONTENDERS[name], link)
        tuning = race.best(row, known)
        runs = {seed: losses for seed, losses in race.runs(row, known).items() if seed in targets}
        ends = [losses[-1][1] for losses in runs.values()]
        reached = [reaches_at(losses, targets[seed]) for seed, losses in runs.items()]
        updates = statistics.fmean(reached) if reached and all(map(math.isfinite, reached)) else None
        each_s = update_s(race.home, CONTENDERS[name], link)
        lines.append(
            Line(
                link=link.name,
                row=name,
                codec=row.codec,
                tuning=tuning,
                seeds=len(runs),
                update_s=each_s,
                loss=statistics.fmean(ends) if ends else None,
                spread=max(ends) - min(ends) if ends else None,
                updates=updates,
                updates_by_seed=tuple(each if math.isfinite(each) else None for each in reached),
                time_s=None if updates is None else updates * each_s,
                sooner_than_int8=None,
            )
        )
    base = next((line for line in lines if line.row == "int8"), None)
    return [_compared(line, base) if base is not None else line for line in lines]


def _compared(line: Line, base: Line) -> Line:
    """With how much sooner than another row it is there."""
    pairs = zip(line.updates_by_seed, base.updates_by_seed, strict=False)
    by_seed = [theirs * base.update_s / (mine * line.update_s) for mine, theirs in pairs if mine and theirs]
    sooner = base.time_s / line.time_s if base.time_s is not None and line.time_s else None
    return dataclasses.replace(line, sooner_than_int8=sooner, sooner_by_seed=tuple(by_seed))


def show(lines: Sequence[Line]) -> None:
    def told(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    print(f"\n{lines[0].link}")
    print(
        f"{'row':<25} {'codec':<9} {'rate':<14} {'seeds':>5} {'s an update':>11} {'loss':>7} {'spread':>7} {'updates':>8} {'time, h':>8}"
        f" {'to int8':>8} {'by seed':>13}"
    )
    for line in lines:
        hours = None if line.time_s is None else line.time_s / 3600
        tuning = line.tuning.name if line.tuning is not None else ""
        by_seed = ", ".join(f"{each:.2f}" for each in line.sooner_by_seed)
        print(
            f"{line.row:<25} {line.codec:<9} {tuning:<14} {line.seeds:>5} {line.update_s:>11.2f} {told(line.loss, '.4f'):>7}"
            f" {told(line.spread, '.4f'):>7} {told(line.updates, '.0f'):>8} {told(hours, '.2f'):>8} {told(line.sooner_than_int8, '.2f'):>8}"
            f" {by_seed:>13}"
        )
