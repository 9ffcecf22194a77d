"""The critical path: the chain of spans in which each waited for the one before, from the last commit back to the start. Pure.

The predecessor of a span is the one that ended last among those it needed: the span before it on the same compute thread; the
forward pass of the stage before, or the backward pass of the stage after, of the same microbatch; for an optimizer's step the
last backward pass of any stage, because every stage has to average first; for a step's first pass the commits of the previous
step, or where steps overlap those of the step before that. The time between two spans counts as step end next to an optimizer's
step or a commit, as wire while the microbatch was on the wire, and otherwise as waiting.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence

from peerd.timeline.shares import Interval, Shares, clipped, merged, window
from peerd.timeline.spans import COMPUTE, UPDATE, WIRE, PeerTimeline, Span, SpanKind

SpanIndex = tuple[int, int]
"""The index of a peer, and of a span in that peer's list."""


def critical_shares(timelines: Sequence[PeerTimeline]) -> Shares:
    """The composition of the critical path, as shares of the wall time of these steps."""
    within = window(timelines)
    total_s = within[1] - within[0]
    if total_s <= 0:
        return Shares()
    spent = {"compute": 0.0, "wait": 0.0, "wire": 0.0, "step_end": 0.0}
    for what, began_s, ended_s in _segments(_ComputeHistory(timelines), within):
        spent[what] += max(0.0, ended_s - began_s)
    return Shares(**{what: spent_s / total_s for what, spent_s in spent.items()})


def _segments(work: _ComputeHistory, within: Interval) -> Iterator[tuple[str, float, float]]:
    """Walk the path backwards and cut the whole window into pieces that do not overlap."""
    now_s, current = within[1], work.last()
    while current is not None:
        span = work.span(current)
        ended_s, began_s = min(now_s, span.ended_s), min(now_s, span.began_s)
        yield "step_end", ended_s, now_s  # empty except after the last span: `between` yields the other gaps
        yield "step_end" if span.kind in UPDATE else "compute", began_s, ended_s
        now_s, before = began_s, work.needed_by(current)
        if before is not None and work.span(before).ended_s < began_s:
            now_s = work.span(before).ended_s
            yield from work.between(current, before, (now_s, began_s))
        current = before
    yield "step_end", within[0], now_s


class _ComputeHistory:
    """The spans of all compute threads, indexed for the lookups of the critical path."""

    def __init__(self, timelines: Sequence[PeerTimeline]) -> None:
        kinds = COMPUTE | UPDATE
        self._stages = [timeline.stage for timeline in timelines]
        self._lanes = [sorted((s for s in timeline.spans if s.kind in kinds), key=lambda span: span.ended_s) for timeline in timelines]
        self._passes: dict[tuple[SpanKind, int, int, int], list[SpanIndex]] = defaultdict(list)
        """Keyed by kind, stage, step and microbatch."""
        self._computed: dict[int, list[SpanIndex]] = defaultdict(list)
        self._updated: dict[int, list[SpanIndex]] = defaultdict(list)
        for done in sorted(((peer, at) for peer, lane in enumerate(self._lanes) for at in range(len(lane))), key=self._end):
            span = self.span(done)
            (self._computed if span.kind in COMPUTE else self._updated)[span.step].append(done)
            self._passes[span.kind, self._stages[done[0]], span.step, span.microbatch].append(done)
        self._on_wire: dict[tuple[int, int], list[Span]] = defaultdict(list)
        for span in (span for timeline in timelines for span in timeline.spans if span.kind in WIRE):
            self._on_wire[span.step, span.microbatch].append(span)
        self._waits_for = 2 if any(map(_overlaps, self._lanes)) else 1
        """A step's first pass needs the update of the step this many before it."""

    def span(self, done: SpanIndex) -> Span:
        return self._lanes[done[0]][done[1]]

    def last(self) -> SpanIndex | None:
        return max(((peer, len(lane) - 1) for peer, lane in enumerate(self._lanes) if lane), key=self._end, default=None)

    def needed_by(self, done: SpanIndex) -> SpanIndex | None:
        """The predecessor: the span that ended last among those this one needed."""
        peer, at = done
        known = [(peer, at - 1)] if at else []
        elsewhere = self._elsewhere(self._stages[peer], self.span(done))
        known += [elsewhere] if elsewhere else []
        earlier = [each for each in known if self.span(each).began_s < self.span(done).began_s]
        return max(earlier, key=self._end, default=None)

    def _elsewhere(self, stage: int, span: Span) -> SpanIndex | None:
        match span.kind:
            case SpanKind.FORWARD if stage > 0:
                found = self._passes.get((SpanKind.FORWARD, stage - 1, span.step, span.microbatch), [])
            case SpanKind.FORWARD:
                found = self._updated.get(span.step - self._waits_for, [])
            case SpanKind.BACKWARD | SpanKind.RECOMPUTE:
                found = self._passes.get((SpanKind.BACKWARD, stage + 1, span.step, span.microbatch), [])
            case _:
                found = self._computed.get(span.step, [])
        at = bisect_right(found, span.began_s, key=self._end)
        return found[max(0, at - 1)] if found else None  # where clocks differ, a cause may seem to end after its effect began

    def _end(self, done: SpanIndex) -> float:
        return self.span(done).ended_s

    def between(self, done: SpanIndex, before: SpanIndex, gap: Interval) -> Iterator[tuple[str, float, float]]:
        """Divide the gap between two spans of the path into step end, wire and waiting."""
        span = self.span(done)
        if UPDATE & {span.kind, self.span(before).kind}:
            yield "step_end", *gap
            return
        at_s, ends_s = gap
        for began_s, ended_s in merged(clipped(self._on_wire[span.step, span.microbatch], WIRE, gap)):
            yield "wait", at_s, began_s
            yield "wire", began_s, ended_s
            at_s = ended_s
        yield "wait", at_s, ends_s


def _overlaps(lane: Sequence[Span]) -> bool:
    """True if a peer computed a step before it had applied the one before."""
    applied = {span.step: span.began_s for span in lane if span.kind in UPDATE}
    return any(span.kind is SpanKind.FORWARD and span.began_s < applied.get(span.step - 1, span.began_s) for span in lane)
