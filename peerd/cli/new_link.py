"""`peerd new --link`: what a run should do at its boundaries and in its averages, for the line that its volunteers have."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from peerd.cli.new_estimate import loads_of
from peerd.errors import UsageError

if TYPE_CHECKING:
    from peerd.config.manifest import Manifest
    from peerd.planner.contenders import KeptChoices, Ranked
    from peerd.planner.race_results import RaceResults
    from peerd.planner.workload import ModelLoads
    from peerd.sim.home_lines import HomePace, HomePeers

SHOWN = 4
"""Contenders that are printed, the chosen one first."""
CHOSEN_FLAGS = {"boundary": "--boundary", "boundary_rank": "--boundary-rank"}
"""Flags whose value --link chooses."""
DAY_S = 86400.0
_TIME = re.compile(r"(\d{1,6}(?:\.\d{1,3})?) ?(ms|s)", re.ASCII)


class Rate(click.ParamType[float]):
    """Bytes per second, written as `20Mbit`."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from peerd.config.limits import parse_rate

        try:
            rate = parse_rate(str(value))
        except ValueError as error:
            self.fail(f"{error}.", param, ctx)
        return rate if rate > 0 else self.fail(f"{value!r} is not a rate such as 20Mbit.", param, ctx)


class RoundTrip(click.ParamType[float]):
    """Seconds, written as `60ms`."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = _TIME.fullmatch(str(value))
        seconds = float(found[1]) / (1000 if found[2] == "ms" else 1) if found else -1.0
        if not 0 <= seconds <= 10:
            self.fail(f"{value!r} is not a time of at most 10s, such as 60ms.", param, ctx)
        return seconds


@dataclass(frozen=True, slots=True)
class ChosenWay:
    """The contenders that go with a run on a line, the chosen one first, and what the swarm does with that."""

    peers: HomePeers
    kept: KeptChoices
    results: RaceResults
    ranked: tuple[Ranked, ...]
    pace: HomePace

    @property
    def manifest(self) -> Manifest:
        return self.ranked[0].manifest


def chosen_for(manifest: Manifest, peers: HomePeers, kept: KeptChoices, results: RaceResults) -> ChosenWay:
    """The way to train that is first at a loss. `kept`: what flags name. UsageError if nothing measured goes with the run."""
    from peerd.planner.contenders import ranked
    from peerd.planner.kinds import planned_loads

    plain = loads_of(manifest)

    def pace(run: Manifest) -> HomePace:
        return _pace(run, planned_loads(run) or plain, peers)

    found = ranked(manifest, lambda run: pace(run).step_s, results.rows, kept)
    if not found:
        raise UsageError("no way to train that was measured goes with this run", "leave out --link, and set [wire] yourself")
    return ChosenWay(peers, kept, results, tuple(found), pace(found[0].manifest))


def _pace(manifest: Manifest, loads: ModelLoads, peers: HomePeers) -> HomePace:
    from peerd.planner.cutting import stage_layers
    from peerd.planner.run_costs import run_cost
    from peerd.sim.home_lines import pace_of

    return pace_of(run_cost(manifest, loads, stage_layers(manifest, loads)), peers)


def choice_fields(choice: ChosenWay) -> dict[str, Any]:
    """The choice for --json: seconds, bytes per second, and shares."""
    return {
        "chosen": choice.ranked[0].row,
        "tokens_per_second": choice.pace.tokens_per_s,
        "compute_share": choice.pace.compute_share,
        "sent_bytes_per_day": choice.pace.sent_bytes_per_s * DAY_S,
        "contenders": [
            {"name": each.row, "update_s": each.update_s, "relative_updates": each.measured.updates, "relative_time_s": each.time}
            for each in choice.ranked
        ],
    }


def choice_lines(choice: ChosenWay) -> list[str]:
    """What was chosen for the line, why, and what it will come to."""
    peers, pace, best = choice.peers, choice.pace, choice.ranked[0]
    rows = [("", "s an update", "updates", "time")]
    rows += [
        (each.row, f"{each.update_s:.2f}", f"{each.measured.updates:.2f}", f"{each.time / best.time:.2f}") for each in choice.ranked[:SHOWN]
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]) for row in rows
    ]
    line = f"{8e-6 * peers.bytes_per_s:g} Mbit/s each way, round trips of {1000 * peers.round_trip_s:g} ms"
    pays = f"computes {pace.compute_share:.0%} of the time and sends up to {pace.sent_bytes_per_s * DAY_S / 1e9:,.1f} GB a day"
    results = choice.results
    return [
        f"link: {line}; {peers.num_replicas} devices of {peers.flops / 1e12:g} TFLOP/s for each stage",
        f"chosen: {best.contender.name}",
        "why: of those that were measured it is the first at a loss:",
        *(f"  {row}" for row in table),
        *_train_lines(best, choice.kept),
        f"cost: {best.measured.updates:.2f} times float32's updates to a loss; after equal data {best.measured.loss:+.3f} nats by its loss",
        f"measured: {results.date}, {results.seeds} seeds, {results.size}",
        f"expected: {pace.tokens_per_s:,.0f} tokens/s; a peer {pays}",
    ]


def _train_lines(best: Ranked, kept: KeptChoices) -> list[str]:
    """What was chosen in [train], and why where no flag names it."""
    train, each = best.manifest.train, best.contender.updates_per_step
    updates = f", {train.microbatches_per_step // each} for each of {each} updates" if each > 1 else ""
    factor = f", {best.measured.learning_rate:.2g} times float32's as the race's best rates are" if not kept.learning_rate else ""
    outer = f"averages: rate {train.outer_learning_rate:g}, momentum {train.outer_momentum:g}, the race's best for this"
    return [
        f"microbatches: {train.microbatches_per_step} a step{updates}",
        f"learning rate: {train.learning_rate:g}{factor}; warmed up in {train.warmup_steps} steps",
        *([outer] if train.local_batch else []),
    ]
