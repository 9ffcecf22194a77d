"""Peers that come and go beside peers that mean to stay: what departures cost, and whether they cost anything else.

Three stages of four peers. Of the twelve a share is unreliable: in each step each of these is killed with a certain chance, at a moment of
its own, and one that chooses its stage itself takes its place. The others have said that they stay (`--stay`). A stand-in sleeps in place
of work. A row has the median time of a step beside that of the same peers while nobody goes: the hybrid parameter server's figure 2, by
real daemons. A row is missed if anything was counted twice or lost, an average is inexact, or a stage had no reliable peer at any look.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from peerd.cli.demo_daemons import DemoSwarm, Placement
from peerd.cli.demo_plan import DemoPlan
from peerd.cli.demo_process import DemoDaemon
from peerd.config.manifest import ComputeConfig, Manifest, ModelConfig, SwarmConfig, TrainConfig
from scripts.benchmarks._disturbed import MUST_BE_0
from scripts.benchmarks._report import SCHEMA, progress
from scripts.benchmarks._swarms import looks, median_step_s

NUM_STAGES, NUM_PEERS = 3, 12
WARMUP, POLL_S = 2, 0.5
STAYS_S = 48 * 3600.0
MAX_CONTACTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    unreliable: float
    """Share of the peers."""
    go: float
    """Chance of each of them to go in a step."""


@dataclass(slots=True, kw_only=True)
class Row:
    unreliable: float
    go: float
    step_s: float = 0.0
    usual_s: float = 0.0
    """While nobody goes."""
    ratio: float = 0.0
    deaths: int = 0
    replayed: int = 0
    missed: list[str] = field(default_factory=list)
    """What does not hold."""


def plan_of(microbatches: int, stand_in_ms: float) -> DemoPlan:
    manifest = Manifest(
        name="bench",
        model=ModelConfig(num_layers=NUM_STAGES, d_model=64, num_heads=2, d_ff=128),
        train=TrainConfig(
            num_stages=NUM_STAGES, microbatches_per_step=microbatches, microbatch_size=1, sequence_length=32, steps=1_000_000
        ),
        compute=ComputeConfig(threads=1),
        swarm=SwarmConfig(announce_period_s=1.0, checkpoint_every_steps=0),
    )
    return DemoPlan(manifest=manifest, num_peers=NUM_PEERS, slow={}, kills=(), chaos=None, stand_in_ms=stand_in_ms, observed=False)


def reliable_peers(share_unreliable: float) -> frozenset[int]:
    """Their numbers. Peers take the stages in turn, so the first of them are in all stages."""
    return frozenset(range(NUM_PEERS - round(share_unreliable * NUM_PEERS)))


class Departures:
    """Kills peers, and replaces them."""

    def __init__(self, swarm: DemoSwarm, reliable: frozenset[int], go: float, usual_s: float, seed: int) -> None:
        self._swarm, self._reliable, self._go, self._usual_s = swarm, reliable, go, usual_s
        self._random = random.Random(seed)
        self._drawn = swarm.num_steps_told
        """Steps for which it has been drawn who goes."""
        self._due: list[tuple[float, DemoDaemon]] = []
        self._replaced: set[int] = set()
        self.deaths = 0

    def tick(self) -> None:
        now_s = time.monotonic()
        while self._drawn < self._swarm.num_steps_told:
            self._drawn += 1
            present = [each for each in self._swarm.living if each.peer not in self._reliable and each.serves]
            going = [each for each in present if self._random.random() < self._go]
            self._due += [(now_s + self._random.uniform(0, self._usual_s), each) for each in going]
        for at_s, daemon in self._due:
            if at_s <= now_s and daemon.alive:
                daemon.kill()
                self.deaths += 1
        self._due = [(at_s, daemon) for at_s, daemon in self._due if at_s > now_s]
        self._replace()

    def _replace(self) -> None:
        contacts = [each.ready.join for each in self._swarm.living if each.peer in self._reliable and each.ready is not None]
        for daemon in [each for each in self._swarm.daemons if not each.alive and each.peer not in self._replaced]:
            self._replaced.add(daemon.peer)
            self._swarm.spawn_another(daemon.stage, " ".join(self._random.sample(contacts, min(MAX_CONTACTS, len(contacts)))))


def bare_stages(swarm: DemoSwarm, reliable: frozenset[int]) -> list[int]:
    """Stages that no reliable peer serves."""
    served = {each.stage for each in swarm.living if each.peer in reliable and each.serves}
    return [stage for stage in range(NUM_STAGES) if stage not in served]


def measure(cell: Cell, plan: DemoPlan, num_steps: int) -> Row:
    row, reliable = Row(unreliable=cell.unreliable, go=cell.go), reliable_peers(cell.unreliable)

    def place(peer: int) -> Placement:
        stay = {"stays_s": STAYS_S} if peer in reliable else {}
        return Placement(settings={**stay, "keeps_stage": False, **({"stage": -1} if peer >= NUM_PEERS else {})})

    with DemoSwarm(plan, lambda _text: None, place=place) as swarm:
        swarm.start()
        departures: Departures | None = None
        first, began = WARMUP + num_steps, 0
        for _ in looks(swarm, POLL_S):
            if departures is None and swarm.num_steps_told > first:
                row.usual_s = usual_step_s(swarm, WARMUP, first)
                departures, began = Departures(swarm, reliable, cell.go, row.usual_s, seed=0), swarm.num_steps_told
            if departures is None:
                continue
            departures.tick()
            if bare := bare_stages(swarm, reliable):
                row.missed.append(f"no reliable peer serves {', '.join(f'stage {stage}' for stage in bare)}")
                break
            if swarm.num_steps_told > began + num_steps:
                break
        assert departures is not None
        row.step_s, row.deaths = usual_step_s(swarm, began, swarm.num_steps_told - 1), departures.deaths
        told = [dict(each.status["counters"]) for each in swarm.daemons if each.status is not None]
        row.replayed = sum(int(each["replayed_microbatches"]) for each in told)  # type: ignore[call-overload]
        for name in MUST_BE_0:
            if count := sum(int(each[name]) for each in told):  # type: ignore[call-overload]
                row.missed.append(f"{count} {name.replace('_', ' ')}")
    row.ratio = row.step_s / row.usual_s
    return row


def usual_step_s(swarm: DemoSwarm, first: int, last: int) -> float:
    """Of the steps from one to another."""
    return median_step_s(step["time_s"] for step in swarm.steps if first <= step["step"] <= last)


def unreliable(arguments: Sequence[str]) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="scripts/bench chaos unreliable", description=__doc__, formatter_class=raw)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--unreliable", type=float, nargs="+", default=[0.2, 0.4, 0.6], metavar="SHARE", help="default 0.2 0.4 0.6")
    parser.add_argument("--go", type=float, nargs="+", default=[0.2, 0.6], metavar="CHANCE", help="in a step (default 0.2 0.6)")
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="steps of each side (default 8)")
    parser.add_argument("--microbatches", type=int, default=48, metavar="B", help="of a step (default 48)")
    parser.add_argument("--compute-stand-in", type=float, default=2000.0, metavar="MS", help="sleep per microbatch (default 2000)")
    given = parser.parse_args(arguments)
    if given.steps < 2 or min(given.microbatches, given.compute_stand_in) < 1:
        parser.error("--steps must be at least 2, the other numbers at least 1")
    if not all(0 <= each < 1 and len(reliable_peers(each)) >= NUM_STAGES for each in given.unreliable):
        parser.error(f"--unreliable must leave a reliable peer for each of {NUM_STAGES} stages")
    rows = list[Row]()
    for cell in [Cell(unreliable=share, go=go) for share in given.unreliable for go in given.go]:
        rows.append(row := measure(cell, plan_of(given.microbatches, given.compute_stand_in), given.steps))
        found = f"{row.ratio:.2f}, {row.deaths} deaths; {'; '.join(row.missed) or 'holds'}"
        progress(f"{row.unreliable:.0%} unreliable, {row.go:.0%} go: {found}")
    if given.json:
        print(json.dumps({"schema": SCHEMA, "rows": [asdict(row) for row in rows]}))
    else:
        print(f"{NUM_PEERS} peers in {NUM_STAGES} stages, {given.compute_stand_in:g} ms of stand-in a microbatch")
        print("unreliable     go  step s  usual s  ratio  deaths  replayed")
        for row in rows:
            times = f"{row.step_s:>6.1f}  {row.usual_s:>7.1f}  {row.ratio:>5.2f}"
            print(f"{row.unreliable:>10.0%}  {row.go:>5.0%}  {times}  {row.deaths:>6}  {row.replayed:>8}")
    for row in rows:
        for reason in row.missed:
            print(f"{row.unreliable:.0%}, {row.go:.0%}: {reason}", file=sys.stderr)
    return int(any(row.missed for row in rows))
