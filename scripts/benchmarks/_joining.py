"""A peer joins a stage of some donors over home links: how long its download takes, and what the donors still train meanwhile.

After some steps one more peer joins. Its download is timed from the first megabyte until it has 99 % of the state without the previous
parameters; one donor would take at least as long as these bytes take on its uplink. The donors' speed is that of the steps in which the
download took place, beside the median of the steps before.

In `idle` the donors send next to nothing but averages. In `busy` training itself fills more than half of each uplink: activations for a
second stage, and averages. There the bar is the donors' speed alone.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from peerd.cli.demo_daemons import DemoSwarm
from peerd.cli.demo_plan import DemoPlan
from peerd.config.manifest import ComputeConfig, Manifest, ModelConfig, SwarmConfig, TrainConfig, WireConfig
from peerd.models.stages import initial_parameter_spec
from scripts.benchmarks._namespaces import Network
from scripts.benchmarks._report import SCHEMA, progress
from scripts.benchmarks._swarms import until_holds
from scripts.benchmarks._switch import Links, Rates
from scripts.benchmarks._turns import place_in

DONORS = 3
DOWN_MBIT, ROUND_TRIP_MS = 100.0, 60.0
FAST = Links(mbit_per_s=0, round_trip_ms=1)
"""While the donors start."""
BYTES_A_PARAMETER = 12
MICROBATCHES = 24
STEPS_BEFORE = 3
LOOK_S, SILENCE_S, PATIENCE_S = 0.25, 5.0, 400.0
FIRST_BYTES, NEARLY_ALL = 1e6, 0.99
MOST_OF_ONE, LEAST_SPEED = 0.4, 0.85


class _Plan(DemoPlan):
    def stage_of(self, peer: int) -> int:
        """The donors serve stage 0, and the peers after them one other stage each."""
        return max(0, peer - DONORS + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    name: str
    up_mbit: float
    stand_in_ms: float
    """A donor's, for a microbatch."""
    manifest: Manifest

    @property
    def num_bytes(self) -> int:
        """Of the state of stage 0, without the previous parameters."""
        return BYTES_A_PARAMETER * sum(math.prod(shape) for shape in initial_parameter_spec(self.manifest, 0).values())

    @property
    def peers(self) -> int:
        """The donors of stage 0, and one peer for each other stage."""
        return DONORS + self.manifest.train.num_stages - 1

    @property
    def plan(self) -> DemoPlan:
        """A peer alone in its stage works as fast as the donors together."""
        slow, stand_in_ms = dict.fromkeys(range(DONORS), float(DONORS)), self.stand_in_ms / DONORS
        return _Plan(manifest=self.manifest, num_peers=self.peers, slow=slow, kills=(), chaos=None, stand_in_ms=stand_in_ms, observed=False)

    def links(self, network: Network) -> Links:
        """Home links for the donors and the joiner; the other stages have lines without limits."""
        at_home = [*range(DONORS), self.peers]
        rates = {network.address(number): Rates(up=self.up_mbit, down=DOWN_MBIT) for number in at_home}
        return Links(mbit_per_s=0, round_trip_ms=ROUND_TRIP_MS, rates=rates)


@dataclass(slots=True, kw_only=True)
class Row:
    name: str
    state_megabytes: float
    download_s: float
    of_one_donor: float
    """The time of the download by the time that these bytes take on one donor's uplink."""
    serves_s: float
    """From the start of the joiner's daemon until it serves."""
    donors_speed: float
    """Speed of the donors in the steps of the download, by that before."""
    reloads: int
    missed: list[str] = field(default_factory=list)


def _manifest(num_stages: int, model: ModelConfig, size: int, length: int) -> Manifest:
    return Manifest(
        name="bench",
        model=model,
        train=TrainConfig(
            num_stages=num_stages, microbatches_per_step=MICROBATCHES, microbatch_size=size, sequence_length=length, steps=1_000_000
        ),
        compute=ComputeConfig(threads=1),
        wire=WireConfig(weight_gradients="int8"),
        swarm=SwarmConfig(rebalance_period_s=0.0, checkpoint_every_steps=0),
    )


IDLE_ROWS = round(100e6 / BYTES_A_PARAMETER / (2 * 64))
SCENARIOS = (
    Scenario(  # next to no work, and a state of 100 MB, nearly all of it of the two embeddings
        name="idle",
        up_mbit=20.0,
        stand_in_ms=3000.0,
        manifest=_manifest(1, ModelConfig(num_layers=1, d_model=64, num_heads=2, d_ff=64, vocab_size=IDLE_ROWS), 1, 8),
    ),
    Scenario(  # a microbatch has activations of 262 KB, and a state 22 MB
        name="busy",
        up_mbit=5.0,
        stand_in_ms=1000.0,
        manifest=_manifest(2, ModelConfig(num_layers=2, d_model=512, num_heads=2, d_ff=512), 4, 32),
    ),
)


