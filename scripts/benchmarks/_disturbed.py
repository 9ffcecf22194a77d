"""A run on simulated links that is disturbed in the middle: its speed, its longest pause, and whether its steps equal the reference."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from peerd.cli.demo_daemons import DemoSwarm, Placement
from peerd.cli.demo_plan import DemoPlan
from peerd.config.manifest import ComputeConfig, Manifest, ModelConfig, SwarmConfig, TrainConfig
from peerd.errors import TimedOutError
from scripts.benchmarks._equality import apart, losses_of, peerd
from scripts.benchmarks._namespaces import Network
from scripts.benchmarks._report import Row, print_table
from scripts.benchmarks._swarms import looks
from scripts.benchmarks._switch import Links

SOUND = Links(mbit_per_s=100, round_trip_ms=10)
NUM_STAGES, POLL_S = 2, 0.5
PARAMETERS_APART = 1e-6
"""Sums in float64 do not depend on their order, but for their last bit."""
MUST_BE_0 = ("duplicate_microbatches", "lost_microbatches", "inexact_steps", "internal_errors")
READY_S = 120.0


@dataclass(slots=True, kw_only=True)
class Outcome:
    name: str
    before: float
    """Steps a second."""
    meanwhile: float
    afterwards: float
    usual_s: float
    """Longest time without the end of a step, before the disturbance."""
    longest_s: float
    """The same from then on."""
    suspicions: int
    """How often some peer suspected another from then on."""
    health: str
    wrong: dict[str, int]
    unlike: str = ""
    """How the steps differ from the reference; empty: they are equal."""

    @property
    def missed(self) -> list[str]:
        """What does not hold, although it must in any run."""
        counts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in self.wrong.items() if count)
        return [f"{self.name}: {problem}" for problem in (self.unlike, counts) if problem]

    def print(self) -> None:
        rates = {"before": self.before, "meanwhile": self.meanwhile, "afterwards": self.afterwards}
        rows = [Row(name=name, median=rate, ratio=rate / self.before, baseline="before") for name, rate in rates.items()]
        print_table(self.name, "steps/s", rows)
        print(f"longest time without a step {self.longest_s:.1f} s ({self.usual_s:.1f} s before), {self.suspicions} suspicions")
        print(f"health meanwhile: {self.health or 'ok'}; {self.unlike or 'all steps equal the reference'}", flush=True)


TINY = ModelConfig(num_layers=NUM_STAGES, d_model=64, num_heads=2, d_ff=128)
"""A layer for each stage, and next to no work."""


def run_of(model: ModelConfig, **train: Any) -> Manifest:
    """A run in which no order of the sums changes a step."""
    settings: dict[str, Any] = {"microbatches_per_step": 12, "microbatch_size": 1, "sequence_length": 32, "accumulate": "float64"}
    return Manifest(
        name="bench",
        model=model,
        train=TrainConfig(**{**settings, "num_stages": NUM_STAGES, "steps": 1_000_000, **train}),
        compute=ComputeConfig(threads=1),
        swarm=SwarmConfig(announce_period_s=1.0, rebalance_period_s=0.0, checkpoint_every_steps=0),
    )


@dataclass(slots=True, kw_only=True)
class Disturbed:
    """A swarm of `mates` peers in each of two stages, on machines of their own. Peers take the stages in turn."""

    name: str
    mates: int
    manifest: Manifest = field(default_factory=lambda: run_of(TINY))
    stand_in_ms: float = 40.0
    """Time of a microbatch in a stage."""
    links: Links = SOUND
    more_machines: int = 0
    behind_routers: tuple[int, ...] = ()
    host: str = ""
    """The host that all daemons listen on; empty: each on its own address."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    swarm: DemoSwarm = field(init=False)
    network: Network = field(init=False)

    def run(self, seconds: float, disturb: Callable[[], None], mend: Callable[[], None]) -> Outcome:
        """Watch the run before, then for `seconds` disturbed, then mended."""
        num_peers = self.mates * NUM_STAGES
        alone: dict[str, Any] = {"slow": {}, "kills": (), "chaos": None, "observed": False}
        plan = DemoPlan(manifest=self.manifest, num_peers=num_peers, stand_in_ms=self.stand_in_ms, **alone)
        with (
            Network(num_peers + self.more_machines, self.links, behind_routers=self.behind_routers) as self.network,
            DemoSwarm(plan, lambda _text: None, place=self._place) as self.swarm,
        ):
            self.swarm.start()
            self.until(lambda: all(daemon.serves for daemon in self.swarm.daemons), "all serve")
            self._watch(seconds / 6)
            before, usual_s = self._watch(seconds / 2)
            suspicions = self._total("faults_seen")
            disturb()
            meanwhile, longest_s = self._watch(seconds)
            health = {item["code"] for daemon in self.swarm.daemons if daemon.status is not None for item in daemon.status["health"]}
            mend()
            afterwards, _ = self._watch(seconds / 2)
            return Outcome(
                name=self.name,
                before=before,
                meanwhile=meanwhile,
                afterwards=afterwards,
                usual_s=usual_s,
                longest_s=longest_s,
                suspicions=self._total("faults_seen") - suspicions,
                health=", ".join(sorted(health)),
                wrong={name: self._total(name) for name in MUST_BE_0},
                unlike=unlike_reference(self.swarm),
            )

    def until(self, holds: Callable[[], bool], what: str) -> None:
        began_s = time.monotonic()
        for _ in looks(self.swarm, POLL_S):
            if holds():
                return
            if time.monotonic() - began_s > READY_S:
                raise TimedOutError(f"not within {READY_S:.0f} s: {what}")

    def _place(self, peer: int) -> Placement:
        return Placement(command=self.network.command(peer), host=self.host or self.network.address(peer), settings=self.settings)

    def _total(self, counter: str) -> int:
        told = [dict(daemon.status["counters"]) for daemon in self.swarm.daemons if daemon.status is not None]
        return sum(int(each[counter]) for each in told)  # type: ignore[call-overload]

    def _watch(self, seconds: float) -> tuple[float, float]:
        """Return the steps a second, and the longest time without the end of one."""
        swarm, began_s = self.swarm, time.time()
        for _ in looks(swarm, POLL_S):
            if time.time() - began_s >= seconds:
                break
        ended_s = time.time()
        ends_s = [step["time_s"] for step in swarm.steps if began_s < step["time_s"] < ended_s]
        longest_s = max(later - earlier for earlier, later in itertools.pairwise([began_s, *sorted(ends_s), ended_s]))
        return len(ends_s) / (ended_s - began_s), longest_s


