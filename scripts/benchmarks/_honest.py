"""Honest peers that audit each other: is nobody accused, and is the run that of one machine?

Six daemons serve two stages of three. One peer of each stage is so slow that it does about one microbatch of a step. With every second
seed the peers compute with one, two and three threads, which round in another way; with the others all have one thread, and the run must
equal one process to the bit of each loss. A row has

threads     of the peers of a stage
seconds     that the seed took, with the start of its daemons and the reference
step_s      seconds of a step
slow        microbatches of a step that a slow peer did
audits      microbatches and parts that peers computed again
deviation   the largest one of an audit that found the work right, as |a - b| / |b|; a peer accuses above 4e-4
honest_bans lines of logs that shut a peer out
accusations what audits and logs say against a peer
distance    the largest difference of a parameter to the reference

It ends with 1, and says why, where anything is said against a peer, anything was counted twice, lost or given up, a loss differs from the
reference (with unlike threads: by more than 0.001), or, with equal threads, a parameter by more than 1e-6.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from peerd.cli.demo_daemons import DemoSwarm, Placement
from peerd.cli.demo_plan import DemoPlan
from peerd.config.manifest import ComputeConfig, Manifest
from peerd.errors import PeerdError, TimedOutError
from scripts.benchmarks._accusations import ACCUSED, BANNED, audited_by, noted_of
from scripts.benchmarks._disturbed import MUST_BE_0, NUM_STAGES, PARAMETERS_APART, TINY, far_from_reference, largest_difference, run_of
from scripts.benchmarks._report import SCHEMA, progress
from scripts.benchmarks._swarms import looks

MATES, MICROBATCHES = 3, 12
STAND_IN_MS, SLOW = 25.0, 11.0
"""A slow peer needs for one microbatch what each of its two mates needs for eleven, so its share of twelve is 0.5."""
THREADS = (1, 2, 3)
POLL_S, READY_S, ANSWER_S = 0.5, 240.0, 60.0
LOSSES_APART = 1e-3
"""Where threads are unlike: gradients differ in their last bits, and AdamW makes steps of these."""
COLUMNS = ("seed", "threads", "seconds", "steps", "step_s", "slow", "audits", "deviation", "honest_bans", "accusations", "distance")


@dataclass(slots=True, kw_only=True)
class Row:
    seed: int
    threads: str
    seconds: float = 0.0
    steps: int = 0
    step_s: float | None = None
    slow: float | None = None
    audits: int = 0
    deviation: float = 0.0
    honest_bans: int = 0
    accusations: int = 0
    distance: float | None = None
    missed: list[str] = field(default_factory=list)
    """The limits that do not hold."""


def manifest_of(seed: int, threads: int) -> Manifest:
    """`threads`: of each peer; 0: as its environment says."""
    manifest = run_of(TINY, microbatches_per_step=MICROBATCHES)
    swarm = replace(manifest.swarm, trust="audits", group_size=0)
    return replace(manifest, seed=seed, swarm=swarm, compute=ComputeConfig(threads=threads))


def try_seed(seed: int, steps: int) -> Row:
    """Let all peers serve, then watch so many steps, and compare the run with the same one in one process."""
    are_unlike = seed % 2 == 1
    row, num_peers = Row(seed=seed, threads=",".join(map(str, THREADS if are_unlike else (1,)))), MATES * NUM_STAGES
    slow = dict.fromkeys(range(num_peers - NUM_STAGES, num_peers), SLOW)
    manifest = manifest_of(seed, 0 if are_unlike else 1)
    plan = DemoPlan(manifest=manifest, num_peers=num_peers, slow=slow, kills=(), chaos=None, stand_in_ms=STAND_IN_MS, observed=False)

    def place(peer: int) -> Placement:
        threads = THREADS[peer // NUM_STAGES % len(THREADS)] if are_unlike else 1
        return Placement(command=("env", f"OMP_NUM_THREADS={threads}", "OMP_WAIT_POLICY=PASSIVE"))

    with DemoSwarm(plan, lambda _text: None, place=place) as swarm:
        swarm.start()
        try:
            _until_all_serve(swarm)
            _watch(row, swarm, steps)
            _judge(row, swarm)
            _compare(row, swarm, LOSSES_APART if are_unlike else 0.0)
        except PeerdError as error:
            row.missed.append(error.message)
    return row


def _until_all_serve(swarm: DemoSwarm) -> None:
    began_s = time.monotonic()
    for _ in looks(swarm, POLL_S):
        if all(daemon.serves for daemon in swarm.daemons):
            return
        if time.monotonic() - began_s > READY_S:
            raise TimedOutError(f"not all daemons serve within {READY_S:.0f} s")


def _watch(row: Row, swarm: DemoSwarm, steps: int) -> None:
    first, began, began_s = swarm.num_steps_told, _accumulated(swarm), time.monotonic()
    for _ in looks(swarm, POLL_S):
        if (done := swarm.num_steps_told - first) >= steps:
            break
    row.steps, row.step_s = done, (time.monotonic() - began_s) / done
    row.slow = max(count - began[peer] for peer, count in _accumulated(swarm).items() if peer in swarm.plan.slow) / done


def _accumulated(swarm: DemoSwarm) -> dict[int, int]:
    """Microbatches that each peer has added to its ledgers since it started."""
    return {each.peer: each.status["counters"]["accumulated_microbatches"] for each in swarm.daemons if each.status is not None}


def _judge(row: Row, swarm: DemoSwarm) -> None:
    audited, logged = audited_by(swarm.daemons, ANSWER_S), noted_of(swarm.daemons, swarm.daemons, ACCUSED)
    row.audits, row.deviation = audited.drawn, audited.largest_deviation
    row.honest_bans = len(noted_of(swarm.daemons, swarm.daemons, BANNED))
    row.accusations = len(audited.against) + len(logged)
    row.missed += [*audited.against, *logged]
    if not row.audits:
        row.missed.append("nobody audited anything")
    told = [dict(daemon.status["counters"]) for daemon in swarm.daemons if daemon.status is not None]
    counted = {name: sum(int(each[name]) for each in told) for name in MUST_BE_0}  # type: ignore[call-overload]
    row.missed += [f"{count} {name.replace('_', ' ')}" for name, count in counted.items() if count]


def _compare(row: Row, swarm: DemoSwarm, losses_apart: float) -> None:
    unlike, row.distance = far_from_reference(swarm, largest_difference, losses_apart)
    row.missed += [unlike] if unlike else []
    if not losses_apart and row.distance > PARAMETERS_APART:
        row.missed.append(f"a parameter is {row.distance:.1e} away from the reference")


def report(rows: Sequence[Row], as_json: bool) -> int:
    if as_json:
        print(json.dumps({"schema": SCHEMA, "rows": [asdict(row) for row in rows]}))
    else:
        print("  ".join(f"{name:>{max(7, len(name))}}" for name in COLUMNS))
        for row in rows:
            print("  ".join(f"{_cell(getattr(row, name)):>{max(7, len(name))}}" for name in COLUMNS))
    for row in rows:
        for reason in row.missed:
            print(f"seed {row.seed}: {reason}", file=sys.stderr)
    return 1 if any(row.missed for row in rows) else 0


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.2g}" if isinstance(value, float) else str(value)


def honest(arguments: Sequence[str]) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="scripts/bench liars honest", description=__doc__, formatter_class=raw)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--seeds", type=int, default=10, metavar="N", help="how many, from --first on (default 10)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="default 0")
    parser.add_argument("--steps", type=int, default=60, metavar="N", help="steps watched once all peers serve (default 60)")
    given = parser.parse_args(arguments)
    if min(given.seeds, given.steps) < 1 or given.first < 0:
        parser.error("--seeds and --steps must be at least 1, --first at least 0")
    rows = list[Row]()
    for seed in range(given.first, given.first + given.seeds):
        began_s = time.monotonic()
        rows.append(row := try_seed(seed, given.steps))
        row.seconds = time.monotonic() - began_s
        told = ", ".join(f"{name} {_cell(getattr(row, name))}" for name in COLUMNS[1:])
        progress(f"seed {seed}: {told}; {'; '.join(row.missed) or 'nobody accused'}")
    return report(rows, given.json)
