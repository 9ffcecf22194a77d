"""Writes timelines in the Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing open. Pure.

A peer is shown as a process, its concurrent activities as threads. An arrow leads from each send span to its receive span.
Viewers drop a slice that overlaps the one before it in its row, and an arrow that does not have exactly two ends.
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from peerd.peer_names import short_id
from peerd.timeline.shares import window
from peerd.timeline.spans import COMPUTE, PHASES, UPDATE, PeerTimeline, Span, SpanKind

ROWS = (
    ("step", PHASES),
    ("compute", COMPUTE | UPDATE),
    ("sending", frozenset({SpanKind.SEND, SpanKind.SEND_GRADIENT})),
    ("receiving", frozenset({SpanKind.RECEIVE, SpanKind.RECEIVE_GRADIENT})),
    ("averaging", frozenset({SpanKind.EXCHANGE})),
    ("waiting", frozenset({SpanKind.QUEUED, SpanKind.BELOW})),
)
LANES_PER_ROW = 1000
_ARROWS = {SpanKind.SEND: ("s", "activations"), SpanKind.RECEIVE: ("f", "activations")}
_ARROWS |= {SpanKind.SEND_GRADIENT: ("s", "gradients"), SpanKind.RECEIVE_GRADIENT: ("f", "gradients")}


def chrome_trace(timelines: Sequence[PeerTimeline], silent: Sequence[tuple[str, int, str]], about: Mapping[str, Any]) -> dict[str, Any]:
    """The whole trace. `silent` lists the peers that sent no timeline (id, stage, reason); `about` is copied into the trace."""
    began_s = window(timelines)[0]
    events: list[dict[str, Any]] = []
    for process, timeline in enumerate(timelines, start=1):
        events += _process(process, timeline.stage, f"stage {timeline.stage}, peer {short_id(timeline.peer)}")
        events += _events(process, timeline, began_s)
    events = _with_whole_arrows(events)
    for process, (peer, stage, reason) in enumerate(silent, start=len(timelines) + 1):
        events += _process(process, stage, f"stage {stage}, peer {short_id(peer)} (told nothing)")
        events.append({"ph": "i", "s": "p", "name": f"told nothing: {reason}", "pid": process, "tid": 0, "ts": 0})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {name: str(value) for name, value in about.items()}}


def _process(process: int, stage: int, name: str) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "tid": 0, "args": {"sort_index": 1000 * stage + process}}


def _events(process: int, timeline: PeerTimeline, began_s: float) -> Iterator[dict[str, Any]]:
    for row, (name, kinds) in enumerate(ROWS):
        named: set[int] = set()
        for lane, span in in_lanes(span for span in timeline.spans if span.kind in kinds):
            thread = row * LANES_PER_ROW + lane
            if lane not in named:
                named.add(lane)
                yield {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": name}}
                yield {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": thread, "args": {"sort_index": thread}}
            begins_us, ends_us = _us(span.began_s - began_s), _us(span.ended_s - began_s)
            place = {"pid": process, "tid": thread, "ts": begins_us}
            took_us = round(ends_us - begins_us, 1)  # from the rounded ends, so that a slice that follows at once does not overlap
            yield {"ph": "X", "name": _name(span), "cat": name, "dur": took_us, "args": _arguments(span), **place}
            if span.kind in _ARROWS and span.microbatch >= 0:
                yield place | _arrow(span, timeline.peer, begins_us, took_us)


def in_lanes(spans: Iterable[Span]) -> Iterator[tuple[int, Span]]:
    """Give each span the first free lane: viewers cannot show overlapping spans in one lane."""
    free_from: list[float] = []
    for span in sorted(spans, key=lambda span: (span.began_s, -span.ended_s)):
        lane = next((lane for lane, free_s in enumerate(free_from) if free_s <= span.began_s), len(free_from))
        if lane == len(free_from):
            free_from.append(0.0)
        free_from[lane] = span.ended_s
        yield lane, span


def _with_whole_arrows(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drop arrows that do not have exactly two ends: the tensor was sent twice, or the other peer told nothing of it."""
    ends = Counter((event["id"], event["ph"]) for event in events if "id" in event)
    return [event for event in events if "id" not in event or ends[event["id"], "s"] == ends[event["id"], "f"] == 1]


def _arrow(span: Span, me: str, begins_us: float, took_us: float) -> dict[str, Any]:
    """One end of an arrow. Both ends compute the same id from the kind, the step, the microbatch, the sender and the receiver.

    The arrow ends in the middle of the receive span, so that small clock differences do not reverse it.
    """
    begins, what = _ARROWS[span.kind]
    source, target = (me, span.peer) if begins == "s" else (span.peer, me)
    number = zlib.crc32(f"{what} {span.step} {span.microbatch} {source} {target}".encode())
    arrow = {"ph": begins, "name": what, "cat": "arrow", "id": number}
    return arrow | ({"bp": "e", "ts": round(begins_us + took_us / 2, 1)} if begins == "f" else {})


def _name(span: Span) -> str:
    name = span.kind.name.lower().replace("_", " ")
    return f"{name} {span.microbatch}" if span.microbatch >= 0 else name


def _arguments(span: Span) -> dict[str, Any]:
    known: dict[str, Any] = {"step": span.step}
    known |= {"microbatch": span.microbatch} if span.microbatch >= 0 else {}
    known |= {"peer": span.peer} if span.peer else {}
    return known | ({"bytes": span.num_bytes} if span.num_bytes else {})


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)
