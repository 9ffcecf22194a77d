"""The demo's chaos over some seeds: does each run equal the same run in one process?

Nine peers in three stages train forty steps, with sums in float64. With `kill` one peer dies every four seconds and is replaced; `mixed`
strikes with faults of all kinds. A row has the steps, faults, microbatches launched again, and the distance of the parameters to the
reference. A run is missed if anything was counted twice, lost or given up, or if a loss or parameter differs.

With --trust audits the peers audit each other; `audits` is how many microbatches and parts they computed again. There a run is also missed
if anything is said against a peer that was not made to send broken messages, or if such a peer is shut out.

With --mbit each daemon has a machine of its own, and each machine a link of so many Mbit/s both ways, 60 ms between any two. That needs
root.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from peerd.cli.demo_chaos import MIN_FAULTS, Chaos, FaultKind, parse_chaos
from peerd.cli.demo_daemons import DemoSwarm, Placement
from peerd.cli.demo_plan import DemoPlan
from peerd.cli.demo_strikes import Strikes
from peerd.config.manifest import ComputeConfig, Manifest, ModelConfig, SwarmConfig, TrainConfig
from peerd.errors import PeerdError
from scripts.benchmarks._accusations import BANNED, audited_by, noted_of
from scripts.benchmarks._disturbed import MUST_BE_0, PARAMETERS_APART, far_from_reference
from scripts.benchmarks._equality import apart
from scripts.benchmarks._namespaces import Network, require_root
from scripts.benchmarks._report import SCHEMA, progress
from scripts.benchmarks._swarms import looks
from scripts.benchmarks._switch import Links
from scripts.benchmarks._turns import place_in

NUM_STAGES, NUM_PEERS = 3, 9
ROUND_TRIP_MS, STAND_IN_MS, POLL_S = 60.0, 40.0, 0.5
ANSWER_S = 60.0
KINDS = tuple(kind.value for kind in (FaultKind.KILL, FaultKind.MIXED))


@dataclass(slots=True, kw_only=True)
class Row:
    seed: int
    steps: int = 0
    seconds: float = 0.0
    faults: int = 0
    replayed: int = 0
    audits: int = 0
    accusations: int = 0
    """What is said against peers that sent no broken messages."""
    apart: float | None = None
    """The largest difference of a parameter to the reference, as a share of the tensor's largest value."""
    missed: list[str] = field(default_factory=list)
    """What does not hold."""


def manifest_of(seed: int, steps: int, trust: Any) -> Manifest:
    return Manifest(
        name="bench",
        seed=seed,
        model=ModelConfig(num_layers=NUM_STAGES, d_model=64, num_heads=2, d_ff=128),
        train=TrainConfig(
            num_stages=NUM_STAGES, microbatches_per_step=12, microbatch_size=1, sequence_length=32, steps=steps, accumulate="float64"
        ),
        compute=ComputeConfig(threads=1),
        swarm=SwarmConfig(announce_period_s=1.0, trust=trust, group_size=0),
    )


def try_seed(seed: int, steps: int, chaos: Chaos, mbit: float, trust: str = "off") -> Row:
    """Run until all steps are done and as many faults have struck as the demo wants."""
    row, began_s = Row(seed=seed), time.monotonic()
    quiet: dict[str, Any] = {"slow": {}, "kills": (), "observed": False}
    plan = DemoPlan(manifest=manifest_of(seed, steps, trust), num_peers=NUM_PEERS, chaos=chaos, stand_in_ms=STAND_IN_MS, **quiet)
    with contextlib.ExitStack() as stack:
        machines = NUM_PEERS + 2 * MIN_FAULTS  # a replacement has a machine of its own, as long as there is one
        network = stack.enter_context(Network(machines, Links(mbit_per_s=mbit, round_trip_ms=ROUND_TRIP_MS))) if mbit else None
        place = place_in(network)

        def placed(peer: int) -> Placement:
            return replace(place(peer % machines), settings={"observe": False})

        swarm = stack.enter_context(DemoSwarm(plan, lambda _text: None, place=placed))
        swarm.start()
        try:
            _train(swarm, Strikes(swarm, chaos, seed))
            _judge(row, swarm)
            _compare(row, swarm)
        except PeerdError as error:
            row.missed.append(error.message)
        row.steps, row.faults, row.seconds = swarm.step, len(swarm.faults), round(time.monotonic() - began_s, 1)
    return row


