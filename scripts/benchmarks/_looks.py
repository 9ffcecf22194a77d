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
from peerd.policy.step.groups import SectionMakers, by_sum, groups_of, num_sections_of
from peerd.policy.step.roster import Roster, entry_of, union_of
from peerd.policy.step.situation import OwnState, Situation, StepRules
from peerd.policy.step.stepping import decide
from peerd.table.record import AverageId, PeerId, PeerRecord, Phase
from peerd.table.view import LiveView

NUM_STAGES = 2
TAKEOVER_S, TTL_S, AVERAGING_S = 10.0, 15.0, 9.0
CODEC_BYTES, ROUND_S = (4e8, 2e8, 1e8, 5e7, 2e7), 30.0
GROUP_SIZE = 32
NUM_SECTIONS = num_sections_of(GROUP_SIZE)
Look = Callable[[], object]


class Table:
    """Peers of two stages, all of which train. Each view that it gives is a new one, as after a change of the table."""

    def __init__(self, peers: int, microbatches: int) -> None:
        self.microbatches = microbatches
        self._names = [[PeerId(f"12D3KooW{stage}{number:06}") for number in range(peers)] for stage in range(NUM_STAGES)]
        self.me = self._names[0][peers // 2]

    def view(self, step: int, done: int = 0, gone: int = 0) -> LiveView:
        """All peers at a step, and of it the first microbatches done; the last `gone` peers of each stage are dead."""
        records = self._records(step, done, gone)
        return LiveView(me=self.me, records=tuple(sorted(records, key=lambda record: record.peer)))

    def in_groups(self, step: int, share: float = 0.0, sections: float = 0.0) -> LiveView:
        """All microbatches are held; so many of the groups have made their sums, and so many sections of the average stand."""
        records = self._records(step, self.microbatches, 0)
        members = [record for record in records if record.stage == 0]
        groups = [*groups_of(members, GROUP_SIZE).values()]
        found = {record.peer: record for record in records}
        for number, group in enumerate(groups[: round(share * len(groups))]):
            done = union_of([entry_of(m) for m in group])
            found |= {m.peer: replace(m, group=AverageId(b"%16d" % number), done=done, own_done=m.done) for m in group}
        makers = SectionMakers(by_sum([record for record in found.values() if record.stage == 0]))
        for number in range(round(sections * NUM_SECTIONS)):
            for m in makers.of(number):
                found[m.peer] = replace(found[m.peer], sections=found[m.peer].sections | 1 << number)
        return LiveView(me=self.me, records=tuple(sorted(found.values(), key=lambda record: record.peer)))

    def _records(self, step: int, done: int, gone: int) -> list[PeerRecord]:
        share = -(-self.microbatches // len(self._names[0]))
        return [
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
        "groups: decision while it is computed": partial(decision, table, table.view(step, done=1), GROUP_SIZE),
        "groups: decision once all is held": partial(decision, table, table.in_groups(step), GROUP_SIZE),
        "groups: decision while sums are made": partial(decision, table, table.in_groups(step, 0.5), GROUP_SIZE),
        "groups: decision once all sums stand": partial(decision, table, table.in_groups(step, 1.0), GROUP_SIZE),
        "groups: decision while sections are gathered": partial(decision, table, table.in_groups(step, 1.0, 0.5), GROUP_SIZE),
        "round: codecs for unequal lines": partial(fit, *lines(table, step), CODEC_BYTES, ROUND_S),
        "round: id of a roster, asked again": again_its_id(table.view(step, done=table.microbatches)),
    }


def decision(table: Table, view: LiveView, group_size: int = 0) -> Act:
    mine = view.mine
    assert mine is not None
    rules = StepRules(
        num_stages=NUM_STAGES,
        num_microbatches=table.microbatches,
        ttl_s=TTL_S,
        averaging_s=AVERAGING_S,
        group_size=group_size,
        num_sections=num_sections_of(group_size),
    )
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
