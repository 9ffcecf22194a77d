"""Divides the time of a step into compute, step end, wire and waiting, by stage. Pure.

A peer has one compute thread. Each moment of its wall time counts as the first of these that was going on: compute, step end
(averaging, waiting for all stages, optimizer, commit), wire. Any other moment is waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from peerd.timeline.spans import COMPUTE, STEP_END, WIRE, PeerTimeline, Span, SpanKind

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Shares of wall time. They sum to 1, or are all 0 if no time passed."""

    compute: float = 0.0
    wait: float = 0.0
    wire: float = 0.0
    step_end: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShares:
    """The mean shares of a stage's peers."""

    stage: int
    num_peers: int
    shares: Shares


def window(timelines: Iterable[PeerTimeline]) -> Interval:
    """The time from the first span to the last commit; (0, 0) if there are no spans."""
    spans = [span for timeline in timelines for span in timeline.spans]
    if not spans:
        return 0.0, 0.0
    commits = [span.ended_s for span in spans if span.kind is SpanKind.COMMIT]
    return min(span.began_s for span in spans), max(commits or [span.ended_s for span in spans])


def shares_of(spans: Sequence[Span], within: Interval) -> Shares:
    """The shares of one peer."""
    total_s = within[1] - within[0]
    if total_s <= 0:
        return Shares()
    covered: list[Interval] = []
    parts = []
    for kinds in (COMPUTE, STEP_END, WIRE):
        before_s = _length(covered)
        covered = merged([*covered, *clipped(spans, kinds, within)])
        parts.append((_length(covered) - before_s) / total_s)
    compute, step_end, wire = parts
    return Shares(compute=compute, wire=wire, step_end=step_end, wait=max(0.0, 1.0 - sum(parts)))


def by_stage(timelines: Sequence[PeerTimeline], within: Interval) -> list[StageShares]:
    """The shares of each stage, in order; a stage without timelines is left out."""
    found = []
    for stage in sorted({timeline.stage for timeline in timelines}):
        each = [shares_of(timeline.spans, within) for timeline in timelines if timeline.stage == stage]
        mean = {name: sum(getattr(shares, name) for shares in each) / len(each) for name in ("compute", "wait", "wire", "step_end")}
        found.append(StageShares(stage=stage, num_peers=len(each), shares=Shares(**mean)))
    return found


def clipped(spans: Iterable[Span], kinds: frozenset[SpanKind], within: Interval) -> list[Interval]:
    low, high = within
    cut = [(max(low, span.began_s), min(high, span.ended_s)) for span in spans if span.kind in kinds]
    return [(began_s, ended_s) for began_s, ended_s in cut if began_s < ended_s]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of the intervals, in order; no two touch."""
    found: list[Interval] = []
    for began_s, ended_s in sorted(intervals):
        if found and began_s <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], ended_s))
        else:
            found.append((began_s, ended_s))
    return found


def _length(intervals: Iterable[Interval]) -> float:
    return sum(ended_s - began_s for began_s, ended_s in intervals)
