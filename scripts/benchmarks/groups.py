"""Rounds of a large stage whose members die: averaging in one level against two, in virtual time, with the daemon's own rules.

Who proposes what is what `compose` says of the table (policy/step/roster.py). A round takes what its links allow (policy/round/slices.py).
A member that dies in it ends it: what the dead held alone is computed again, and a round begins anew. Lifetimes are exponential, and each
who dies is replaced at the next step.

`rounds` is how many rounds a member runs for one average. In two levels those are its group's, until the sum stands, and those for sections
of the average, each counted by the share of the stage that is in it and by the share of the average that it makes. `exchange_s` is the time
from when nothing is missing until all have the average; `spread_s` of it is the time since the last section was made, or the round of the
whole was done: members fetch from each other what they lack. A donor shares its uplink among those that it gives to. What a member has
fetched others hear with its next record.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from peerd.policy.round.debts import Debts
from peerd.policy.round.slices import least_exchange_s
from peerd.policy.step import groups as two_levels
from peerd.policy.step.acts import DropSums
from peerd.policy.step.ledger import full, indices, this_dropped, with_sum
from peerd.policy.step.roster import Roster, compose, turns, union_of
from peerd.policy.step.sections import SECTIONS_AT_ONCE, section_to_fetch
from peerd.policy.step.situation import OwnState, Situation, StepRules
from peerd.policy.step.stepping import decide
from peerd.table.record import PeerId, PeerRecord, Phase
from peerd.table.view import LiveView
from scripts.benchmarks._report import SCHEMA, progress, run

MOST_ROUNDS = 1.2
"""Of a stage with up to `JUDGED` members in two levels."""
JUDGED = 300
MOST_S = 1e6
"""Of virtual time: a step that takes longer has no average."""
NUM_CHUNKS = 120
FORGET_REFUSAL_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Times in seconds, sizes in bytes, rates in bytes per second."""

    lifetime_s: float
    up: float
    average_bytes: float
    noticed_s: float
    again_s: float
    steps: int
    seed: int
    group_size: int
    down: float
    period_s: float
    tick_s: float


@dataclass(slots=True)
class Flow:
    """A section on its way from one member to another, with the bytes that are left."""

    donor: PeerId
    to: PeerId
    section: int
    left: float


@dataclass(slots=True)
class Found:
    """Of all steps of one side."""

    rounds: list[float] = field(default_factory=list)
    exchange_s: list[float] = field(default_factory=list)
    spread_s: list[float] = field(default_factory=list)
    largest: int = 0
    deaths: int = 0


