"""The rows of `scripts/bench race`: what a run does at its boundaries and in its averages, and how long its steps take on a link.

A row is a manifest at two sizes. Small, it is trained. At home size it is simulated by peerd's own policies, as `peerd simulate run` does.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from peerd.config.codec import LADDER
from peerd.config.manifest import Manifest, ModelConfig, TrainConfig
from peerd.models.stages import model_loads
from peerd.planner.contenders import NUM_REPLICAS, Contender
from peerd.planner.cutting import stage_layers
from peerd.planner.network import PeerSpec
from peerd.planner.run_costs import run_cost
from peerd.policy.route.compressing import choose_rung
from peerd.sim.home_lines import HomePeers, pace_of
from peerd.sim.network import BYTES_PER_MBIT
from peerd.sim.step_run import microbatch_s


@dataclass(frozen=True, slots=True)
class Link:
    mbit_per_s: float
    """Each way, of every peer."""
    round_trip_ms: float

    @property
    def name(self) -> str:
        return f"{self.mbit_per_s:g} Mbit/s, {self.round_trip_ms:g} ms"

    @property
    def bytes_per_s(self) -> float:
        return self.mbit_per_s * BYTES_PER_MBIT


LINKS = (Link(200, 50), Link(100, 50), Link(20, 60))
BETWEEN = Link(50, 55)
"""A line for which no row was picked out by looking."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HomeSize:
    """The run whose time is simulated: stages of some 130 million parameters, one home GPU for each peer."""

    d_model: int = 2048
    layers: int = 16
    stages: int = 8
    sequence_length: int = 1024
    microbatches: int = 32
    """Of each update, of all peers of a stage together."""
    flops: float = 2e13
    """Of a device, as it is reached in practice."""

    @property
    def run(self) -> Manifest:
        """The run before a row changes it."""
        train = TrainConfig(
            num_stages=self.stages, microbatches_per_step=self.microbatches, microbatch_size=1, sequence_length=self.sequence_length
        )
        model = ModelConfig(d_model=self.d_model, d_ff=4 * self.d_model, num_layers=self.layers, num_heads=16, vocab_size=32768)
        return Manifest(model=model, train=train)

    def manifest(self, row: Contender) -> Manifest:
        return row.applied(self.run)

    def on(self, row: Contender, link: Link) -> Contender:
        """The row with the codec that `auto` takes on this link.

        A peer in the middle sends an activation and a gradient for each microbatch over one line; both may take as long as it computes.
        """
        if row.codec != "auto":
            return row
        manifest = self.manifest(replace(row, codec="none"))
        loads = model_loads(manifest)
        cost = run_cost(manifest, loads, stage_layers(manifest, loads))
        sizes = [codec.num_bytes(manifest.boundary_bytes // 4) for codec in LADDER]
        pace_s = microbatch_s(cost, 1, PeerSpec(name="", flops=self.flops)) / 2
        rung = choose_rung(sizes, link.bytes_per_s, pace_s).rung
        return replace(row, codec=str(LADDER[rung]))


@functools.lru_cache(maxsize=256)
def update_s(size: HomeSize, row: Contender, link: Link) -> float:
    """Seconds of an update: of a step without local steps, or its share of a step with them."""
    row = size.on(row, link)
    return step_s(size.manifest(row), size.flops, link) / row.updates_per_step


def step_s(manifest: Manifest, flops: float, link: Link, num_replicas: int = NUM_REPLICAS) -> float:
    """Seconds of a step of a run whose stages have so many peers, with devices of so many FLOP/s."""
    loads = model_loads(manifest)
    cost = run_cost(manifest, loads, stage_layers(manifest, loads))
    peers = HomePeers(bytes_per_s=link.bytes_per_s, round_trip_s=link.round_trip_ms / 1000, flops=flops, num_replicas=num_replicas)
    return pace_of(cost, peers).step_s