class Joining:
    """The donors, and the peer that joins them."""

    def __init__(self, swarm: DemoSwarm, scenario: Scenario) -> None:
        self._swarm = swarm
        self._scenario = scenario
        self._num_bytes = scenario.num_bytes

    def until(self, holds: Callable[[], bool], what: str) -> float:
        """Look until this holds. Returns the time at which it did."""
        return until_holds(self._swarm, holds, what, PATIENCE_S, LOOK_S)

    def ends(self) -> list[float]:
        """When each step ended."""
        return [time.monotonic() - time.time() + step["time_s"] for step in self._swarm.steps]

    def counters(self) -> dict[str, Any]:
        told: dict[str, Any] = self._swarm.daemons[-1].client.request("status", silence_s=SILENCE_S)["counters"]
        return told

    def join(self) -> Row:
        first = self._swarm.daemons[0].ready
        assert first is not None
        started_s = time.monotonic()
        self._swarm.spawn_another(0, first.join)
        joiner = self._swarm.daemons[-1]
        self.until(lambda: joiner.ready is not None, "the joiner can be reached")
        began_s = self.until(lambda: self.counters()["bytes_received"] > FIRST_BYTES, "the download begins")
        ended_s = self.until(lambda: self.counters()["bytes_received"] > NEARLY_ALL * self._num_bytes, "the download ends")
        progress(f"downloaded {self._num_bytes / 1e6:.0f} MB in {ended_s - began_s:.1f} s")
        served_s = self.until(lambda: joiner.serves, "the joiner serves")
        num_steps = len(self._swarm.steps)
        self.until(lambda: len(self._swarm.steps) > num_steps, "the step of the download ends")
        one_s = 8 * self._num_bytes / self._scenario.up_mbit / 1e6
        return Row(
            name=self._scenario.name,
            state_megabytes=self._num_bytes / 1e6,
            download_s=ended_s - began_s,
            of_one_donor=(ended_s - began_s) / one_s,
            serves_s=served_s - started_s,
            donors_speed=self._speed(began_s, ended_s),
            reloads=int(self.counters()["reloads"]) - 1,
        )

    def _speed(self, began_s: float, ended_s: float) -> float:
        ends = self.ends()
        steps = list(itertools.pairwise(ends))
        before = [end - begin for begin, end in steps if end < began_s][-STEPS_BEFORE:]
        meanwhile = [end - begin for begin, end in steps if begin < ended_s and end > began_s]
        progress(f"steps before: {[round(each, 1) for each in before]}, meanwhile: {[round(each, 1) for each in meanwhile]}")
        return statistics.median(before) / statistics.mean(meanwhile)


def measure(scenario: Scenario) -> Row:
    with Network(scenario.peers + 1, FAST) as network, DemoSwarm(scenario.plan, lambda _text: None, place=place_in(network)) as swarm:
        swarm.start()
        joining = Joining(swarm, scenario)
        joining.until(lambda: all(daemon.serves for daemon in swarm.daemons), "all donors serve")
        network.change(scenario.links(network))
        num_steps = len(swarm.steps)
        joining.until(lambda: len(swarm.steps) >= num_steps + STEPS_BEFORE + 2, "some steps end")
        row = joining.join()
    if scenario.name == "idle" and row.of_one_donor > MOST_OF_ONE:
        row.missed.append(f"{row.name}: the download took {row.of_one_donor:.2f} of that from one donor, not {MOST_OF_ONE}")
    if row.donors_speed < LEAST_SPEED:
        row.missed.append(f"{row.name}: the donors had {row.donors_speed:.2f} of their speed, not {LEAST_SPEED}")
    return row


def joining(as_json: bool) -> int:
    """Measure each scenario once and print the figures. Returns the exit code."""
    rows = [measure(scenario) for scenario in SCENARIOS]
    if as_json:
        print(json.dumps({"schema": SCHEMA, "rows": [asdict(row) for row in rows]}))
    else:
        print(f"{DONORS} donors with 20 Mbit/s up, or 5 where they are busy, a joiner with {DOWN_MBIT:g} down, {ROUND_TRIP_MS:g} ms")
        for field_name in (name for name in asdict(rows[0]) if name != "missed"):
            told = [getattr(row, field_name) for row in rows]
            print(f"{field_name:>16}", *(f"{value:>8.2f}" if isinstance(value, float) else f"{value:>8}" for value in told))
        for reason in (reason for row in rows for reason in row.missed):
            print(reason, file=sys.stderr)
    return int(any(row.missed for row in rows))