class Stage:
    """One step of one stage: its table, and the rounds that are under way."""

    def __init__(self, plan: Plan, num_members: int, group_size: int, step: int) -> None:
        self.plan, self.group_size, self.step = plan, group_size, step
        self.rng = random.Random(f"{plan.seed} {num_members} {step}")
        self.num_microbatches = 2 * num_members
        names = sorted(PeerId(f"p{number:05d}") for number in range(num_members))
        self.members = {
            name: PeerRecord(peer=name, stage=0, step=step, phase=Phase.ACCUMULATING, ledger_no=1, done=0b11 << 2 * number)
            for number, name in enumerate(names)
        }
        self.rules = StepRules(
            num_stages=1,
            num_microbatches=self.num_microbatches,
            ttl_s=15.0,
            averaging_s=9.0,
            group_size=group_size,
            num_sections=two_levels.num_sections_of(group_size),
        )
        self.now_s, self.attempt = 0.0, 0
        self.num_first = self.num_top = self.num_sums = self.deaths = 0
        self.largest = 0
        self.num_sections = two_levels.num_sections_of(group_size)
        self.ended_s: float | None = None
        self.made_s = 0.0
        """When the last section was made, or the whole average."""
        self.told: dict[PeerId, int] = {}
        """What others know of a member's sections."""
        self.flows: list[Flow] = []
        self.refused: dict[PeerId, dict[PeerId, float]] = {}
        """By member, donors that were too busy, and until when it asks them no more."""
        self.holders = 0
        self.numbers = itertools.count()
        self.events: list[tuple[float, int, str, object]] = []
        self.open: dict[bytes, Roster] = {}
        self.dead: set[PeerId] = set()
        for name in names:
            self.at(self.rng.expovariate(1 / plan.lifetime_s), "dies", name)

    def at(self, after_s: float, kind: str, what: object) -> None:
        heapq.heappush(self.events, (self.now_s + after_s, next(self.numbers), kind, what))

    def run(self) -> None:
        self.propose()
        while self.ended_s is None and self.events and self.now_s < MOST_S:
            self.now_s, _, kind, what = heapq.heappop(self.events)
            if kind == "dies":
                self.dies(what)  # type: ignore[arg-type]
            elif kind == "done":
                self.ends(what)  # type: ignore[arg-type]
            elif kind == "noticed":
                self.is_noticed(what)  # type: ignore[arg-type]
            elif kind == "gathers":
                self.gathers()
                continue  # nobody proposes anything because of that
            else:
                self.again()
            if self.ended_s is None:
                self.propose()

    def view(self) -> LiveView:
        return LiveView(me=PeerId(""), records=tuple(self.members.values()))

    def propose(self) -> None:
        """Let those propose whose turn it is."""
        live, proposed = self.view(), True
        while proposed:
            proposed = False
            members = live.members(0, self.step)
            groups = two_levels.groups_of(members, self.group_size)
            if self.num_sections > 1 and two_levels.Levels(members, self.group_size).makes_sections:
                self.propose_sections(live, members)
                return
            idle = [group for group in groups.values() if len(group) > 1 and all(m.phase is Phase.ACCUMULATING for m in group)]
            asked = [turns(group)[0] for group in idle] if groups else turns(members)[:1]
            for name in asked:
                mine = self.members[name]
                roster = compose(mine, live, self.num_microbatches, self.attempt, group_size=self.group_size)
                if roster is not None:
                    self.begin(roster)
                    live, proposed = self.view(), bool(groups)

    def propose_sections(self, live: LiveView, members: Sequence[PeerRecord]) -> None:
        makers_of, held = two_levels.SectionMakers(two_levels.by_sum(members)), two_levels.sections_held(members)
        for number in indices(full(self.num_sections) & ~held):
            makers = makers_of.of(number)
            if makers_of.before(number) & ~held:
                continue
            if any(self.members[m.peer].phase is Phase.AVERAGING for m in makers):
                continue
            mine, rest = self.members[turns(makers)[0]], (self.group_size, self.num_sections)
            roster = compose(mine, live, self.num_microbatches, self.attempt, 1, (), *rest)
            if roster is not None:
                self.begin(roster)
                live = self.view()

    def begin(self, roster: Roster) -> None:
        is_top = union_of(roster.entries) == full(self.num_microbatches)
        self.num_top += is_top
        self.num_first += not is_top
        self.attempt += 1
        self.largest = max(self.largest, len(roster.entries))
        self.open[roster.average_id] = roster
        for peer in roster.peers:
            self.members[peer] = replace(self.members[peer], phase=Phase.AVERAGING)
        num_bytes = self.plan.average_bytes / roster.num_sections
        self.at(least_exchange_s(num_bytes, [self.plan.up] * len(roster.peers)), "done", roster)

    def ends(self, roster: Roster) -> None:
        if not self.dead.isdisjoint(roster.peers) or self.open.pop(roster.average_id, None) is None:
            return
        union = union_of(roster.entries)
        if roster.num_sections > 1:
            self.takes_section(roster)
            return
        if union == full(self.num_microbatches):
            self.holders = len(roster.peers)
            self.ended_s = self.made_s = self.now_s
            return
        self.num_sums += 1
        for peer in roster.peers:
            self.members[peer] = replace(with_sum(self.members[peer], roster.average_id, union), phase=Phase.ACCUMULATING)

    def takes_section(self, roster: Roster) -> None:
        if not self.told:
            self.at(0.0, "gathers", None)
        self.holders, self.made_s = len(roster.peers), self.now_s
        for peer in roster.peers:
            mine = self.members[peer]
            self.members[peer] = mine = replace(mine, phase=Phase.ACCUMULATING, sections=mine.sections | 1 << roster.section)
            self.told[peer] = mine.sections

    def gathers(self) -> None:
        """What is under way moves on, and each member begins to fetch what its rules say."""
        giving, taking = Counter(flow.donor for flow in self.flows), Counter(flow.to for flow in self.flows)
        for flow in self.flows:
            flow.left -= self.plan.tick_s * min(self.plan.up / giving[flow.donor], self.plan.down / taking[flow.to])
            if flow.left <= 0:
                self.members[flow.to] = replace(self.members[flow.to], sections=self.members[flow.to].sections | 1 << flow.section)
        self.flows = [flow for flow in self.flows if flow.left > 0]
        for number, (peer, record) in enumerate(self.members.items()):
            if (self.now_s + number * self.plan.tick_s) % self.plan.period_s < self.plan.tick_s:
                self.told[peer] = record.sections
        if all(record.sections == full(self.num_sections) for record in self.members.values()):
            self.ended_s = self.now_s
            return
        seen = LiveView(me=PeerId(""), records=tuple(replace(m, sections=self.told.get(m.peer, 0)) for m in self.members.values()))
        under_way: dict[PeerId, set[tuple[PeerId, int]]] = {}
        giving = Counter(flow.donor for flow in self.flows)
        for refusals in self.refused.values():
            for donor in [donor for donor, until_s in refusals.items() if until_s <= self.now_s]:
                del refusals[donor]
        for flow in self.flows:
            under_way.setdefault(flow.to, set()).add((flow.donor, flow.section))
        for peer, record in self.members.items():
            lacks_some = record.phase is Phase.ACCUMULATING and record.sections != full(self.num_sections)
            while lacks_some and len(under_way.get(peer, ())) < SECTIONS_AT_ONCE:
                refused = frozenset((donor, self.step) for donor in self.refused.get(peer, ()))
                own = OwnState(record=record, fetching=frozenset(under_way.get(peer, ())), refused=refused)
                found = section_to_fetch(Situation(own, replace(seen, me=peer), self.now_s, self.rules))
                if found is None:
                    break
                if giving[found[0]] >= SECTIONS_AT_ONCE:
                    self.refused.setdefault(peer, {})[found[0]] = self.now_s + FORGET_REFUSAL_S
                    break
                giving[found[0]] += 1
                self.flows.append(Flow(found[0], peer, found[1], self.plan.average_bytes / self.num_sections))
                under_way.setdefault(peer, set()).add(found)
        self.at(self.plan.tick_s, "gathers", None)

    def dies(self, peer: PeerId) -> None:
        """Rounds with it do not end. Until that is noticed, others may begin some."""
        self.deaths += 1
        self.dead.add(peer)
        self.at(self.plan.noticed_s, "noticed", peer)

    def is_noticed(self, peer: PeerId) -> None:
        del self.members[peer]
        self.flows = [flow for flow in self.flows if peer not in (flow.donor, flow.to)]
        for roster in [roster for roster in self.open.values() if peer in roster.peers]:
            del self.open[roster.average_id]
            for name in roster.peers:
                if name in self.members and self.members[name].phase is Phase.AVERAGING:
                    self.members[name] = replace(self.members[name], phase=Phase.ACCUMULATING)
        self.at(self.plan.again_s, "again", None)

    def again(self) -> None:
        """What is missing has been computed by members that hold their own ledgers; if there is none, rule 16 (open) makes one."""
        held = 0
        for record in self.members.values():
            held |= record.done
        absent = full(self.num_microbatches) & ~held
        if not absent:
            return
        free = [r for r in self.members.values() if not r.group and r.phase is Phase.ACCUMULATING]
        if free:
            name = min(free, key=lambda r: (r.done.bit_count(), r.peer)).peer
            self.members[name] = replace(self.members[name], done=self.members[name].done | absent)
            return
        self.open_ledger()
        self.at(self.plan.again_s, "again", None)

    def open_ledger(self) -> None:
        live = self.view()
        for record in list(self.members.values()):
            if record.group and record.phase is Phase.ACCUMULATING:
                act = decide(Situation(OwnState(record=record), replace(live, me=record.peer), self.now_s, self.rules))
                if isinstance(act, DropSums):
                    self.members[record.peer] = this_dropped(record)
                    return


