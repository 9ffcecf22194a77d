"""`scripts/bench home --part link`: the share of its speed without limits that a swarm keeps over home links.

One swarm trains, in turns over the links of a scenario and over links without limits. A row has the time of a step, its ratio to the time
without limits, how the critical path divides (`peerd trace`), and the codecs that are in use at each boundary. A step has so many
microbatches that filling and emptying the pipeline, at the time of raw activations on the wire, takes at most `FILL_SHARE` of it.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from peerd.cli.render_trace import timelines_of
from peerd.config.manifest import ComputeConfig, Manifest, ModelConfig, SwarmConfig, TrainConfig, WireConfig
from peerd.errors import TimedOutError
from peerd.models.stages import initial_parameter_spec
from peerd.timeline.critical import critical_shares
from peerd.timeline.shares import Shares
from peerd.timeline.spans import SpanKind
from scripts.benchmarks._averaging import observed_in
from scripts.benchmarks._namespaces import Network
from scripts.benchmarks._report import SCHEMA, paired_ratio, progress
from scripts.benchmarks._switch import Links, Rates, Way, wire_s
from scripts.benchmarks._turns import Peers

NUM_STAGES, PER_STAGE = 3, 2
NUM_PEERS = NUM_STAGES * PER_STAGE
STAND_IN_MS = 60.0
FILL_SHARE = 0.05
SETTLING = 2
"""Steps after a change of the links that do not count: the one under way, and one in which codecs and window follow."""
POLL_S, SILENCE_S = 0.5, 600.0
UNLIMITED = Links(mbit_per_s=0, round_trip_ms=0)
SLOW_START = Links(mbit_per_s=20, round_trip_ms=20)
"""While the daemons start. If the tunnel was measured to be fast, a direct path that becomes slow is left for it (`direct_path.py`)."""
LEAST_RATIO, MOST_WIRE = 0.88, 0.08


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkScenario:
    """The links of all peers. Where there are fewer values than peers, they repeat."""

    name: str
    up_mbit: tuple[float, ...] = (20.0,)
    down_mbit: tuple[float, ...] = (100.0,)
    one_way_ms: tuple[float, ...] = (30.0,)
    """The delay of packets from each peer to any other."""
    loss: float = 0.0
    jitter_ms: float = 0.0
    is_judged: bool = True
    """Whether `LEAST_RATIO` and `MOST_WIRE` have to hold: they cannot where a link does not carry even the smallest codec."""

    def stretched(self, times: float) -> LinkScenario:
        """The links on which everything takes so many times as long."""
        up, down = (tuple(rate / times for rate in rates) for rates in (self.up_mbit, self.down_mbit))
        delays = tuple(delay * times for delay in self.one_way_ms)
        return replace(self, up_mbit=up, down_mbit=down, one_way_ms=delays, jitter_ms=self.jitter_ms * times)

    def links(self, addresses: Sequence[str]) -> Links:
        rates = {address: Rates(up=_of(self.up_mbit, peer), down=_of(self.down_mbit, peer)) for peer, address in enumerate(addresses)}
        ways = [
            Way(origin=origin, target=target, delay_ms=_of(self.one_way_ms, peer), loss=self.loss, jitter_ms=self.jitter_ms)
            for peer, origin in enumerate(addresses)
            for target in addresses
            if target != origin
        ]
        return Links(mbit_per_s=0, round_trip_ms=2 * max(self.one_way_ms), rates=rates, ways=ways)

    def exchange_s(self, num_bytes: int) -> float:
        """The least time of a round of two peers: each sends half a sum and half a part, and hears back."""
        return wire_s(num_bytes, min(min(self.up_mbit), min(self.down_mbit))) + 2 * max(self.one_way_ms) / 1000

    def microbatches(self, boundary_bytes: int) -> int:
        """The least number a step of which filling and emptying the pipeline takes at most `FILL_SHARE`, a multiple of the peers.

        The last stage begins when the first microbatch has passed the stages and boundaries before it, and the first stage ends when the
        last gradient has come back through as many.
        """
        slowest = min(min(self.up_mbit), min(self.down_mbit))
        hop_s = max(self.one_way_ms) / 1000 + wire_s(boundary_bytes, slowest)
        fill_s = (NUM_STAGES - 1) * (STAND_IN_MS / 1000 + 2 * hop_s)
        least = fill_s / FILL_SHARE * PER_STAGE / (STAND_IN_MS / 1000)
        return NUM_PEERS * math.ceil(least / NUM_PEERS)


def gradient_bytes() -> int:
    """Of the largest stage."""
    manifest = manifest_of("none", 1)
    specs = [initial_parameter_spec(manifest, stage).values() for stage in range(NUM_STAGES)]
    return 4 * max(sum(math.prod(shape) for shape in spec) for spec in specs)


def _of(values: Sequence[float], peer: int) -> float:
    return values[peer % len(values)]


LINK_SCENARIOS = (
    LinkScenario(name="even", down_mbit=(20.0,)),
    LinkScenario(name="home"),
    LinkScenario(name="unlike", up_mbit=(20.0, 40.0, 20.0, 10.0, 20.0, 40.0), one_way_ms=(30.0, 10.0, 60.0, 30.0), is_judged=False),
    LinkScenario(name="rough", loss=0.005, jitter_ms=20.0, is_judged=False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    rounds: int
    """Each has one turn over the links and one without limits."""
    steps: int
    """Steps of a turn that count."""
    stretch: float = 1.0
    """How many times as long computing and the links take. A busy machine then has that much more time for what is not stood in for."""


@dataclass(slots=True, kw_only=True)
class Turn:
    """Some steps in a row over the same links."""

    step_s: float
    shares: Shares
    """Of the critical path."""
    codecs: list[str]
    """At each boundary, activations and their gradients."""
    exchange_s: float
    """Median of the peers' times in a round."""


