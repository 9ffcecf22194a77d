"""The rows of `scripts/bench race`: what a run does at its boundaries and in its averages, and how long its steps take on a link.

A row is a manifest at two sizes. Small, it is trained. At home size it is simulated by peerd's own policies, as `peerd simulate run` does.
"""

from __future__ import annotations

import functools
import statistics
from dataclasses import dataclass, replace
from typing import Any, Literal

from peerd.config.codec import LADDER
from peerd.config.manifest import Manifest, ModelConfig, TrainConfig, WireConfig
from peerd.models.stages import model_loads
from peerd.planner.cutting import stage_layers
from peerd.planner.network import PeerSpec, Topology
from peerd.planner.run_costs import run_cost
from peerd.policy.route.compressing import choose_rung
from peerd.sim.network import BYTES_PER_MBIT, Pairs
from peerd.sim.run import simulate_run
from peerd.sim.step_run import RunSettings, microbatch_s

LOCAL_UPDATES = 8
"""Updates that a peer makes by itself between two averages, in rows with local steps."""
NUM_REPLICAS = 2
"""Peers of each stage."""
SIMULATED_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One competitor. Rows with `auto` have other codecs on each link."""

    codec: str = "int8"
    """Of activations and their gradients."""
    averages: str = "int8"
    boundary: Literal["none", "subspace", "token-residual"] = "none"
    narrower: int = 0
    """So many times narrower is that boundary."""
    is_local: bool = False
    optimizer: Literal["adamw", "muon"] = "adamw"

    def model(self, d_model: int, **sizes: Any) -> ModelConfig:
        rank = d_model // self.narrower if self.narrower else 0
        return ModelConfig(d_model=d_model, d_ff=4 * d_model, boundary=self.boundary, boundary_rank=rank, **sizes)

    @property
    def wire(self) -> WireConfig:
        return WireConfig(activations=self.codec, activation_gradients=self.codec, weight_gradients=self.averages)

    @property
    def updates_per_step(self) -> int:
        """A step is what ends with an average."""
        return LOCAL_UPDATES if self.is_local else 1


ROWS = {
    "dense float32": Row(codec="none", averages="none"),
    "int8": Row(),
    "int4": Row(codec="int4"),
    "auto": Row(codec="auto"),
    "subspace 1/4": Row(boundary="subspace", narrower=4),
    "subspace 1/8": Row(boundary="subspace", narrower=8),
    "subspace 1/16": Row(boundary="subspace", narrower=16),
    "residual 1/8": Row(boundary="token-residual", narrower=8),
    "residual 1/16": Row(boundary="token-residual", narrower=16),
    "local steps": Row(is_local=True),
    "local, sparse": Row(is_local=True, averages="sparse:64"),
    "Muon": Row(optimizer="muon"),
    "subspace, local": Row(boundary="subspace", narrower=8, is_local=True, averages="sparse:64"),
    "residual, local": Row(boundary="token-residual", narrower=8, is_local=True, averages="sparse:64"),
    "all": Row(boundary="subspace", narrower=8, is_local=True, averages="sparse:64", optimizer="muon"),
}
"""Each differs from `int8` in one thing, the last ones in several."""


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

    def manifest(self, row: Row) -> Manifest:
        train = TrainConfig(
            num_stages=self.stages,
            microbatches_per_step=self.microbatches * row.updates_per_step,
            microbatch_size=1,
            sequence_length=self.sequence_length,
            optimizer=row.optimizer,
            local_batch=self.microbatches // NUM_REPLICAS if row.is_local else 0,
        )
        model = row.model(self.d_model, num_layers=self.layers, num_heads=16, vocab_size=32768)
        return Manifest(model=model, train=train, wire=row.wire)

    def on(self, row: Row, link: Link) -> Row:
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
def update_s(size: HomeSize, row: Row, link: Link) -> float:
    """Seconds of an update: of a step without local steps, or its share of a step with them."""
    row = size.on(row, link)
    manifest = size.manifest(row)
    loads = model_loads(manifest)
    cost = run_cost(manifest, loads, stage_layers(manifest, loads))
    number = size.stages * NUM_REPLICAS
    rate, delay_s = link.bytes_per_s, link.round_trip_ms / 2000
    peers = tuple(PeerSpec(name=f"p{each}", flops=size.flops, up=rate, down=rate) for each in range(number))
    delays = tuple(tuple(0.0 if one == other else delay_s for other in range(number)) for one in range(number))
    links = Pairs(Topology(peers, delays, ((rate,) * number,) * number))
    members = tuple(tuple(range(stage * NUM_REPLICAS, (stage + 1) * NUM_REPLICAS)) for stage in range(size.stages))
    settings = RunSettings(num_steps=SIMULATED_STEPS, slots=manifest.slots, microbatch_size=1, noise=0.0)
    found = simulate_run(cost, links, members, settings)
    return statistics.median(found.step_s[1:]) / row.updates_per_step
