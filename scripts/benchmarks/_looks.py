"""The looks of `scripts/bench looks`, timed in one process of one checkout. Prints one JSON object: seconds by the name of the look."""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from peerd.policy.round.proposing import fit
from peerd.policy.route.launching import Standstill, launchable, what_launches_hang_on
from peerd.policy.step.acts import Act
from peerd.policy.step.clocks import StepClocks
from peerd.policy.step.roster import Roster, entry_of
from peerd.policy.step.situation import OwnState, Situation, StepRules
from peerd.policy.step.stepping import decide
from peerd.table.record import PeerId, PeerRecord, Phase
from peerd.table.view import LiveView

NUM_STAGES = 2
TAKEOVER_S, TTL_S, AVERAGING_S = 10.0, 15.0, 9.0
CODEC_BYTES, ROUND_S = (4e8, 2e8, 1e8, 5e7, 2e7), 30.0
Look = Callable[[], object]


class Table:
    """Peers of two stages, all of which train. Each view that it gives is a new one, as after a change of the table."""

    def __init__(self, peers: int, microbatches: int) -> None:
        self.microbatches = microbatches
        self._names = [[PeerId(f"12D3KooW{stage}{number:06}") for number in range(peers)] for stage in range(NUM_STAGES)]
        self.me = self._names[0][peers // 2]

    def view(self, step: int, done: int = 0, gone: int = 0) -> LiveView:
        """All peers at a step, and of it the first microbatches done; the last `gone` peers of each stage are dead."""
        share = -(-self.microbatches // len(self._names[0]))
        records = [
            PeerRecord(
                peer=name,
                incarnation=1,
                version=step,
                stage=stage,
                step=step,
                phase=Phase.ACCUMULATING,
                done=((1 << share) - 1 << share * number) & (1 << done) - 1,
                ledger_no=step,
                trains=True,
                throughput=10.0,
                queue=2,
            )
            for stage, names in enumerate(self._names)
            for number, name in enumerate(names[: len(names) - gone])
        ]
        return LiveView(me=self.me, records=tuple(sorted(records, key=lambda record: record.peer)))

    def launches(self, view: LiveView, still: Standstill, now_s: float = 0.0) -> Standstill:
        """What the trainer looks for: what is missing, and what of that it launches first."""
        work = launchable(view, NUM_STAGES, self.microbatches, still, now_s, TAKEOVER_S)
        next(iter(each for of_step in work.steps for each in of_step.launches()), None)
        return work.still


def looks(table: Table, step: int) -> dict[str, Look]:
    """The looks at one step, in the order in which they are to be made. Nothing has been asked of their views yet."""
    later = table.view(step, done=1)
    stands = table.launches(later, Standstill())
    return {
        "launches: first look at a step": partial(table.launches, table.view(step + 1), Standstill()),
        "launches: further look": partial(table.launches, table.view(step + 1, done=1), Standstill()),
        "launches: after a death": partial(table.launches, table.view(step + 1, done=1, gone=1), Standstill()),
        "launches: takeover": partial(table.launches, replace(later), stands, TAKEOVER_S),
        "launches: whether to look": partial(hang_on, later),
        "step: decision while it is computed": partial(decision, table, table.view(step, done=1)),
        "step: decision once all is held": partial(decision, table, table.view(step, done=table.microbatches)),
        "round: codecs for unequal lines": partial(fit, *lines(table, step), CODEC_BYTES, ROUND_S),
        "round: id of a roster, asked again": again_its_id(table.view(step, done=table.microbatches)),
    }


def decision(table: Table, view: LiveView) -> Act:
    mine = view.mine
    assert mine is not None
    rules = StepRules(num_stages=NUM_STAGES, num_microbatches=table.microbatches, ttl_s=TTL_S, averaging_s=AVERAGING_S)
    own = StepClocks().noted(OwnState(record=mine), view, rules, 0.0)
    return decide(Situation(own, view, 0.0, rules))


def lines(table: Table, seed: int) -> tuple[list[float], list[float]]:
    """Uplinks and downlinks of a stage's peers, bytes per second: the slowest ones are too slow for any codec."""
    draw = random.Random(seed)
    ups = [draw.uniform(1e5, 1e7) for _ in table.view(0).of_stage(0)]
    return ups, [up * draw.choice((1, 5, 10)) for up in ups]


def again_its_id(view: LiveView) -> Look:
    """Each message of a round asks for the roster's id."""
    members = view.members(0, view.records[0].step)
    roster = Roster(0, members[0].step, 0, members[0].peer, tuple(sorted(map(entry_of, members))))
    assert roster.average_id
    return lambda: roster.average_id


def hang_on(view: LiveView) -> list[object]:
    return [what_launches_hang_on(record) for record in view.records]


def timed(look: Look) -> float:
    gc.disable()
    try:
        began_s = time.thread_time()
        look()
        return time.thread_time() - began_s
    finally:
        gc.enable()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=int, required=True)
    parser.add_argument("--microbatches", type=int, required=True)
    parser.add_argument("--times", type=int, required=True)
    given = parser.parse_args()
    took_s: dict[str, list[float]] = {}
    table = Table(given.peers, given.microbatches)
    for number in range(given.times):
        for name, look in looks(table, 2 * number).items():
            took_s.setdefault(name, []).append(timed(look))
    print(json.dumps(took_s))
    return 0


if __name__ == "__main__":
    sys.exit(main())
