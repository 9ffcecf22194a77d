"""The bytes that each role of a swarm moves, beside those of a pipeline in which every tensor goes through the trainer.

Real daemons on loopback count their RPC payload. The first table shows one microbatch by role. Sent: activations with their labels,
gradients with the records that travel with them, and all headers. Received: the size of the neighbours' tensors. The second table shows
one step by peer: all bytes sent and received, including averaging, gossip and tokens. The trainer-mediated flow is computed, in the second
table for the microbatches of each peer: its trainer sends a stage the inputs, both forward and backward, and the gradient, and receives
the outputs and the gradient of the inputs. For a middle stage these are 5 boundaries, where a swarm needs 2 x 2 (each sent once and
received once). The mediated flow does not average, so only the boundaries can be compared.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass

from peerd.cli.demo_daemons import DemoSwarm
from peerd.cli.demo_plan import DemoPlan
from peerd.config.codec import parse_codec
from peerd.config.manifest import ComputeConfig, Manifest, ModelConfig, SwarmConfig, TrainConfig, WireConfig
from peerd.control.protocol import Counters
from peerd.errors import TimedOutError
from scripts.benchmarks._report import SCHEMA, progress, run
from scripts.benchmarks._swarms import looks

POLL_S = 0.25
LONG_ENOUGH_S = 10.0
"""Time between announcements. No peer dies here, so a slow peer must not count as dead; lost announcements are still repeated."""
TRIES = 3
HITCHES = ("replayed_microbatches", "suppressed_microbatches", "ledger_resets")
CODECS = ("none", "int8")
TOLERANCE = 0.05
"""Allowed overhead over tensors and labels, for headers and records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    num_stages: int
    peers_per_stage: int
    steps: int
    d_model: int
    as_json: bool

    def manifest(self, codec: str) -> Manifest:
        return Manifest(
            name="bench",
            model=ModelConfig(num_layers=self.num_stages, d_model=self.d_model, num_heads=1, d_ff=self.d_model),
            train=TrainConfig(num_stages=self.num_stages, microbatch_size=4, sequence_length=128, steps=self.steps),
            compute=ComputeConfig(threads=1),
            wire=WireConfig(activations=codec, activation_gradients=codec, weight_gradients=codec),
            swarm=SwarmConfig(announce_period_s=LONG_ENOUGH_S, checkpoint_every_steps=0, rebalance_period_s=0.0),
        )

    def roles(self) -> list[tuple[str, range]]:
        """The stages of each role."""
        last = self.num_stages - 1
        return [("first", range(1)), ("middle", range(1, last)), ("last", range(last, last + 1))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One role in both flows: bytes over the boundary per microbatch, for all peers of a stage together."""

    codec: str
    role: str
    sent: float
    received: float
    mediated_sent: float
    mediated_received: float
    rest_per_step: float
    """Bytes of averaging, gossip and tokens that one peer sends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLine:
    """One peer in both flows: bytes of one step."""

    codec: str
    peer: int
    role: str
    microbatches: float
    """Microbatches of a step that the peer computed."""
    sent: float
    received: float
    rest: float
    """The part of `sent` that is averaging, gossip and tokens."""
    mediated_sent: float
    mediated_received: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """One daemon's counters at the end of the run."""

    stage: int
    counters: Counters


def tensor_bytes(manifest: Manifest) -> tuple[int, int, int]:
    """Bytes of a microbatch's activations, of their gradient, and of its labels (tokens take as many)."""
    values = manifest.boundary_bytes // 4
    forth, back = (parse_codec(name).num_bytes(values) for name in (manifest.wire.activations, manifest.wire.activation_gradients))
    return forth, back, 4 * manifest.tokens_per_microbatch


def mediated(manifest: Manifest, role: str) -> tuple[int, int]:
    """Bytes that a peer of this role sends and receives in the mediated flow."""
    forth, back, labels = tensor_bytes(manifest)
    match role:
        case "first":
            return forth, 2 * labels + back
        case "middle":
            return forth + back, 2 * forth + back
        case _:
            return back, 2 * (forth + labels)


def count(plan: Plan, codec: str) -> list[Counted]:
    """The counters of a run in which no work was repeated: wasted bytes do not characterise the algorithm."""
    for _ in range(TRIES):
        counted = run_once(plan, codec)
        again = {name: sum(dict(each.counters)[name] for each in counted) for name in HITCHES}  # type: ignore[misc]
        if not any(again.values()):
            progress(f"{codec}: counted")
            return counted
        progress(f"{codec}: once more, for {', '.join(f'{number} {name}' for name, number in again.items() if number)}")
    raise TimedOutError(f"something was done twice in each of {TRIES} runs: the machine is too busy", "try again when it has less to do")


def run_once(plan: Plan, codec: str) -> list[Counted]:
    """Run a swarm to its end."""
    manifest = plan.manifest(codec)
    num_peers = plan.num_stages * plan.peers_per_stage
    demo = DemoPlan(manifest=manifest, num_peers=num_peers, slow={}, kills=(), chaos=None, stand_in_ms=0.0, observed=False)
    with DemoSwarm(demo, lambda _text: None) as swarm:
        swarm.start()
        for _ in looks(swarm, POLL_S):
            if swarm.finished:
                break
        swarm.poll()
        return [Counted(stage=daemon.stage, counters=daemon.status["counters"]) for daemon in swarm.daemons if daemon.status is not None]


def by_role(plan: Plan, codec: str, counted: list[Counted]) -> list[Line]:
    manifest = plan.manifest(codec)
    microbatches = plan.steps * manifest.train.microbatches_per_step
    boundary, rest = [0.0] * plan.num_stages, [0.0] * plan.num_stages
    for each in counted:
        boundary[each.stage] += each.counters["boundary_bytes"] / microbatches
        rest[each.stage] += rest_of(each.counters) / plan.peers_per_stage / plan.steps
    forth, back, labels = tensor_bytes(manifest)
    lines = []
    for role, stages in plan.roles():
        if not stages:
            continue
        sent = sum(boundary[stage] for stage in stages) / len(stages)
        received = (role != "first") * (forth + labels) + (role != "last") * back
        theirs = mediated(manifest, role)
        lines.append(
            Line(
                codec=codec,
                role=role,
                sent=sent,
                received=received,
                mediated_sent=theirs[0],
                mediated_received=theirs[1],
                rest_per_step=sum(rest[stage] for stage in stages) / len(stages),
            )
        )
    through = [mediated(manifest, role) for role, stages in plan.roles() for _ in stages]
    lines.append(
        Line(
            codec=codec,
            role="trainer",
            sent=2 * labels,
            received=0.0,
            mediated_sent=sum(received for _, received in through),
            mediated_received=sum(sent for sent, _ in through),
            rest_per_step=0.0,
        )
    )
    return lines


def by_peer(plan: Plan, codec: str, counted: list[Counted]) -> list[PeerLine]:
    manifest = plan.manifest(codec)
    role_of = {stage: role for role, stages in plan.roles() for stage in stages}
    lines = []
    for peer, each in enumerate(counted):
        role, done = role_of[each.stage], each.counters["accumulated_microbatches"] / plan.steps
        theirs = mediated(manifest, role)
        lines.append(
            PeerLine(
                codec=codec,
                peer=peer,
                role=role,
                microbatches=done,
                sent=each.counters["bytes_sent"] / plan.steps,
                received=each.counters["bytes_received"] / plan.steps,
                rest=rest_of(each.counters) / plan.steps,
                mediated_sent=theirs[0] * done,
                mediated_received=theirs[1] * done,
            )
        )
    return lines


def rest_of(counters: Counters) -> int:
    """Bytes sent other than over a boundary."""
    return counters["bytes_sent"] - counters["boundary_bytes"]


def wrong(plan: Plan, lines: list[Line]) -> list[str]:
    """Messages about roles that sent more or less than their tensors take."""
    missed = []
    for line in lines:
        if line.role == "trainer":
            continue
        forth, back, labels = tensor_bytes(plan.manifest(line.codec))
        expected = (line.role != "last") * (forth + labels) + (line.role != "first") * back
        if not expected <= line.sent <= (1 + TOLERANCE) * expected:
            missed.append(f"{line.codec}, {line.role}: {line.sent:,.0f} bytes a microbatch where its tensors take {expected:,.0f}")
    return missed


def report(plan: Plan, lines: list[Line], peers: list[PeerLine]) -> None:
    if plan.as_json:
        print(json.dumps({"schema": SCHEMA, "rows": [asdict(line) for line in lines], "peers": [asdict(line) for line in peers]}))
        return
    manifest = plan.manifest("none")
    raw = f"a boundary is {manifest.boundary_bytes / 1e3:,.0f} kB raw"
    print(f"{plan.num_stages} stages of {plan.peers_per_stage} peers, width {plan.d_model}; {raw}")
    print(f"{'':<16} {'kB a microbatch':>19} {'through the trainer':>21} {'times':>6} {'kB a step':>10}")
    print(f"{'codec   role':<16} {'sent':>9} {'received':>9} {'sent':>11} {'received':>9} {'':>6} {'and peer':>10}")
    for line in lines:
        times = (line.mediated_sent + line.mediated_received) / (line.sent + line.received)
        print(
            f"{line.codec:<7} {line.role:<8} {line.sent / 1e3:>9,.1f} {line.received / 1e3:>9,.1f} {line.mediated_sent / 1e3:>11,.1f}"
            f" {line.mediated_received / 1e3:>9,.1f} {times:>5.1f}x {line.rest_per_step / 1e3:>10,.1f}"
        )
    print("a step's: averaging, gossip and tokens, sent by one peer")
    print()
    print(f"{'':<21} {'micro-':>7} {'kB a step':>30} {'through the trainer':>21}")
    print(f"{'codec   peer role':<21} {'batches':>7} {'sent':>10} {'of it rest':>10} {'received':>10} {'sent':>11} {'received':>9}")
    for each in peers:
        print(
            f"{each.codec:<7} {each.peer:>4} {each.role:<8} {each.microbatches:>7.1f} {each.sent / 1e3:>10,.1f} {each.rest / 1e3:>10,.1f}"
            f" {each.received / 1e3:>10,.1f} {each.mediated_sent / 1e3:>11,.1f} {each.mediated_received / 1e3:>9,.1f}"
        )


def parse() -> Plan:
    parser = argparse.ArgumentParser(prog="scripts/bench traffic", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--stages", type=int, choices=[2, 3, 4], default=3, help="stages (default 3)")
    parser.add_argument("--peers", type=int, choices=[1, 2, 3], default=2, help="peers of each stage (default 2)")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="steps counted (default 5)")
    parser.add_argument("--d-model", type=int, default=128, metavar="N", help="width, a multiple of 2 (default 128)")
    given = parser.parse_args()
    if given.steps < 1 or given.d_model < 2 or given.d_model % 2:
        parser.error("--steps must be at least 1 and --d-model a multiple of 2")
    return Plan(num_stages=given.stages, peers_per_stage=given.peers, steps=given.steps, d_model=given.d_model, as_json=given.json)


def main() -> int:
    plan = parse()
    counted = {codec: count(plan, codec) for codec in CODECS}
    lines = [line for codec in CODECS for line in by_role(plan, codec, counted[codec])]
    report(plan, lines, [line for codec in CODECS for line in by_peer(plan, codec, counted[codec])])
    missed = wrong(plan, lines)
    for line in missed:
        print(line, file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(run(main))
