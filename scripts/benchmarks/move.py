"""The time for which a peer is away when it moves to another stage, and when its owner pauses it and resumes it at once.

Each of two stages has a peer that in practice stays. A third peer is slower than both, so it belongs to the weaker stage. A limit on the
computing of one of the other peers makes its stage the weaker one, and the third peer then moves there by itself. All times are read from
another peer's table. They do not depend on the daemon's internals:

leaving    from the decision (the table shows the peer as leaving; for a pause the request) until it serves no more
entering   from then until the table shows it in its new stage, joining
download   from then until the table shows it serving: the stage's state, and the steps to catch up on

With --against a swarm of the other checkout takes turns with one of this checkout.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from peerd.cli.demo_daemons import DemoSwarm, Placement
from peerd.cli.demo_plan import DemoPlan
from peerd.config.manifest import ComputeConfig, Manifest, ModelConfig, SwarmConfig, TrainConfig
from peerd.control.protocol import PeerInfo
from peerd.errors import TimedOutError
from scripts.benchmarks._checkouts import Checkout, add_options, checkouts, rows_against
from scripts.benchmarks._report import Row, print_json, print_table, progress, run

NUM_STAGES, MOVER = 2, 2
"""Peers 0 and 1 serve stages 0 and 1; peer 2 begins in stage 0."""
STAND_IN_MS, SLOW_FACTOR, LESS = 40.0, 3.0, 0.5
"""Stand-in per microbatch; the mover's slowness; and the share of its time that the peer of the weaker stage may compute.

A step takes longer than the 0.3 s that a leaving peer waits for news; with shorter steps it would wait repeatedly.
"""
SETTLING_STEPS = 3
PERIOD_S = 4.0
"""Time between two decisions on whether to move."""
POLL_S = 0.01
PATIENCE_S = 120.0
MOVE, PAUSE = "move", "pause and resume"


@dataclass(frozen=True, slots=True)
class Absence:
    """One move or pause, in seconds."""

    leaving: float
    entering: float
    download: float

    @property
    def whole(self) -> float:
        return self.leaving + self.entering + self.download

    @property
    def without_download(self) -> float:
        return self.leaving + self.entering


@dataclass(slots=True)
class Side:
    """One checkout's absences, by round."""

    checkout: Checkout
    found: dict[str, list[Absence]] = field(default_factory=lambda: {MOVE: [], PAUSE: []})

    def seconds(self, what: str, part: str) -> list[float]:
        return [getattr(absence, part) for absence in self.found[what]]

    def figures(self) -> dict[str, list[float]]:
        parts = {"": "whole", ", without its download": "without_download"}
        return {what + name: self.seconds(what, part) for what in self.found for name, part in parts.items()}


def plan() -> DemoPlan:
    """800,000 parameters in each stage: 13 MB with two moments and the previous values."""
    manifest = Manifest(
        name="bench",
        model=ModelConfig(num_layers=8, d_model=128, num_heads=4, d_ff=512),
        train=TrainConfig(num_stages=NUM_STAGES, microbatches_per_step=8, microbatch_size=1, sequence_length=64),
        compute=ComputeConfig(threads=1),
        swarm=SwarmConfig(checkpoint_every_steps=0, rebalance_period_s=PERIOD_S),
    )
    slow = {MOVER: SLOW_FACTOR}
    return DemoPlan(manifest=manifest, num_peers=NUM_STAGES + 1, slow=slow, kills=(), chaos=None, stand_in_ms=STAND_IN_MS)


