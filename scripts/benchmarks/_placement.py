"""`scripts/bench home --part placement`: where a joiner goes, and who follows, when the lines of one stage bind.

Two stages of four peers compute equally fast. Those of stage 0 send their activations over slow lines, so the whole swarm waits for them,
though every peer's processor says that both stages are equally strong. One more peer joins and chooses its stage itself; peers of stage 1
may move. A row has the stage of the joiner, how many moved, and the time of a step before and after.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from peerd.cli.demo_daemons import DemoSwarm, Placement
from peerd.cli.demo_plan import DemoPlan
from peerd.config.manifest import ComputeConfig, Manifest, ModelConfig, SwarmConfig, TrainConfig, WireConfig
from scripts.benchmarks._namespaces import Network
from scripts.benchmarks._report import SCHEMA, progress
from scripts.benchmarks._swarms import median_step_s, until_holds
from scripts.benchmarks._switch import Links, Rates

PER_STAGE = 4
SLOW_MBIT, FAST_MBIT, ROUND_TRIP_MS = 2.5, 50.0, 40.0
STAND_IN_MS = 200.0
MICROBATCHES = 48
PERIOD_S = 15.0
"""Of rebalancing."""
STEPS, SETTLING = 3, 2
LOOK_S, PATIENCE_S = 0.5, 600.0
LEAST_RATIO = 1.5


class _Plan(DemoPlan):
    def stage_of(self, peer: int) -> int:
        """The first peer, of which nobody has probed the line, is in stage 1; so are all with an even number."""
        return 1 - peer % 2


@dataclass(slots=True, kw_only=True)
class Row:
    joined: int
    """The stage that the joiner has chosen."""
    moves: int
    before_s: float
    """The median time of a step without the joiner."""
    joined_s: float
    """With it, before anybody moves, or after that where somebody moved at once."""
    after_s: float
    ratio: float
    """Steps in a time after all that, by those before."""
    missed: list[str] = field(default_factory=list)


def plan() -> DemoPlan:
    manifest = Manifest(
        name="bench",
        model=ModelConfig(num_layers=2, d_model=64, num_heads=1, d_ff=64),
        train=TrainConfig(num_stages=2, microbatches_per_step=MICROBATCHES, microbatch_size=32, sequence_length=32),
        compute=ComputeConfig(threads=1, recompute="never"),
        wire=WireConfig(activations="none", activation_gradients="none"),
        swarm=SwarmConfig(checkpoint_every_steps=0, rebalance_period_s=PERIOD_S),
    )
    return _Plan(manifest=manifest, num_peers=2 * PER_STAGE, slow={}, kills=(), chaos=None, stand_in_ms=STAND_IN_MS, observed=False)


class Placed:
    """The swarm, watched."""

    def __init__(self, swarm: DemoSwarm) -> None:
        self._swarm = swarm

    def until(self, holds: Callable[[], bool], what: str) -> None:
        until_holds(self._swarm, holds, what, PATIENCE_S, LOOK_S)

    def step_s(self) -> float:
        """The median time of some steps, after others in which all settles."""
        first = len(self._swarm.steps) + SETTLING
        self.until(lambda: len(self._swarm.steps) > first + STEPS, "some steps end")
        return median_step_s(step["time_s"] for step in self._swarm.steps[first:])

    @property
    def moves(self) -> int:
        return sum(int(daemon.status["moves"]) for daemon in self._swarm.daemons if daemon.status is not None)


def measure() -> Row:
    planned, joiner = plan(), 2 * PER_STAGE
    with Network(joiner + 1, Links(mbit_per_s=0, round_trip_ms=0)) as network:
        rates = {
            network.address(peer): Rates(up=SLOW_MBIT if peer < joiner and not planned.stage_of(peer) else FAST_MBIT, down=FAST_MBIT)
            for peer in range(joiner + 1)
        }
        network.change(Links(mbit_per_s=0, round_trip_ms=ROUND_TRIP_MS, rates=rates))

        def place(peer: int) -> Placement:
            choice = {"stage": -1} if peer == joiner else {}
            return Placement(command=network.command(peer), host=network.address(peer), settings={"keeps_stage": False, **choice})

        with DemoSwarm(planned, lambda _text: None, place=place) as swarm:
            swarm.start()
            placed, first = Placed(swarm), swarm.daemons[0].ready
            assert first is not None
            placed.until(lambda: all(daemon.serves for daemon in swarm.daemons), "all serve")
            before_s = placed.step_s()
            progress(f"before: {before_s:.2f} s a step, {placed.moves} moves")
            swarm.spawn_another(0, first.join)
            placed.until(lambda: swarm.daemons[-1].serves, "the joiner serves")
            status = swarm.daemons[-1].status
            assert status is not None
            joined = int(status["peer"]["stage"] or 0)
            joined_s = placed.step_s()
            progress(f"the joiner is in stage {joined}: {joined_s:.2f} s a step, {placed.moves} moves")
            began_s = time.monotonic()
            placed.until(lambda: placed.moves > 0 or time.monotonic() > began_s + 6 * PERIOD_S, "somebody moves")
            after_s = placed.step_s()
            row = Row(joined=joined, moves=placed.moves, before_s=before_s, joined_s=joined_s, after_s=after_s, ratio=before_s / after_s)
    row.missed += [f"the joiner went to stage {row.joined}, where lines do not bind"] if row.joined else []
    row.missed += [f"{row.ratio:.2f} times as fast as before, not {LEAST_RATIO}"] if row.ratio < LEAST_RATIO else []
    row.missed += ["nobody moved"] if not row.moves else []
    return row


def placement(as_json: bool) -> int:
    """Measure once and print the figures. Returns the exit code."""
    row = measure()
    if as_json:
        print(json.dumps({"schema": SCHEMA, "rows": [asdict(row)]}))
    else:
        lines = f"stage 0 sends over {SLOW_MBIT:g} Mbit/s, all others over {FAST_MBIT:g}"
        print(f"2 stages of {PER_STAGE} peers, {STAND_IN_MS:g} ms of stand-in; {lines}")
        print("joiner's stage  moves  before s  joined s  after s  ratio")
        print(f"{row.joined:>14}  {row.moves:>5}  {row.before_s:>8.2f}  {row.joined_s:>8.2f}  {row.after_s:>7.2f}  {row.ratio:>5.2f}")
    for reason in row.missed:
        print(reason, file=sys.stderr)
    return int(bool(row.missed))