@dataclass(slots=True, kw_only=True)
class Row:
    scenario: str
    codec: str
    """By the manifest."""
    microbatches: int
    seconds: float
    """Median of a step."""
    unlimited_s: float
    ratio: float
    """Median over the rounds of the time without limits by the time over these links."""
    wire: float
    """Share of the critical path."""
    wait: float
    step_end: float
    exchange_ratio: float
    """A round's time over what its bytes and one round trip take. The bytes are few here: it says what a round takes besides."""
    rounds_failed: int = 0
    replayed: int = 0
    codecs: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)


def manifest_of(codec: str, microbatches: int) -> Manifest:
    """Three stages with boundaries of 262,144 bytes, and next to no work."""
    return Manifest(
        name="bench",
        model=ModelConfig(num_layers=NUM_STAGES, d_model=64, num_heads=1, d_ff=64),
        train=TrainConfig(num_stages=NUM_STAGES, microbatches_per_step=microbatches, microbatch_size=32, sequence_length=32),
        compute=ComputeConfig(threads=1, recompute="never"),
        wire=WireConfig(activations=codec, activation_gradients=codec),
        swarm=SwarmConfig(checkpoint_every_steps=0, rebalance_period_s=0.0),
    )


def try_links(scenario: LinkScenario, codec: str, microbatches: int | None, turns: Turns) -> Row:
    boundary_bytes = manifest_of(codec, 1).boundary_bytes
    microbatches = microbatches or scenario.microbatches(boundary_bytes)
    manifest = manifest_of(codec, microbatches)
    limited: list[Turn] = []
    free: list[Turn] = []
    with (
        Network(NUM_PEERS, SLOW_START, offload=not scenario.loss) as network,  # else packets of 64 KB would be lost whole
        Peers(manifest, observed=False, per_stage=PER_STAGE, stand_in_ms=turns.stretch * STAND_IN_MS, place=observed_in(network)) as team,
    ):
        team.start()
        links = scenario.stretched(turns.stretch).links([network.address(peer) for peer in range(NUM_PEERS)])
        for number in range(turns.rounds):
            for found, those in ((limited, links), (free, UNLIMITED)):
                network.change(those)
                found.append(turn(team, turns.steps))
                told = found[-1]
                where = "without limits" if found is free else scenario.name
                progress(
                    f"round {number + 1}  {codec}, {where}: {told.step_s:.2f} s a step, {_told(told.shares)}; {' | '.join(told.codecs)}"
                )
        hitches = team.counters()
    row = row_of(scenario.stretched(turns.stretch), codec, microbatches, limited, free)
    row.rounds_failed, row.replayed = hitches["rounds_failed"], hitches["replayed_microbatches"]
    return row