def spread_s(plan: Plan, num_members: int, num_holders: int) -> float:
    """How long the others fetch the average, if each that has it gives it to one other at a time."""
    return math.ceil(math.log2(max(1.0, num_members / max(1, num_holders)))) * plan.average_bytes / plan.up


def measured(plan: Plan, num_members: int, group_size: int) -> Found:
    found = Found()
    for step in range(plan.steps):
        stage = Stage(plan, num_members, group_size, step)
        stage.run()
        took_s = stage.ended_s if stage.ended_s is not None else math.inf
        whole_s = spread_s(plan, len(stage.members), stage.holders) if stage.num_sections == 1 else 0.0
        found.exchange_s.append(took_s + whole_s)
        found.spread_s.append(took_s - stage.made_s + whole_s)
        first = stage.num_first / stage.num_sums if stage.num_sums else 0.0
        share = stage.holders / len(stage.members) if stage.num_sums else 1.0
        found.rounds.append(first + stage.num_top * share / stage.num_sections)
        found.largest = max(found.largest, stage.largest)
        found.deaths += stage.deaths
    return found


def debts_ms(num_members: int) -> float:
    """Processor time to make the debts of a round, and to look at them once."""
    began = time.thread_time()
    Debts([1 << 20] * num_members, NUM_CHUNKS, 60.0, 9.0).look(1.0)
    return 1e3 * (time.thread_time() - began)


