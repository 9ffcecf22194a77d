"""What do audits cost honest peers? The same run with swarm.trust "off", "on" and "audits".

The sides are swarms of real daemons on loopback, which work in turns: while one does, the others are frozen. --peers serve two stages in
turn; of three, two serve the first one, and audit each other. A boundary tensor has 256 KB. The first --warmup steps are not counted: in
ten of them each mate is a newcomer, of whose work a quarter is computed again. A row has

step_s      seconds of a step; ratio to "off", the median of the pairs, with the least and the largest one
cpu_s       processor seconds of all daemons for one step; ratio likewise
cpu_all     the ratio of all counted steps together: audits are rare and large, so a median of pairs does not show all of them
sent_mb     what all daemons send for one step; bytes, its ratio
boundary    by how much of the boundary tensors' bytes the side sends more than "off"
audits      microbatches and parts that were computed again in the counted steps, of all that there were, and how many are usual of so many

It ends with 1 where step_s is above 1.05, cpu_all above 1.05, boundary above 0.03, or an honest peer was accused.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import psutil

from peerd.cli.demo_daemons import here
from peerd.config.manifest import ComputeConfig, Manifest, ModelConfig, SwarmConfig, TrainConfig
from peerd.policy.step.auditing import NEWCOMER_STEPS, Rates
from scripts.benchmarks._report import SCHEMA, progress, run
from scripts.benchmarks._turns import Contender, Peers, warmed_up
from scripts.benchmarks.pipeline import LONG_ENOUGH_S

MOST_STEP, MOST_COMPUTE, MOST_BOUNDARY = 1.05, 1.05, 0.03
SIDES = ("off", "on", "audits")
TENSOR_BYTES = 256 << 10
SEQUENCE, D_MODEL = 128, 512


@dataclass(slots=True)
class Side:
    trust: str
    contender: Contender
    peers: Peers
    step_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    """By turn, for one step."""
    counts: Counter[str] = field(default_factory=Counter)
    """Of the turns together."""
    num_steps: int = 0

    def turn(self, num_steps: int) -> None:
        self.contender.thaw()
        before, done, spent_s = Counter(self.told()), len(self.contender.steps), self.spent_s()
        self.step_s.append(self.contender.turn(num_steps))
        now_done, now_spent_s = len(self.contender.steps), self.spent_s()
        self.contender.thaw()
        now = Counter(self.told())
        self.contender.freeze()
        now.subtract(before)
        self.counts.update(now)
        self.num_steps += now_done - done
        self.cpu_s.append((now_spent_s - spent_s) / (now_done - done))

    def spent_s(self) -> float:
        times = [psutil.Process(pid).cpu_times() for pid in self.peers.pids()]
        return sum(each.user + each.system for each in times)

    def told(self) -> dict[str, int]:
        """Counts of all daemons since they started."""
        found = Counter[str]()
        for client in self.peers.clients:
            status = dict(client.request("status", silence_s=60.0))
            found.update({name: status["counters"][name] for name in ("bytes_sent", "boundary_bytes", "messages_refused")})
            if self.trust == "audits":
                audits = dict(client.request("audit", silence_s=60.0))["audits"]
                found.update({name: audits[name] for name in ("items", "drawn", "kept", "offered")} if audits else {})
                found.update({f"audits {name}": count for name, count in audits["counts"].items()} if audits else {})
        return dict(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    side: str
    step_s: float
    step_ratio: tuple[float, float, float] | None
    """The median of the pairs, the least, and the largest one."""
    cpu_s: float
    cpu_ratio: tuple[float, float, float] | None
    cpu_all: float | None
    sent_mb: float
    bytes_ratio: float | None
    boundary: float | None
    counts: dict[str, int]


def row_of(side: Side, plain: Side) -> Row:
    is_plain, sent, boundary = side is plain, side.counts["bytes_sent"] / side.num_steps, plain.counts["boundary_bytes"] / plain.num_steps
    plain_sent = plain.counts["bytes_sent"] / plain.num_steps
    return Row(
        side=side.trust,
        step_s=statistics.median(side.step_s),
        step_ratio=None if is_plain else ratios(side.step_s, plain.step_s),
        cpu_s=statistics.median(side.cpu_s),
        cpu_ratio=None if is_plain else ratios(side.cpu_s, plain.cpu_s),
        cpu_all=None if is_plain else statistics.fmean(side.cpu_s) / statistics.fmean(plain.cpu_s),
        sent_mb=sent / 1e6,
        bytes_ratio=None if is_plain else sent / plain_sent,
        boundary=None if is_plain else (sent - plain_sent) / boundary,
        counts=dict(sorted(side.counts.items())),
    )


def ratios(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    found = [one / other for one, other in zip(ours, theirs, strict=True)]
    return statistics.median(found), min(found), max(found)


def manifest_of(given: argparse.Namespace) -> Manifest:
    return Manifest(
        name="bench",
        model=ModelConfig(num_layers=2 * given.layers, d_model=D_MODEL, num_heads=8, d_ff=4 * D_MODEL, vocab_size=256),
        train=TrainConfig(
            num_stages=2,
            microbatches_per_step=given.microbatches,
            microbatch_size=TENSOR_BYTES // (4 * SEQUENCE * D_MODEL),
            sequence_length=SEQUENCE,
            optimizer="adamw",
            learning_rate=1e-3,
        ),
        compute=ComputeConfig(threads=1),
        swarm=SwarmConfig(announce_period_s=LONG_ENOUGH_S, checkpoint_every_steps=0, rebalance_period_s=0, group_size=0),
    )


def measure(given: argparse.Namespace) -> list[Side]:
    manifest, sides = manifest_of(given), list[Side]()
    for trust in given.sides:
        settled: Any = replace(manifest, swarm=replace(manifest.swarm, trust=trust))
        peers = Peers(settled, observed=False, num_peers=given.peers, place=here)
        sides.append(Side(trust, Contender(f'trust "{trust}"', peers), peers))
    with warmed_up([side.contender for side in sides], given.warmup):
        for number in range(given.rounds):
            for side in sides if number % 2 == 0 else reversed(sides):
                side.turn(given.steps)
                progress(f"round {number + 1}  {side.trust}: a step {side.step_s[-1]:.2f} s, processor {side.cpu_s[-1]:.2f} s")
    return sides


def report(rows: list[Row], as_json: bool) -> int:
    if as_json:
        print(json.dumps({"schema": SCHEMA, "rows": [asdict(row) for row in rows]}))
    else:
        print(f"{'':8}{'step_s':>8}{'ratio':>22}{'cpu_s':>8}{'ratio':>22}{'cpu_all':>9}{'sent_mb':>9}{'bytes':>7}{'boundary':>10}  audits")
        for row in rows:
            wide = [f"{row.step_s:8.2f}", _three(row.step_ratio), f"{row.cpu_s:8.2f}", _three(row.cpu_ratio)]
            tail = [_cell(row.cpu_all, 9), f"{row.sent_mb:9.2f}", _cell(row.bytes_ratio, 7), _cell(row.boundary, 10)]
            counts = row.counts
            usual = f"{Rates().usual * counts.get('items', 0):.1f} usual"
            audits = f"  {counts.get('drawn', 0)} of {counts.get('items', 0)} ({usual})" if row.side == "audits" else ""
            print(f"{row.side:8}" + "".join([*wide, *tail]) + audits)
    missed = [reason for row in rows for reason in missed_by(row)]
    for reason in missed:
        print(reason, file=sys.stderr)
    return 1 if missed else 0


def missed_by(row: Row) -> list[str]:
    """The limits that do not hold."""
    if row.step_ratio is None or row.cpu_all is None or row.boundary is None:
        return []
    found = [f"{row.side}: a step takes {row.step_ratio[0]:.3f} times as long"] if row.step_ratio[0] > MOST_STEP else []
    found += [f"{row.side}: {row.cpu_all:.3f} times the processor time"] if row.cpu_all > MOST_COMPUTE else []
    found += [f"{row.side}: {row.boundary:.3f} of the boundaries' bytes more"] if row.boundary > MOST_BOUNDARY else []
    accused = sum(row.counts.get(f"audits {name}", 0) for name in ("accused", "convicted", "disputed", "withheld"))
    return found + ([f"{row.side}: honest peers accused {accused} times"] if accused else [])


def _three(told: tuple[float, float, float] | None) -> str:
    return f"{'':>22}" if told is None else f"{told[0]:8.3f} ({told[1]:.2f}, {told[2]:.2f})".rjust(22)


def _cell(value: float | None, width: int) -> str:
    return f"{'':>{width}}" if value is None else f"{value:{width}.3f}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench audits", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="rounds, in each of which all sides have a turn (default 9)")
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="steps counted per turn (default 2)")
    parser.add_argument("--warmup", type=int, default=NEWCOMER_STEPS + 2, metavar="N", help="steps before (default %(default)s)")
    parser.add_argument("--peers", type=int, default=3, metavar="N", help="daemons of each side (default 3)")
    parser.add_argument("--layers", type=int, default=2, metavar="N", help="per stage, of 3.1 million parameters each (default 2)")
    parser.add_argument("--microbatches", type=int, default=24, metavar="N", help="per step (default 24)")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="the first one is the baseline (default all)")
    given = parser.parse_args()
    if min(given.rounds, given.steps, given.warmup, given.layers, given.microbatches) < 1 or given.peers < 3:
        parser.error("there are three peers at least, and one of everything else")
    sides = measure(given)
    return report([row_of(side, sides[0]) for side in sides], given.json)


if __name__ == "__main__":
    sys.exit(run(main))