def turn(team: Peers, num_steps: int) -> Turn:
    """Let the links settle, then watch so many steps."""
    until_step(team, len(team.steps()) + SETTLING)
    traced = team.trace(num_steps)
    first, last = traced["first_step"], traced["last_step"]
    until_step(team, last + 1)
    ends, timelines = [step.time_s for step in team.steps()], timelines_of(traced)
    return Turn(
        step_s=(ends[last] - ends[first - 1]) / num_steps,
        shares=critical_shares(timelines),
        codecs=codecs_of(team.links()),
        exchange_s=statistics.median(
            span.ended_s - span.began_s for each in timelines for span in each.spans if span.kind is SpanKind.AVERAGING
        ),
    )


def until_step(team: Peers, count: int) -> None:
    began_s = time.monotonic()
    while len(team.steps()) < count:
        if time.monotonic() - began_s > SILENCE_S:
            raise TimedOutError(f"not {count} steps within {SILENCE_S:.0f} s")
        time.sleep(POLL_S)


def row_of(scenario: LinkScenario, codec: str, microbatches: int, limited: Sequence[Turn], free: Sequence[Turn]) -> Row:
    row = Row(
        scenario=scenario.name,
        codec=codec,
        microbatches=microbatches,
        seconds=statistics.median(each.step_s for each in limited),
        unlimited_s=statistics.median(each.step_s for each in free),
        ratio=paired_ratio([each.step_s for each in free], [each.step_s for each in limited]),
        wire=statistics.median(each.shares.wire for each in limited),
        wait=statistics.median(each.shares.wait for each in limited),
        step_end=statistics.median(each.shares.step_end for each in limited),
        exchange_ratio=statistics.median(each.exchange_s for each in limited) / scenario.exchange_s(gradient_bytes()),
        codecs=limited[-1].codecs,
    )
    if scenario.is_judged and codec == "auto":
        row.missed += [f"{row.ratio:.3f} of the speed without limits, not {LEAST_RATIO}"] if row.ratio < LEAST_RATIO else []
        row.missed += [f"the wire has {row.wire:.1%} of the critical path, not {MOST_WIRE:.0%}"] if row.wire > MOST_WIRE else []
    return row


def codecs_of(links: Sequence[tuple[int, str, str]]) -> list[str]:
    """How many links use which codec, by the boundary after each stage. `links`: the caller's stage, tensor and codec of each."""
    found = []
    for stage in range(NUM_STAGES - 1):
        for tensor, arrow in (("activations", ">"), ("activation_gradients", "<")):
            counted = Counter(codec for at, which, codec in links if (at, which) == (stage, tensor))
            told = ", ".join(f"{codec} x{count}" for codec, count in counted.most_common())
            found.append(f"{stage}{arrow}{stage + 1} {told or 'fixed'}")
    return found


def _told(shares: Shares) -> str:
    return ", ".join(f"{name} {share:.1%}" for name, share in asdict(shares).items())


def over_links(names: Sequence[str], codecs: Sequence[str], microbatches: int | None, turns: Turns, as_json: bool) -> int:
    """Try each codec over the links of these scenarios, and print a row for each. Returns the exit code."""
    rows = []
    for scenario in (each for each in LINK_SCENARIOS if each.name in names):
        rows += [try_links(scenario, codec, microbatches, turns) for codec in codecs]
    if as_json:
        load = [round(value, 2) for value in os.getloadavg()]
        print(json.dumps({"schema": SCHEMA, "rows": [asdict(row) for row in rows], "turns": asdict(turns), "load": load}))
    else:
        print_table(rows, turns.stretch)
    for row in rows:
        for reason in row.missed:
            print(f"{row.scenario}, {row.codec}: {reason}", file=sys.stderr)
    return 1 if any(row.missed for row in rows) else 0


def print_table(rows: Sequence[Row], stretch: float) -> None:
    slower = f", everything {stretch:g} times as slow" if stretch != 1 else ""
    print(f"{NUM_STAGES} stages of {PER_STAGE} peers, {STAND_IN_MS:g} ms a microbatch{slower}; a stand-in sleeps in place of work")
    columns = "links   codec     microbatches  seconds  unlimited  ratio   wire   wait  step end  exchange ratio  failed  replayed"
    print(f"{columns}  codecs at each boundary")
    for row in rows:
        print(
            f"{row.scenario:<7} {row.codec:<9} {row.microbatches:>12}  {row.seconds:>7.2f}  {row.unlimited_s:>9.2f}  {row.ratio:>5.3f}"
            f"  {row.wire:>5.1%}  {row.wait:>5.1%}  {row.step_end:>8.1%}"
            f"  {row.exchange_ratio:>14.2f}  {row.rounds_failed:>6}  {row.replayed:>8}  {' | '.join(row.codecs)}"
        )