def lines(plan: Plan, sizes: list[int]) -> list[dict[str, float | str]]:
    found: list[dict[str, float | str]] = []
    for num_members in sizes:
        for name, group_size in (("one level", 0), ("two levels", plan.group_size)):
            if not group_size and num_members > 1.5 * plan.lifetime_s / (plan.average_bytes / plan.up):
                progress(f"{num_members} members, {name}: several die in each round, so none ends")
                continue
            progress(f"{num_members} members, {name} ...")
            result = measured(plan, num_members, group_size)
            rounds, took, spread = (sum(each) / plan.steps for each in (result.rounds, result.exchange_s, result.spread_s))
            found.append(
                {
                    "members": num_members,
                    "levels": name,
                    "largest_round": result.largest,
                    "rounds": round(rounds, 3),
                    "exchange_s": round(took, 1),
                    "spread_s": round(spread, 1),
                    "deaths_a_step": round(result.deaths / plan.steps, 2),
                    "debts_ms": round(debts_ms(result.largest), 1),
                }
            )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, nargs="+", default=[64, 128, 300, 2000])
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument("--lifetime-h", type=float, default=4.0)
    parser.add_argument("--up-mbit", type=float, default=20.0)
    parser.add_argument("--down-mbit", type=float, default=100.0)
    parser.add_argument("--period-s", type=float, default=5.0, help="between two records of a member")
    parser.add_argument("--tick-s", type=float, default=0.5, help="between two looks at what members fetch")
    parser.add_argument("--mb", type=float, default=75.0, help="of an average; with the default a round takes a minute at 20 Mbit/s")
    parser.add_argument("--noticed-s", type=float, default=5.0, help="until a death is noticed")
    parser.add_argument("--again-s", type=float, default=5.0, help="until what the dead held is computed again")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    plan = Plan(
        lifetime_s=3600 * asked.lifetime_h,
        up=asked.up_mbit * 125e3,
        average_bytes=1e6 * asked.mb,
        noticed_s=asked.noticed_s,
        again_s=asked.again_s,
        steps=asked.steps,
        seed=asked.seed,
        group_size=asked.group_size,
        down=asked.down_mbit * 125e3,
        period_s=asked.period_s,
        tick_s=asked.tick_s,
    )
    found = lines(plan, asked.members)
    if asked.json:
        print(json.dumps({"schema": SCHEMA, "rows": found}))
    else:
        for line in ({**found[0], **{name: name for name in found[0]}}, *found):
            print("  ".join(f"{value!s:>13}" for value in line.values()))
    judged = [line for line in found if line["levels"] == "two levels" and float(line["members"]) <= JUDGED]
    bad = [line for line in judged if float(line["rounds"]) > MOST_ROUNDS]
    for line in bad:
        print(f"failed: {line['members']} members take {line['rounds']} rounds a step, more than {MOST_ROUNDS}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(run(main))
