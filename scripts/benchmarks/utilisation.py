"""Utilisation of peers by round trip: SWARM's table 1, for peerd, on links of 50 Mbit/s between network namespaces (needs root).

Utilisation is the share of time in which a stage computes. Small models compute little for the bytes that they send, large ones much. A
fixed number of slots keeps in flight what fills short links; by default the window grows with the round trip (`launching.py`).
A stand-in sleeps in place of work, so that the time of a pass is known. Times on the wire and all waiting are real.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from peerd.config.manifest import ComputeConfig, Manifest, ModelConfig, SwarmConfig, TrainConfig, WireConfig
from peerd.errors import TimedOutError
from peerd.sim import plot
from scripts.benchmarks._namespaces import Network, require_root
from scripts.benchmarks._report import SCHEMA, progress, run
from scripts.benchmarks._switch import Links
from scripts.benchmarks._turns import Peers, place_in

MBIT_PER_S = 50.0
ROUND_TRIPS_MS = (0.0, 10.0, 50.0, 100.0, 200.0)
NUM_STAGES = 2
SETTLING = 2
"""Steps after a change of the links that do not count."""
POLL_S = 0.2
SILENCE_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """The model of one row of the table."""

    name: str
    stand_in_ms: float
    sequences: int
    """Microbatches of 32 tokens of width 32: 4 KiB of activations each."""
    codec: str = "none"
    slots: int = 0

    def manifest(self, microbatches: int) -> Manifest:
        return Manifest(
            name="bench",
            model=ModelConfig(num_layers=NUM_STAGES, d_model=32, num_heads=1, d_ff=32),
            train=TrainConfig(
                num_stages=NUM_STAGES, microbatches_per_step=microbatches, microbatch_size=self.sequences, sequence_length=32
            ),
            compute=ComputeConfig(threads=1, recompute="never", slots=self.slots),
            wire=WireConfig(activations=self.codec, activation_gradients=self.codec),
            swarm=SwarmConfig(announce_period_s=5.0, checkpoint_every_steps=0, rebalance_period_s=0.0),
        )


KINDS = (
    Kind(name="small", stand_in_ms=20, sequences=24),
    Kind(name="small, 8-bit", stand_in_ms=20, sequences=24, codec="int8"),
    Kind(name="small, fixed slots", stand_in_ms=20, sequences=24, slots=2 * NUM_STAGES + 2),
    Kind(name="large", stand_in_ms=200, sequences=128),
    Kind(name="large, 8-bit", stand_in_ms=200, sequences=128, codec="int8"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    steps: int
    microbatches: int
    picture: Path | None
    as_json: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    name: str
    round_trip_ms: float
    step_s: float
    utilisation: float


def measure(plan: Plan, kind: Kind) -> list[Line]:
    manifest, lines = kind.manifest(plan.microbatches), []
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(Network(NUM_STAGES, links_of(ROUND_TRIPS_MS[0])))
        team = stack.enter_context(Peers(manifest, observed=False, stand_in_ms=kind.stand_in_ms, place=place_in(network)))
        team.start()
        for round_trip_ms in ROUND_TRIPS_MS:
            network.change(links_of(round_trip_ms))
            ends = next_steps(team, SETTLING + plan.steps)[SETTLING - 1 :]
            step_s = statistics.median(after - before for before, after in itertools.pairwise(ends))
            busy = plan.microbatches * kind.stand_in_ms / 1000 / step_s
            lines.append(Line(name=kind.name, round_trip_ms=round_trip_ms, step_s=step_s, utilisation=busy))
            progress(f"{kind.name}, {round_trip_ms:g} ms: {busy:.1%}")
    return lines


def links_of(round_trip_ms: float) -> Links:
    return Links(mbit_per_s=MBIT_PER_S, round_trip_ms=round_trip_ms)


def next_steps(team: Peers, count: int) -> list[float]:
    """Wall-clock ends of the next `count` steps, beginning with the one under way."""
    done, began = len(team.steps()), time.monotonic()
    while len(steps := team.steps()) < done + count:
        if time.monotonic() - began > SILENCE_S:
            raise TimedOutError(f"not {count} steps within {SILENCE_S:.0f} s")
        time.sleep(POLL_S)
    return [step.time_s for step in steps[done : done + count]]


def report(plan: Plan, lines: Sequence[Line]) -> None:
    if plan.as_json:
        note = "a stand-in sleeps in place of work"
        rows = [dataclasses.asdict(line) for line in lines]
        print(json.dumps({"schema": SCHEMA, "rows": rows, "mbit_per_s": MBIT_PER_S, "note": note}))
        return
    print(f"utilisation, {NUM_STAGES} stages, {MBIT_PER_S:g} Mbit/s, {plan.microbatches} microbatches a step; a stand-in for work")
    print(f"{'round trip':<20}" + "".join(f"{round_trip_ms:>9g} ms" for round_trip_ms in ROUND_TRIPS_MS))
    for kind in KINDS:
        found = [line.utilisation for line in lines if line.name == kind.name]
        print(f"{kind.name:<20}" + "".join(f"{share:>12.1%}" for share in found))


def draw(lines: Sequence[Line], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    panel = figure.subplots()
    for kind in KINDS:
        found = [line for line in lines if line.name == kind.name]
        panel.plot([line.round_trip_ms for line in found], [100 * line.utilisation for line in found], marker="o", label=kind.name)
    panel.set_xlabel("round trip, ms")
    panel.set_ylabel("percent of the time that a stage computes")
    panel.set_ylim(0, 101)
    panel.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def parse() -> Plan:
    parser = argparse.ArgumentParser(prog="scripts/bench utilisation", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="steps that count at each round trip (default 3)")
    parser.add_argument("--microbatches", type=int, default=64, metavar="N", help="microbatches of a step (default 64)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the table into a .png or .svg")
    given = parser.parse_args()
    if min(given.steps, given.microbatches) < 1:
        parser.error("--steps and --microbatches must be at least 1")
    return Plan(steps=given.steps, microbatches=given.microbatches, picture=given.plot, as_json=given.json)


def main() -> int:
    plan = parse()
    if plan.picture is not None:
        plot.check(plan.picture)
    require_root()
    lines = [line for each in KINDS for line in measure(plan, each)]
    report(plan, lines)
    if plan.picture is not None:
        draw(lines, plan.picture)
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
