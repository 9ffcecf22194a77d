"""Contributions: tallies of what each peer computed, taken from the rosters of applied averages, and the merge of several reports.

All members agree on a roster before anything is averaged, so a tally holds what others recorded, not what a peer
claims for itself. If another reporter counted about as many steps, its row for a peer replaces the peer's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from peerd.policy.step.roster import Roster
from peerd.table.record import PeerId

ABOUT_AS_LONG = 0.75
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


def merge(reports: Sequence[Report]) -> list[StageContributions]:
    """Merge reports by stage. A row comes from the reporter that counted most steps; not from the peer itself if another comes close."""
    merged = []
    for stage in sorted({report.tally.stage for report in reports}):
        told = sorted((r for r in reports if r.tally.stage == stage), key=lambda r: (-r.tally.steps, r.reporter))
        rows: dict[str, Contribution] = {}
        counted: dict[str, int] = {}
        for report in told:
            for tally in report.tally.tallies:
                known = rows.get(tally.peer)
                if known is None or (known.reporter == tally.peer and report.tally.steps >= ABOUT_AS_LONG * counted[tally.peer]):
                    counted.setdefault(tally.peer, report.tally.steps)
                    rows[tally.peer] = Contribution(**asdict(tally), stage=stage, reporter=report.reporter)
        widest = told[0].tally
        ordered = tuple(sorted(rows.values(), key=lambda row: (-row.microbatches, row.peer)))
        merged.append(
            StageContributions(stage=stage, first_step=widest.first_step, last_step=widest.last_step, steps=widest.steps, rows=ordered)
        )
    return merged
