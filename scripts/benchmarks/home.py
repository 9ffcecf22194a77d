"""What is left of peerd's speed over home connections: beside no limits, beside 1F1B, by codec, and in the averaging.

`link`: 3 stages of 2 peers with boundaries of 262 KB, `auto`, in turns over the links of a scenario and without limits. A row has the
ratio of the two, how the critical path divides, and the codecs in use at each boundary. A step has so many microbatches that filling and
emptying the pipeline takes at most 5 % of it. Scenarios: `even` 20 Mbit/s both ways and 60 ms, `home` 20 up and 100 down, `unlike` rates
and delays, `rough` with loss and jitter.

`1f1b`: 2 machines at 100 Mbit/s and 50 ms round trip, raw and in 8 bits, beside peerd on loopback and 1F1B of torch.distributed.pipelining
over gloo on the same link. `mediated`: 4 machines beside a pipeline through its trainer. `codecs`: 20 Mbit/s and 100 ms; `auto` should be
within 5 % of the best. `latency`: 4 machines at 500 Mbit/s, with and without 100 +- 50 ms each way, beside GPipe, which flushes after 4
microbatches, and 1F1B (SWARM, arXiv 2301.11913, table 2); peerd should keep 0.85 of its speed. Sides train in turns; a step's time is that
between two ends of steps within a turn. Links are made of network namespaces and a switch in user space, which needs root.

`averaging`: one stage of 2 or 4 peers averages 64 MB of raw gradients each, over 60 ms, up 20 or 5 Mbit/s and down 100, or over unlike
uplinks. A row has the median time of an exchange (failed rounds included), its bound (the bytes of a butterfly with slices by
uplink), their ratio, and how many rounds failed and microbatches were launched again; no peer's gradients may be missing, and the run must
equal one process. `drop`: one link goes from 100 to 5 Mbit/s in the middle of each round; `break`: it carries nothing for 10 s there;
`rough`: it loses 3 % of the packets and is late by up to 100 ms; `one-way`: nothing passes from one peer to another. In the
others the last of four peers lies: in `silent` it joins no round, in `trickles` it sends a byte a second, in `tears` it breaks
off each chunk at its end, and in `mute` it says nothing in its rounds. The figures are those of the other three, and they end each step
without it within three averaging times, the bound and the time for its microbatches. All scenarios together take about an hour.

`big`: a real model of 300 or 30 million parameters, in 2 stages of 2 peers on loopback, trains, loses a peer, takes a joiner, exports, and
resumes after all were killed. A row has the largest peak of a daemon over its estimate in that moment. No root; 300 M takes 20 GB.

`join`: a peer joins a stage of 3 donors with 20 Mbit/s up and 100 down, 60 ms, whose state without the previous parameters has 100 MB.
Its download should take at most 0.4 of what one donor's uplink takes, and the donors keep 0.85 of their speed. The same once more where
training fills more than half of the donors' uplinks, 5 Mbit/s: there they should keep 0.85, too.

`local`: 2 stages of 3 peers with local steps, of a real model of 25 million parameters a stage, keep at least 0.8 of their speed at
20 Mbit/s up, 100 down and 60 ms. Beside it the defaults of a new run on the same links. It takes 15 minutes and 10 GB.

`placement`: the uplinks of one stage of two bind. A joiner that chooses its stage, and movers, make the swarm 1.5 times as fast.

A stand-in sleeps in place of work, on all sides alike: in `link` 60 ms a microbatch, in `averaging` a second, in `join` three, elsewhere
as long as its activations take over a link of 100 Mbit/s. The arithmetic is tiny and real, and losses are compared.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path

from peerd.config.codec import CODECS
from peerd.config.manifest import ComputeConfig, Manifest, ModelConfig, SwarmConfig, TrainConfig, WireConfig, dump
from scripts.benchmarks._averaging import averaging
from scripts.benchmarks._big import D_MODEL, big
from scripts.benchmarks._home_scenarios import SCENARIOS, chosen
from scripts.benchmarks._joining import joining
from scripts.benchmarks._link import LINK_SCENARIOS, Turns, over_links
from scripts.benchmarks._local import local
from scripts.benchmarks._namespaces import Network, require_root
from scripts.benchmarks._placement import placement
from scripts.benchmarks._report import Row, paired_ratio, print_json, print_table, progress, run
from scripts.benchmarks._switch import Links, Way
from scripts.benchmarks._turns import Contender, Peers, Workers, place_in, warmed_up
from scripts.benchmarks._workers import Job, Kind

HOME, SLOW = Links(mbit_per_s=100, round_trip_ms=50), Links(mbit_per_s=20, round_trip_ms=100)
HEADERS = 1.05
"""Largest overhead of TCP, the tunnel and gRPC on the bytes of a tensor, as a factor."""
LONG_ENOUGH_S = 300.0
"""Time between announcements, so that a frozen daemon does not count as dead."""
LOSS_TOLERANCE = 1e-4
KEPT = {"none": 0.9, "int8": 0.95}
"""Least share of the loopback throughput that counts as a pass."""
OVER_1F1B = {"none": 1.6, "int8": 1.75}
OVER_MEDIATED = 2.5
RACK, LEAST_LATE_MS, MOST_LATE_MS = Links(mbit_per_s=500, round_trip_ms=0), 50, 150
OTHERS_FAR: dict[Kind, int] = {"1f1b": 24, "gpipe": 4}
"""Microbatches of a step. 1F1B takes as long for each, so a quarter of peerd's will do: all of them take minutes with late links. GPipe
flushes after as many as it has stages, as where memory bounds them."""
STAND_IN_FAR_MS = 80.0
KEPT_FAR, LOST_FAR = 0.85, 0.5
"""The share of its speed that peerd keeps over 100 +- 50 ms at least, and that the others keep at most."""
WITHIN = 0.95
"""Least share of the best codec's throughput that `auto` has to reach."""
MICROBATCHES = {"1f1b": 64, "codecs": 24, "mediated": 24, "latency": 96}
"""Per step. Where codecs are compared, raw activations take five times as long as the work, and more through a trainer."""
STAGES = {"1f1b": 2, "codecs": 2, "mediated": 4, "latency": 4}
STEPS, AVERAGING, LINK, BIG, JOIN, LOCAL, PLACEMENT = 2, "averaging", "link", "big", "join", "local", "placement"
MILLIONS = {BIG: 300.0, LOCAL: 25.0}
COMPARED = (*(spec.example for spec in CODECS if spec.auto), "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    part: str
    rounds: int
    steps: int
    microbatches: int
    as_json: bool

    def manifest(self, codec: str) -> Manifest:
        """A boundary of 1 MiB, a quarter of that in `latency`, and next to no work."""
        return Manifest(
            name="bench",
            model=ModelConfig(num_layers=self.num_stages, d_model=64, num_heads=1, d_ff=64),
            train=TrainConfig(
                num_stages=self.num_stages,
                microbatches_per_step=self.microbatches,
                microbatch_size=self.microbatch_size,
                sequence_length=32,
            ),
            compute=ComputeConfig(threads=1, recompute="always" if self.part == "mediated" else "never"),
            wire=WireConfig(activations=codec, activation_gradients=codec),
            swarm=SwarmConfig(announce_period_s=LONG_ENOUGH_S, checkpoint_every_steps=0),
        )

    @property
    def num_stages(self) -> int:
        return STAGES[self.part]

    @property
    def microbatch_size(self) -> int:
        return 32 if self.part == "latency" else 128

    @property
    def stand_in_ms(self) -> float:
        """The time that a microbatch's activations take at 100 Mbit/s."""
        if self.part == "latency":
            return STAND_IN_FAR_MS
        return 1000 * HOME.wire_s(round(HEADERS * self.manifest("none").boundary_bytes))


@dataclass(slots=True)
class Side:
    contender: Contender
    seconds: list[float] = field(default_factory=list)
    """Per step, by round."""

    @property
    def name(self) -> str:
        return self.contender.name

    def turn(self, steps: int) -> None:
        """Train one step to warm up, then those that count."""
        began = time.time()
        self.contender.turn(1 + steps)
        ends = [step.time_s for step in self.contender.steps if step.time_s > began]
        self.seconds.append((ends[steps] - ends[0]) / steps)


def peers(plan: Plan, codec: str, network: Network | None, where: str) -> Side:
    team = Peers(plan.manifest(codec), observed=False, stand_in_ms=plan.stand_in_ms, place=place_in(network))
    return Side(Contender(f"peerd, {codec}, {where}", team))


def workers(plan: Plan, folder: Path, network: Network, kind: Kind, name: str) -> Side:
    """A trainer-mediated pipeline has one machine more, for the trainer."""
    run_file = folder / "run.toml"
    run_file.write_text(dump(plan.manifest("none")), encoding="utf-8")
    of_all = Job(run_file=str(run_file), threads=1, folder=str(folder), kind=kind, stand_in_ms=plan.stand_in_ms)
    ranks = range(plan.num_stages + (kind == "mediated"))
    jobs = [replace(of_all, rank=rank, host=network.address(rank)) for rank in ranks]
    return Side(Contender(name, Workers(jobs, folder / "report", network)))


def take_turns(plan: Plan, sides: list[Side]) -> None:
    """Run all rounds, forward in even ones and in reverse order in odd ones."""
    with warmed_up([side.contender for side in sides], 2):
        for number in range(plan.rounds):
            for side in sides if number % 2 == 0 else reversed(sides):
                side.turn(plan.steps)
                progress(f"round {number + 1}  {side.name}: {side.seconds[-1]:.3f} s a step")


def row(side: Side, baseline: Side | None = None) -> Row:
    return Row(
        name=side.name,
        median=statistics.median(side.seconds),
        ratio=paired_ratio(baseline.seconds, side.seconds) if baseline else None,
        baseline=baseline.name if baseline else None,
        loss=side.contender.steps[2].loss,
    )


def over_the_link(plan: Plan, folder: Path) -> tuple[list[Row], list[str]]:
    """The rows, and the missed targets."""
    with Network(2, HOME) as network:
        there = {codec: peers(plan, codec, network, "link") for codec in KEPT}
        here = {codec: peers(plan, codec, None, "loopback") for codec in KEPT}
        torch = workers(plan, folder, network, "1f1b", "1F1B over gloo, link")
        take_turns(plan, [*there.values(), torch, *here.values()])
    kept = {codec: row(there[codec], here[codec]) for codec in KEPT}
    over = {codec: row(there[codec], torch) for codec in KEPT}
    missed = [
        f"{found.name}: {found.ratio:.3f} of {found.baseline}, not {KEPT[codec]}"
        for codec, found in kept.items()
        if (found.ratio or 0) < KEPT[codec]
    ]
    missed += [
        f"{found.name}: {found.ratio:.3f} times {found.baseline}, not {OVER_1F1B[codec]}"
        for codec, found in over.items()
        if (found.ratio or 0) < OVER_1F1B[codec]
    ]
    missed += other_work(there["none"], torch)
    return [*kept.values(), *over.values(), row(torch), *(row(side) for side in here.values())], missed


def under_latency(plan: Plan, folder: Path) -> tuple[list[Row], list[str]]:
    with Network(plan.num_stages, RACK) as network:
        addresses = [network.address(machine) for machine in range(plan.num_stages)]
        ways = [
            Way(origin=one, target=other, delay_ms=LEAST_LATE_MS, jitter_ms=MOST_LATE_MS - LEAST_LATE_MS)
            for one, other in itertools.permutations(addresses, 2)
        ]
        late = replace(RACK, ways=ways)
        sides = [peers(plan, "none", network, "4 machines")]
        for kind, microbatches in OTHERS_FAR.items():
            own = folder / kind
            own.mkdir()
            sides.append(workers(replace(plan, microbatches=microbatches), own, network, kind, f"{kind} over gloo"))
        near, far = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
        with warmed_up([side.contender for side in sides], 2):
            for number, (links, found) in itertools.product(range(plan.rounds), ((RACK, near), (late, far))):
                network.change(links)
                for side in sides:
                    side.turn(plan.steps)
                    found[side.name].append(side.seconds[-1])
                    where = "100 +- 50 ms" if links is late else "no latency"
                    progress(f"round {number + 1}  {side.name}, {where}: {side.seconds[-1]:.3f} s a step")
    rows = [
        Row(name=name, median=statistics.median(far[name]), ratio=paired_ratio(near[name], far[name]), baseline="itself without latency")
        for name in near
    ]
    missed = [f"{rows[0].name}: {rows[0].ratio:.3f} of its speed, not {KEPT_FAR}"] if (rows[0].ratio or 0) < KEPT_FAR else []
    missed += [f"{row.name} keeps {row.ratio:.3f}, more than {LOST_FAR}" for row in rows[1:] if (row.ratio or 0) > LOST_FAR]
    return rows, missed


def through_the_trainer(plan: Plan, folder: Path) -> tuple[list[Row], list[str]]:
    with Network(plan.num_stages + 1, HOME) as network:
        ours = peers(plan, "none", network, "link")
        mediated = workers(plan, folder, network, "mediated", "through the trainer, link")
        take_turns(plan, [ours, mediated])
    found = row(ours, mediated)
    missed = other_work(ours, mediated)
    if (found.ratio or 0) < OVER_MEDIATED:
        missed.append(f"{found.name}: {found.ratio:.3f} times {found.baseline}, not {OVER_MEDIATED}")
    return [found, row(mediated)], missed


def other_work(one: Side, other: Side) -> list[str]:
    """Messages if the sides' losses differ."""
    apart = abs(one.contender.steps[2].loss - other.contender.steps[2].loss)
    return [f"the losses differ by {apart:.1e}: the sides did not do the same work"] if apart > LOSS_TOLERANCE else []


def codec_by_codec(plan: Plan, _folder: Path) -> tuple[list[Row], list[str]]:
    with Network(2, SLOW) as network:
        sides = [peers(plan, codec, network, "link") for codec in COMPARED]
        take_turns(plan, sides)
    best = min(sides[:-1], key=lambda side: statistics.median(side.seconds))
    rows = [row(side, best) for side in sides]
    share = rows[-1].ratio or 0.0
    return rows, [] if share >= WITHIN else [f"auto has {share:.3f} of the best codec's throughput, not {WITHIN}"]


def parse() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="scripts/bench home", description=__doc__, formatter_class=raw)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument(
        "--part", choices=[LINK, *STAGES, AVERAGING, BIG, JOIN, LOCAL, PLACEMENT], default=LINK, help="what to measure (default link)"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds, in each of which every side has one turn (default 3)")
    parser.add_argument("--steps", type=int, metavar="N", help=f"steps that count in a turn (default {STEPS}); of {AVERAGING}: in all (5)")
    parser.add_argument("--microbatches", type=int, metavar="N", help=f"microbatches of a step (default {MICROBATCHES}, {LINK}: enough)")
    links = parser.add_argument_group(LINK)
    links.add_argument("--links", nargs="+", choices=[each.name for each in LINK_SCENARIOS], default=["even"], help="default even")
    links.add_argument("--codec", nargs="+", choices=COMPARED, default=["auto"], help="default auto")
    longer = "how many times as slow computing and links are, for a machine that is busy with other things (default 1)"
    links.add_argument("--stretch", type=float, default=1.0, metavar="X", help=longer)
    averages = parser.add_argument_group(AVERAGING)
    names = list(dict.fromkeys(scenario.name for scenario in SCENARIOS))
    averages.add_argument("--scenario", nargs="+", choices=names, default=names, help="default all")
    averages.add_argument("--peers", type=int, nargs="+", choices=(2, 4), default=[2, 4], help="default 2 and 4")
    averages.add_argument("--megabytes", type=float, default=64.0, metavar="MB", help="raw gradients of a peer (default 64)")
    sizes = f"parameters, of {BIG} in all (300, 100 or 30; default 300), of {LOCAL} in a stage (default 25)"
    parser.add_argument("--millions", type=float, metavar="M", help=sizes)
    given = parser.parse_args()
    given.steps = given.steps if given.steps is not None else 5 if given.part == AVERAGING else STEPS
    if given.microbatches is None:
        given.microbatches = MICROBATCHES.get(given.part)
    if min(given.rounds, given.steps, 1 if given.microbatches is None else given.microbatches) < 1 or not 1 <= given.megabytes <= 2000:
        parser.error("--rounds, --steps and --microbatches must be at least 1, --megabytes between 1 and 2000")
    if given.millions is None:
        given.millions = MILLIONS.get(given.part)
    elif given.part == BIG and given.millions not in D_MODEL:
        parser.error(f"{BIG} has no model of so many million parameters, but of {', '.join(map(str, D_MODEL))}")
    elif not 0.1 <= given.millions <= 1000:
        parser.error("--millions must be between 0.1 and 1000")
    if not 0.1 <= given.stretch <= 100:
        parser.error("--stretch must be between 0.1 and 100")
    if given.part == AVERAGING and not chosen(given.scenario, given.peers):
        parser.error("no such scenario has so many peers")
    return given


def main() -> int:
    given = parse()
    if given.part == BIG:
        return big(int(given.millions), given.json)
    require_root()
    if given.part == AVERAGING:
        return averaging(chosen(given.scenario, given.peers), given.megabytes, given.steps, given.json)
    if given.part == JOIN:
        return joining(given.json)
    if given.part == LOCAL:
        return local(given.millions, given.rounds, given.steps, given.json)
    if given.part == PLACEMENT:
        return placement(given.json)
    if given.part == LINK:
        turns = Turns(rounds=given.rounds, steps=given.steps, stretch=given.stretch)
        return over_links(given.links, given.codec, given.microbatches, turns, given.json)
    plan = Plan(part=given.part, rounds=given.rounds, steps=given.steps, microbatches=given.microbatches, as_json=given.json)
    with tempfile.TemporaryDirectory(prefix="peerd-bench-") as folder:
        measure = {"1f1b": over_the_link, "codecs": codec_by_codec, "mediated": through_the_trainer, "latency": under_latency}[plan.part]
        rows, missed = measure(plan, Path(folder))
    links = {"codecs": SLOW, "latency": RACK}.get(plan.part, HOME)
    work = f"{plan.microbatches} microbatches of {plan.stand_in_ms:.0f} ms stand-in"
    title = f"{plan.num_stages} stages, {links.mbit_per_s:g} Mbit/s, {links.round_trip_ms:g} ms round trip, {work}"
    if plan.as_json:
        print_json(rows, compute_stand_in_ms=plan.stand_in_ms, note="a stand-in sleeps in place of work", missed=missed)
    else:
        print_table(title, "s a step", rows)
        print("a stand-in sleeps in place of work, on all sides")
    for line in missed:
        print(line, file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(run(main))
