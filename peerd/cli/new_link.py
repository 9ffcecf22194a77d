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
    from peerd.planner.contenders import Ranked
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
    ranked: tuple[Ranked, ...]
    pace: HomePace

    @property
    def manifest(self) -> Manifest:
        return self.ranked[0].manifest


def chosen_for(manifest: Manifest, peers: HomePeers, optimizer: str | None) -> ChosenWay:
    """The way to train that is first at a loss. `optimizer`: the one that flags name. UsageError if nothing measured goes with the run."""
    from peerd.planner.contenders import UPDATES, ranked
    from peerd.planner.kinds import planned_loads

    plain = loads_of(manifest)

    def pace(run: Manifest) -> HomePace:
        return _pace(run, planned_loads(run) or plain, peers)

    def update_s(run: Manifest) -> float:
        return pace(run).step_s * manifest.train.microbatches_per_step / run.train.microbatches_per_step

    found = ranked(manifest, update_s, UPDATES, optimizer)
    if not found:
        raise UsageError("no way to train that was measured goes with this run", "leave out --link, and set [wire] yourself")
    return ChosenWay(peers, tuple(found), pace(found[0].manifest))


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
            {"name": each.row, "update_s": each.update_s, "relative_updates": each.updates, "relative_time_s": each.time}
            for each in choice.ranked
        ],
    }


def choice_lines(choice: ChosenWay) -> list[str]:
    """What was chosen for the line, why, and what it will come to."""
    peers, pace, best = choice.peers, choice.pace, choice.ranked[0]
    rows = [("", "s an update", "updates", "time")]
    rows += [(each.row, f"{each.update_s:.2f}", f"{each.updates:.2f}", f"{each.time / best.time:.2f}") for each in choice.ranked[:SHOWN]]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]) for row in rows
    ]
    line = f"{8e-6 * peers.bytes_per_s:g} Mbit/s each way, round trips of {1000 * peers.round_trip_s:g} ms"
    pays = f"computes {pace.compute_share:.0%} of the time and sends up to {pace.sent_bytes_per_s * DAY_S / 1e9:,.1f} GB a day"
    return [
        f"link: {line}; {peers.num_replicas} devices of {peers.flops / 1e12:g} TFLOP/s for each stage",
        f"chosen: {best.contender.name}",
        "why: of those that were measured it is the first at a loss:",
        *(f"  {row}" for row in table),
        f"cost: {best.updates:.2f} times the updates of float32 without codecs to the same loss, as measured with small models",
        f"expected: {pace.tokens_per_s:,.0f} tokens/s; a peer {pays}",
    ]