class Watched:
    """A swarm whose third peer moves and pauses while the first one's table is watched."""

    def __init__(self, swarm: DemoSwarm) -> None:
        self._swarm = swarm
        ready = swarm.daemons[MOVER].ready
        assert ready is not None
        self._mover = ready.peer
        for daemon in swarm.daemons:
            daemon.client.request("wait", serving=True, timeout_s=PATIENCE_S, silence_s=PATIENCE_S)
        self._until(lambda: all(row["throughput"] > 0 for row in self._rows()), "every peer knows how fast it is")

    def move(self) -> Absence:
        """Make the other stage the weaker one."""
        here = self._settled()
        for stage in range(NUM_STAGES):
            duty = 1.0 if stage == here else LESS
            self._swarm.daemons[stage].client.request("limits", change={"duty": duty})
        decided_s = self._until(lambda: (row := self._row()) is not None and row["leaving"], "the peer moves")
        return self._absence(decided_s)

    def pause(self) -> Absence:
        self._settled()
        client = self._swarm.daemons[MOVER].client
        decided_s = time.monotonic()
        client.request("pause", for_s=0.0, wait=False)
        gone_s = self._until(self._is_gone, "the peer leaves its stage")
        client.request("pause", for_s=0.0, silence_s=PATIENCE_S)
        client.request("resume")
        return self._absence(decided_s, gone_s)

    def _settled(self) -> int:
        """Wait until the mover has served a stage for some steps, so that it does not fall behind again. Returns that stage."""
        client = self._swarm.daemons[MOVER].client
        step = client.request("status")["peer"]["step"] + SETTLING_STEPS
        client.request("wait", step=step, timeout_s=PATIENCE_S, silence_s=PATIENCE_S)
        return int(client.request("status")["peer"]["stage"])

    def _absence(self, decided_s: float, gone_s: float | None = None) -> Absence:
        if gone_s is None:
            gone_s = self._until(self._is_gone, "the peer leaves its stage")
        entered_s = self._until(lambda: (row := self._row()) is not None and not row["leaving"], "the peer enters its stage")
        serves_s = self._until(self._serves, "the peer serves")
        return Absence(leaving=gone_s - decided_s, entering=entered_s - gone_s, download=serves_s - entered_s)

    def _is_gone(self) -> bool:
        row = self._row()
        return row is None or row["phase"] == "joining"

    def _serves(self) -> bool:
        row = self._row()
        return row is not None and row["phase"] != "joining" and not row["leaving"] and not row["suspect"]

    def _row(self) -> PeerInfo | None:
        return next((row for row in self._rows() if row["id"] == self._mover), None)

    def _rows(self) -> Sequence[PeerInfo]:
        return [row for stage in self._swarm.daemons[0].client.request("peers")["stages"] for row in stage["peers"]]

    def _until(self, done: Callable[[], bool], what: str) -> float:
        """The time at which the condition was first seen."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not done():
            if time.monotonic() > deadline_s:
                raise TimedOutError(f"not within {PATIENCE_S:.0f} s: {what}: {self._swarm.daemons[MOVER].log_tail()[-300:]}")
            time.sleep(POLL_S)
        return time.monotonic()


def run_swarm(side: Side) -> None:
    """Time a move, the move back and a pause in a new swarm. The two moves count as their mean."""

    def mobile(peer: int) -> Placement:
        return dataclasses.replace(side.checkout.place(peer), settings={"stay": False})

    with DemoSwarm(plan(), lambda _text: None, place=mobile) as swarm:
        swarm.start()
        watched = Watched(swarm)
        there, back, pause = watched.move(), watched.move(), watched.pause()
    moves = Absence(*(statistics.fmean((getattr(there, part), getattr(back, part))) for part in ("leaving", "entering", "download")))
    for what, absence in ((MOVE, moves), (PAUSE, pause)):
        side.found[what].append(absence)
        parts = f"leaving {absence.leaving:.2f} s, entering {absence.entering:.2f} s, download {absence.download:.2f} s"
        progress(f"{what}{side.checkout.suffix}: {absence.whole:.2f} s ({parts})")


def rows_of(ours: Side, *others: Side) -> list[Row]:
    found = [rows_against(ours.figures(), other.figures(), other.checkout.suffix) for other in others]
    alone = [Row(name=name, median=statistics.median(seconds)) for name, seconds in ours.figures().items()]
    return [*itertools.chain(*found)] or alone


def report(sides: Sequence[Side], as_json: bool) -> None:
    parts = {
        f"{what}{side.checkout.suffix}": {part: statistics.median(side.seconds(what, part)) for part in Absence.__slots__}
        for what in (MOVE, PAUSE)
        for side in sides
    }
    rows = rows_of(*sides)
    if as_json:
        print_json(rows, parts_s=parts)
        return
    print_table(f"from the decision to serving, medians of {len(sides[0].found[MOVE])}", "s", rows)
    for name, each in parts.items():
        print(f"{name}: " + ", ".join(f"{part} {seconds:.2f} s" for part, seconds in each.items()))


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench move", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    add_options(parser, "swarms of each checkout, in each of which a peer moves twice and pauses once")
    given = parser.parse_args()
    if given.rounds < 1:
        parser.error("--rounds must be at least 1")
    with checkouts(given.against) as found:
        sides = [Side(checkout) for checkout in found]
        for number in range(given.rounds):
            for side in sides if number % 2 == 0 else reversed(sides):
                run_swarm(side)
    report(sides, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