def _train(swarm: DemoSwarm, strikes: Strikes) -> None:
    for _ in looks(swarm, POLL_S):
        strikes.tick()
        if strikes.over and swarm.finished:
            swarm.poll()  # the last one that fell is counted, too
            return


def _judge(row: Row, swarm: DemoSwarm) -> None:
    corrupt = {fault.peer for fault in swarm.faults if fault.kind == FaultKind.CORRUPT}
    spared = frozenset(daemon.ready.peer for daemon in swarm.daemons if daemon.peer in corrupt and daemon.ready is not None)
    audited = audited_by((daemon for daemon in swarm.living if daemon.answers), ANSWER_S, spared)
    logged = noted_of((daemon for daemon in swarm.daemons if daemon.peer not in corrupt), swarm.daemons, BANNED)
    row.audits, row.accusations = audited.drawn, len(audited.against) + len(logged)
    row.missed += [*audited.against, *logged]


def _compare(row: Row, swarm: DemoSwarm) -> None:
    told = [dict(daemon.status["counters"]) for daemon in swarm.daemons if daemon.status is not None]
    counted = {name: sum(int(each[name]) for each in told) for name in (*MUST_BE_0, "replayed_microbatches")}  # type: ignore[call-overload]
    row.replayed = counted.pop("replayed_microbatches")
    row.missed += [f"{count} {name.replace('_', ' ')}" for name, count in counted.items() if count]
    losses, row.apart = far_from_reference(swarm, apart)
    row.missed += [losses] if losses else []
    row.missed += [f"parameters are {row.apart:.1e} apart from the reference"] if row.apart > PARAMETERS_APART else []


def seeds(arguments: Sequence[str]) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="scripts/bench chaos seeds", description=__doc__, formatter_class=raw)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--seeds", type=int, default=10, metavar="N", help="how many, from --first on (default 10)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="default 0")
    parser.add_argument("--steps", type=int, default=40, metavar="N", help="steps of a run (default 40)")
    parser.add_argument("--kind", choices=KINDS, default=KINDS[0], help=f"default {KINDS[0]}")
    parser.add_argument("--every", type=float, default=4.0, metavar="S", help="seconds between faults (default 4)")
    parser.add_argument("--trust", choices=["off", "on", "audits"], default="off", help="swarm.trust of the runs (default off)")
    parser.add_argument("--mbit", type=float, default=0.0, metavar="MBIT", help="of each link; 0: loopback (default)")
    given = parser.parse_args(arguments)
    if min(given.seeds, given.steps) < 1 or given.first < 0 or given.mbit < 0:
        parser.error("--seeds and --steps must be at least 1, --first and --mbit at least 0")
    if given.mbit:
        require_root()
    chaos, rows = parse_chaos(f"{given.kind}:every={given.every:g}s,respawn=yes"), list[Row]()
    for seed in range(given.first, given.first + given.seeds):
        rows.append(row := try_seed(seed, given.steps, chaos, given.mbit, given.trust))
        progress(f"seed {seed}: {'; '.join(row.missed) or 'as one process'}")
    if given.json:
        print(json.dumps({"schema": SCHEMA, "mbit": given.mbit, "rows": [asdict(row) for row in rows]}))
    else:
        print("seed  steps  seconds  faults  replayed  audits  accusations    apart")
        for row in rows:
            differ = "" if row.apart is None else f"{row.apart:.1e}"
            counts = f"{row.faults:>6}  {row.replayed:>8}  {row.audits:>6}  {row.accusations:>11}"
            print(f"{row.seed:>4}  {row.steps:>5}  {row.seconds:>7.1f}  {counts}  {differ:>7}")
    for row in rows:
        for reason in row.missed:
            print(f"seed {row.seed}: {reason}", file=sys.stderr)
    return 1 if any(row.missed for row in rows) else 0
