"""Synthetic timelines: a pipeline with one peer per stage, second by second."""

from __future__ import annotations

from dataclasses import replace

from peerd.timeline.spans import PeerTimeline, Span, SpanKind


def microbatch(number: int, begins_s: float) -> tuple[list[Span], list[Span]]:
    """One microbatch alone in a pipeline of two: 1 s forward, 1 s wire, 1 s and 2 s at the last stage, 1 s wire, 2 s backward."""
    t = begins_s
    first = [
        Span(SpanKind.FORWARD, t, t + 1, 0, number),
        Span(SpanKind.SEND, t + 1, t + 2, 0, number, "b", 100),
        Span(SpanKind.RECEIVE_GRADIENT, t + 5, t + 6, 0, number, "b", 100),
        Span(SpanKind.BELOW, t + 1, t + 6, 0, number, "b"),
        Span(SpanKind.BACKWARD, t + 6, t + 8, 0, number),
    ]
    last = [
        Span(SpanKind.RECEIVE, t + 1, t + 2, 0, number, "a", 100),
        Span(SpanKind.FORWARD, t + 2, t + 3, 0, number),
        Span(SpanKind.BACKWARD, t + 3, t + 5, 0, number),
        Span(SpanKind.SEND_GRADIENT, t + 5, t + 6, 0, number, "a", 100),
    ]
    return first, last


def one_step() -> list[PeerTimeline]:
    """A step of one microbatch in 10 s: 8 s of the microbatch, then 1 s until all have averaged, 0.5 s optimizer, 0.5 s commit."""
    first, last = microbatch(0, 0.0)
    end = [
        Span(SpanKind.AVERAGING, 8, 8.5, 0),
        Span(SpanKind.AVERAGED, 8.5, 9, 0),
        Span(SpanKind.OPTIMIZER, 9, 9.5, 0),
        Span(SpanKind.COMMIT, 9.5, 10, 0),
    ]
    return [PeerTimeline(peer="a", stage=0, spans=[*first, *end]), PeerTimeline(peer="b", stage=1, spans=[*last, *end])]


def shifted(timeline: PeerTimeline, by_s: float) -> PeerTimeline:
    moved = [span._replace(began_s=span.began_s + by_s, ended_s=span.ended_s + by_s) for span in timeline.spans]
    return replace(timeline, spans=moved)
