"""`scripts/bench home --part local`: the share of its speed without limits that a swarm with local steps keeps over home links.

A swarm of 2 stages of 3 peers trains a real model, in turns over home links (20 Mbit/s up, 100 down, 60 ms) and over links without limits.
In a round each peer makes 16 updates of its own and then sends what they have changed, in `sparse:64`. After it, over the same home
links, the same model trains by the defaults of a new run: a float32 average of every 16 microbatches. Nothing stands in for work.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from peerd.cli.render_trace import timelines_of
from peerd.config.manifest import ComputeConfig, Manifest, ModelConfig, SwarmConfig, TrainConfig, WireConfig
from peerd.models.stages import initial_parameter_spec
from peerd.timeline.critical import critical_shares
from peerd.timeline.shares import Shares
from scripts.benchmarks._averaging import observed_in
from scripts.benchmarks._link import UNLIMITED, LinkScenario, until_step
from scripts.benchmarks._namespaces import Network
from scripts.benchmarks._report import SCHEMA, paired_ratio, progress
from scripts.benchmarks._turns import Peers

NUM_STAGES, PER_STAGE = 2, 3
NUM_PEERS = NUM_STAGES * PER_STAGE
LAYERS_PER_STAGE, HEAD = 8, 64
WIDTHS = 16
"""A layer has so many times the square of its width: four matrices of attention, three of four times the width's feed-forward."""
SEQUENCE = 256
"""Tokens of a microbatch."""
UPDATES, CODEC = 16, "sparse:64"
ANNOUNCE_S = 1.0
"""A batch is sealed when it has been told for two of these: a microbatch takes a peer about as long here."""
HOME = LinkScenario(name="home")
LEAST_KEPT = 0.8
MUST_BE_0 = ("rounds_failed", "replayed_microbatches", "inexact_steps", "lost_microbatches", "duplicate_microbatches", "internal_errors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Some steps in a row over the same links."""

    step_s: float
    shares: Shares
    """Of the critical path."""


@dataclass(slots=True, kw_only=True)
class Side:
    """A swarm over the same links."""

    name: str
    tokens: int
    """Of a step."""
    turns: list[Turn] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        return [each.step_s for each in self.turns]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / statistics.median(self.seconds)

    def told(self) -> dict[str, object]:
        shares = {name: statistics.median(asdict(each.shares)[name] for each in self.turns) for name in asdict(Shares())}
        return {"name": self.name, "tokens_per_s": self.tokens_per_s, "step_s": statistics.median(self.seconds), **shares}


def width_of(millions: float) -> int:
    """The least width, in whole heads, of a stage of so many million parameters or more."""
    return HEAD * max(1, math.ceil(math.sqrt(1e6 * millions / (WIDTHS * LAYERS_PER_STAGE)) / HEAD))


def manifest_of(width: int) -> Manifest:
    """A new run's, but for the model, and without checkpoints."""
    layers = NUM_STAGES * LAYERS_PER_STAGE
    return Manifest(
        name="bench",
        model=ModelConfig(num_layers=layers, d_model=width, num_heads=width // HEAD, d_ff=4 * width, vocab_size=256),
        train=TrainConfig(num_stages=NUM_STAGES, microbatch_size=1, sequence_length=SEQUENCE, learning_rate=3e-4),
        compute=ComputeConfig(threads=1),
        swarm=SwarmConfig(checkpoint_every_steps=0, rebalance_period_s=0.0),
    )


def local_of(manifest: Manifest) -> Manifest:
    """The same with local steps."""
    return replace(
        manifest,
        train=replace(manifest.train, microbatches_per_step=PER_STAGE * UPDATES, local_batch=1),
        wire=WireConfig(weight_gradients=CODEC),
        swarm=replace(manifest.swarm, announce_period_s=ANNOUNCE_S),
    )


def parameters_of(manifest: Manifest) -> int:
    """Of the largest stage."""
    specs = [initial_parameter_spec(manifest, stage).values() for stage in range(NUM_STAGES)]
    return max(sum(math.prod(shape) for shape in spec) for spec in specs)


def turn(team: Peers, num_steps: int) -> Turn:
    """Let the step under way end, in which the links have changed, then watch so many steps. Each lasts from the end of the one before."""
    until_step(team, max(2, len(team.steps()) + 1))
    traced = team.trace(num_steps)
    first, last = traced["first_step"], traced["last_step"]
    until_step(team, last + 1)
    ends = [step.time_s for step in team.steps()]
    return Turn(step_s=(ends[last] - ends[first - 1]) / num_steps, shares=critical_shares(timelines_of(traced)))


def train(manifest: Manifest, sides: Sequence[tuple[Side, bool]], rounds: int, num_steps: int) -> dict[str, int]:
    """Let one swarm take turns over the links of each side; True: without limits. Returns what its daemons have counted."""
    with (
        Network(NUM_PEERS, UNLIMITED) as network,
        Peers(manifest, observed=False, per_stage=PER_STAGE, place=observed_in(network)) as team,
    ):
        team.start()
        home = HOME.links([network.address(peer) for peer in range(NUM_PEERS)])
        for number in range(rounds):
            for side, is_free in sides:
                network.change(UNLIMITED if is_free else home)
                side.turns.append(found := turn(team, num_steps))
                shares = ", ".join(f"{name} {share:.1%}" for name, share in asdict(found.shares).items())
                progress(f"round {number + 1}  {side.name}: {found.step_s:.1f} s a step; {shares}")
        counted = team.counters((*MUST_BE_0, "own_updates"))
        return {**counted, "steps": len(team.steps())}


def local(millions: float, rounds: int, num_steps: int, as_json: bool) -> int:
    """Train both swarms, one after the other, and print a row for each. Returns the exit code."""
    plain = manifest_of(width_of(millions))
    manifest = local_of(plain)
    progress(f"{parameters_of(plain) / 1e6:.1f} M parameters a stage, boundaries of {plain.boundary_bytes / 1e3:.0f} KB")
    kept, free = (Side(name=f"local steps, {where}", tokens=manifest.tokens_per_step) for where in ("home links", "without limits"))
    defaults = Side(name="defaults, home links", tokens=plain.tokens_per_step)
    counted = train(manifest, [(kept, False), (free, True)], rounds, num_steps)
    plainly = train(plain, [(defaults, False)], 1, num_steps)
    ratio = paired_ratio(free.seconds, kept.seconds)
    missed = [f"{ratio:.3f} of the speed without limits, not {LEAST_KEPT}"] if ratio < LEAST_KEPT else []
    missed += [f"{name} is {counts[name]}" for counts in (counted, plainly) for name in MUST_BE_0 if counts[name]]
    told = {
        "parameters": parameters_of(plain),
        "kept": ratio,
        "own_updates": counted["own_updates"] / (counted["steps"] * NUM_PEERS),
        "rows": [side.told() for side in (kept, free, defaults)],
        "missed": missed,
    }
    if as_json:
        print(json.dumps({"schema": SCHEMA, "load": [round(value, 2) for value in os.getloadavg()], **told}))
    else:
        print_rows(told, free)
    for reason in missed:
        print(reason, file=sys.stderr)
    return int(bool(missed))


def print_rows(told: dict[str, object], free: Side) -> None:
    print(
        f"{NUM_STAGES} stages of {PER_STAGE} peers, {told['parameters']} parameters a stage; local steps make {told['own_updates']:.1f} "
        f"updates a round, {CODEC}; they keep {told['kept']:.3f} of their speed"
    )
    print(f"{'':<30}  tokens/s   share  step s  compute   wait   wire  step end")
    for row in told["rows"]:  # type: ignore[attr-defined]
        print(
            f"{row['name']:<30}  {row['tokens_per_s']:>8.1f}  {row['tokens_per_s'] / free.tokens_per_s:>6.3f}  {row['step_s']:>6.1f}"
            f"  {row['compute']:>7.1%}  {row['wait']:>5.1%}  {row['wire']:>5.1%}  {row['step_end']:>8.1%}"
        )