def unlike_reference(swarm: DemoSwarm) -> str:
    """Export the run, and compare losses and parameters with those of one process. Returns the difference; empty if there is none."""
    losses, differ = far_from_reference(swarm, apart)
    if losses:
        return losses
    return f"parameters are {differ:.1e} apart from the reference" if differ > PARAMETERS_APART else ""


def largest_difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max())


@dataclass(frozen=True, slots=True)
class Compared:
    """A run beside the same run in one process."""

    losses: tuple[float, ...]
    """Of all steps."""
    expected: tuple[float, ...]
    """The same of the one process."""
    differ: float
    """The largest distance of a parameter."""

    def losses_apart(self, num_last: int) -> float:
        """How far the mean loss of the last steps is from that of the one process, relative to it."""
        ours, theirs = (sum(each[-num_last:]) for each in (self.losses, self.expected))
        return abs(ours / theirs - 1)


def beside_reference(swarm: DemoSwarm, distance: Callable[[Tensor, Tensor], float]) -> Compared:
    """Export the run, and compute it in one process."""
    with tempfile.TemporaryDirectory(prefix="peerd-bench-") as folder:
        ours, theirs = Path(folder) / "swarm", Path(folder) / "reference"
        swarm.export(ours)
        losses = losses_of(ours)
        peerd("reference", ours / "run.toml", "--steps", len(losses), "--out", theirs)
        found, expected = (load_file(each / "model.safetensors") for each in (ours, theirs))
        return Compared(losses, losses_of(theirs), max(distance(found[name], value) for name, value in expected.items()))


def far_from_reference(swarm: DemoSwarm, distance: Callable[[Tensor, Tensor], float], losses_apart: float = 0.0) -> tuple[str, float]:
    """Export the run. Returns how its losses differ from those of one process by more than `losses_apart` (empty: they do not), and the
    largest `distance`.
    """
    found = beside_reference(swarm, distance)
    alike = all(abs(one - other) <= losses_apart for one, other in zip(found.losses, found.expected, strict=True))
    return "" if alike else f"the losses of {len(found.losses)} steps are not those of the reference", found.differ
