"""Contributions: tallies of what each peer computed, taken from the rosters of applied averages, and the merge of several reports.

All members agree on a roster before anything is averaged, so a tally holds what others recorded, not what a peer
claims for itself. A reporter may lie about everybody, so the reports are held against each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from peerd.policy.step.roster import Roster
from peerd.table.record import PeerId

UNAVERAGED_STEPS = 5
"""A peer whose gradients have been in no average of so many steps works for nothing, and everybody is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """One peer's work for one stage: the number of averages that it took part in, and its microbatches in them."""

    peer: str
    steps: int
    microbatches: int
    tokens: int = 0
    """The tokens of these microbatches; 0: not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTally:
    """The tallies of one stage. They count `steps` averages between `first_step` and `last_step`."""

    stage: int
    first_step: int
    last_step: int
    steps: int
    tallies: tuple[Tally, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The tallies of one stage as one reporter gives them."""

    reporter: str
    tally: StageTally


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution(Tally):
    """One peer's share of one stage, as `reporter` counted it."""

    stage: int
    reporter: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContributions:
    """The merged reports of one stage: the range of the reporter that counted most steps, and one row per peer."""

    stage: int
    first_step: int
    last_step: int
    steps: int
    rows: tuple[Contribution, ...]


def unaveraged_after(before: int, roster: Roster, peer: PeerId, *, had_work: bool, in_group: bool = False) -> int:
    """In how many steps in a row a peer's gradients were in no average, once the average of this roster is applied; `before` it so many.

    A step in which the peer had no work counts if it is left out of the roster and was before: who is left out gets none. `in_group`: its
    gradients are in the sum of its group, and that is in the average.
    """
    entry = roster.entry_of(peer)
    if in_group or (entry is not None and entry.done):
        return 0
    return before + 1 if had_work or (before and entry is None) else before


def why_impossible(
    tally: StageTally, num_stages: int, reached: int, microbatches_per_step: int, tokens_at: Callable[[int], int]
) -> str | None:
    """What is wrong with a report; None if it may be true. The run has `reached` this step.

    `tokens_at` gives a microbatch's tokens at a step; they never decrease.
    """
    if not 0 <= tally.stage < num_stages:
        return "there is no such stage"
    if not 0 < tally.steps <= tally.last_step - tally.first_step + 1 or tally.first_step < 0:
        return "it counts more steps than it covers"
    if tally.last_step > reached:
        return "the run has not come that far"
    if any(not 0 < row.steps <= tally.steps or row.microbatches < 0 for row in tally.tallies):
        return "a peer took part more often than there were averages"
    if len({row.peer for row in tally.tallies}) < len(tally.tallies):
        return "it names a peer twice"
    if sum(row.microbatches for row in tally.tallies) > tally.steps * microbatches_per_step:
        return "it counts more microbatches than the steps had"
    least, most = tokens_at(tally.first_step), tokens_at(tally.last_step)
    if any(row.tokens and not row.microbatches * least <= row.tokens <= row.microbatches * most for row in tally.tallies):
        return "it counts more or fewer tokens than its microbatches had"
    return None


def merge(reports: Sequence[Report], span: int, microbatches_per_step: int, mine: str = "") -> list[StageContributions]:
    """Merge reports by stage; the run has had `span` steps. No single report decides a row.

    A report that has counted fewer steps than the run had leaves room: its peers may have done all of the other steps. Of the counts of a
    peer that fit into the room of more than half of the others' reports, and of this peer's own report (`mine`), the largest is the row.
    Where none fits the smallest is: no row where a report has none. A peer's own count is taken like any other, but has no vote on it.
    """
    merged = []
    for stage in sorted({report.tally.stage for report in reports}):
        told = sorted((r for r in reports if r.tally.stage == stage), key=lambda r: (-r.tally.steps, r.reporter))
        known = [_ReporterCount.of(report, span, microbatches_per_step) for report in told]
        peers = sorted({peer for each in known for peer in each.rows})
        rows = [row for row in (_row_of(peer, stage, known, mine) for peer in peers) if row is not None]
        believed = told[1 if len(told) > 2 else 0 :]  # of three or more not the first one, which nobody else confirms
        widest = max([*believed, *(r for r in told if r.reporter == mine)], key=lambda r: r.tally.steps).tally
        merged.append(
            StageContributions(
                stage=stage,
                first_step=widest.first_step,
                last_step=widest.last_step,
                steps=widest.steps,
                rows=tuple(sorted(rows, key=lambda row: (-row.microbatches, row.peer))),
            )
        )
    return merged


@dataclass(frozen=True, slots=True)
class _ReporterCount:
    """What one reporter has counted in a stage."""

    reporter: str
    rows: Mapping[str, Tally]
    room: int
    """The microbatches of the steps that it has not counted."""

    @classmethod
    def of(cls, report: Report, span: int, microbatches_per_step: int) -> _ReporterCount:
        tally = report.tally
        return cls(report.reporter, {row.peer: row for row in tally.tallies}, (span - tally.steps) * microbatches_per_step)

    def count(self, peer: str) -> int:
        return self.rows[peer].microbatches if peer in self.rows else 0

    def has_room_for(self, peer: str, count: int) -> bool:
        return self.count(peer) <= count <= self.count(peer) + self.room


def _row_of(peer: str, stage: int, known: Sequence[_ReporterCount], mine: str) -> Contribution | None:
    voters = [each for each in known if each.reporter != peer or each.reporter == mine] or known

    def fits(count: int) -> bool:
        are_for = [each.reporter for each in voters if each.has_room_for(peer, count)]
        return 2 * len(are_for) > len(voters) and (mine in are_for or all(each.reporter != mine for each in voters))

    counts = [each.count(peer) for each in known]
    if fitting := [each for each in known if fits(each.count(peer))]:
        chosen = max(fitting, key=lambda each: (each.count(peer), counts.count(each.count(peer)), each.reporter != peer))
    else:
        chosen = min(known, key=lambda each: (each.reporter != mine, each.count(peer), each.reporter == peer))
    return Contribution(**asdict(chosen.rows[peer]), stage=stage, reporter=chosen.reporter) if peer in chosen.rows else None
