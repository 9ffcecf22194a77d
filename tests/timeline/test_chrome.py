"""The file for Perfetto follows the Trace Event Format, and every span lies in its row."""

from __future__ import annotations

import json
from collections import Counter
from itertools import accumulate, pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from peerd.timeline.chrome import ROWS, chrome_trace, in_lanes
from peerd.timeline.spans import PeerTimeline, Span, SpanKind
from tests.timeline.pipelines import one_step

SILENT = [("12D3KooWabcdefgh", 1, "no answer within 5 s")]


def written() -> dict[str, Any]:
    told: dict[str, Any] = json.loads(json.dumps(chrome_trace(one_step(), SILENT, {"run": "paper"})))
    return told


def events(phase: str) -> list[dict[str, Any]]:
    return [event for event in written()["traceEvents"] if event["ph"] == phase]


def test_every_event_has_the_fields_of_its_kind() -> None:
    wanted = {"X": {"name", "ts", "dur", "pid", "tid"}, "M": {"name", "pid", "args"}, "i": {"name", "ts", "pid", "s"}}
    wanted |= {"s": {"name", "id", "ts", "pid", "tid", "cat"}, "f": {"name", "id", "ts", "pid", "tid", "cat", "bp"}}
    for event in written()["traceEvents"]:
        assert wanted[event["ph"]] <= event.keys()
        assert event.get("ts", 0) >= 0
    assert written()["displayTimeUnit"] == "ms"
    assert written()["otherData"] == {"run": "paper"}


def assert_viewers_can_read(told: dict[str, Any]) -> None:
    """The rules of the Trace Event Format that Chrome's and Perfetto's importers enforce."""
    events = told["traceEvents"]
    processes = {event["pid"] for event in events if event["ph"] == "M" and event["name"] == "process_name"}
    threads = {(event["pid"], event["tid"]) for event in events if event["ph"] == "M" and event["name"] == "thread_name"}
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    arrows: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        assert event["ph"] in "XMisf"
        assert event["pid"] in processes
        assert type(event.get("tid", 0)) is int
        if event["ph"] == "X":
            assert (event["pid"], event["tid"]) in threads
            assert min(event["ts"], event["dur"]) >= 0
            slices.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] in "sf":
            arrows.setdefault(event["id"], []).append(event)
    for row in slices.values():
        for (_, ends), (begins, _) in pairwise(sorted(row)):
            assert begins > ends - 1e-3, "less than a nanosecond, which is what viewers count in"
    for arrow in arrows.values():
        assert sorted(end["ph"] for end in arrow) == ["f", "s"]
        assert len({(end["name"], end["cat"]) for end in arrow}) == 1
        for end in arrow:  # an end binds to the slice around it
            assert any(begins <= end["ts"] <= ends for begins, ends in slices[end["pid"], end["tid"]])


def test_viewers_can_read_it() -> None:
    assert_viewers_can_read(written())


TIMES_S = st.floats(0, 100, allow_nan=False).map(lambda s: round(s, 7))
SPANS = st.builds(
    lambda kind, began_s, took_s, number, peer: Span(kind, began_s, began_s + took_s, 0, number, peer, 8),
    st.sampled_from(SpanKind),
    TIMES_S,
    TIMES_S.map(lambda s: s / 50),
    st.integers(-1, 3),
    st.sampled_from("ab"),
)


@given(st.lists(SPANS, max_size=30), st.lists(SPANS, max_size=30))
def test_viewers_can_read_whatever_peers_did(first: list[Span], second: list[Span]) -> None:
    timelines = [PeerTimeline(peer="a", stage=0, spans=first), PeerTimeline(peer="b", stage=1, spans=second)]
    assert_viewers_can_read(json.loads(json.dumps(chrome_trace(timelines, SILENT, {}))))


@given(st.floats(0, 1000), st.lists(st.floats(1e-7, 1e-2), min_size=2, max_size=20))
def test_what_follows_at_once_does_not_overlap(began_s: float, took_s: list[float]) -> None:
    ends = list(accumulate([began_s, *took_s]))
    spans = [Span(SpanKind.FORWARD, begins, end, 0, number) for number, (begins, end) in enumerate(pairwise(ends))]
    assert_viewers_can_read(chrome_trace([PeerTimeline(peer="a", stage=0, spans=spans)], [], {}))


def test_an_arrow_that_was_sent_twice_or_never_received_is_left_out() -> None:
    send = Span(SpanKind.SEND, 1, 2, 0, 0, "b", 8)
    receive = Span(SpanKind.RECEIVE, 1, 2, 0, 0, "a", 8)
    for sends, receives, arrows in (([send], [receive], 1), ([send, shift(send)], [receive], 0), ([send], [], 0), ([], [receive], 0)):
        timelines = [PeerTimeline(peer="a", stage=0, spans=sends), PeerTimeline(peer="b", stage=1, spans=receives)]
        told = chrome_trace(timelines, [], {})["traceEvents"]
        assert sum(event["ph"] in "sf" for event in told) == 2 * arrows


def shift(span: Span) -> Span:
    return span._replace(began_s=span.began_s + 3, ended_s=span.ended_s + 3)


def test_each_peer_is_a_process_with_a_row_for_each_thing_it_does_at_a_time() -> None:
    names = {event["pid"]: event["args"]["name"] for event in events("M") if event["name"] == "process_name"}
    assert names == {1: "stage 0, peer a", 2: "stage 1, peer b", 3: "stage 1, peer ..cdefgh (told nothing)"}
    rows = {(event["pid"], event["args"]["name"]) for event in events("M") if event["name"] == "thread_name"}
    assert {(1, "step"), (1, "compute"), (1, "sending"), (1, "receiving"), (1, "waiting")} <= rows


def test_times_are_microseconds_from_the_first_thing_on() -> None:
    (backward,) = [event for event in events("X") if event["pid"] == 1 and event["name"] == "backward 0"]
    assert (backward["ts"], backward["dur"]) == (6e6, 2e6)
    assert backward["args"] == {"step": 0, "microbatch": 0}


def test_arrows_lead_from_each_sending_to_its_receiving() -> None:
    begins, ends = events("s"), events("f")
    assert Counter((event["id"], event["name"]) for event in begins) == Counter((event["id"], event["name"]) for event in ends)
    assert len(begins) == 2


def test_a_peer_that_told_nothing_is_named_with_the_reason() -> None:
    (said,) = events("i")
    assert said["name"] == "told nothing: no answer within 5 s"


def test_every_kind_has_a_row() -> None:
    assert sorted(kind for _, kinds in ROWS for kind in kinds) == sorted(SpanKind)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=20))
def test_no_lane_holds_two_spans_at_once(given: list[tuple[int, int]]) -> None:
    spans = [Span(SpanKind.BELOW, began_s, began_s + took_s, 0) for began_s, took_s in given]
    free_from: dict[int, float] = {}
    for lane, span in in_lanes(spans):
        assert free_from.get(lane, 0.0) <= span.began_s
        free_from[lane] = span.ended_s
    assert len(free_from) <= max((sum(s.began_s <= t.began_s <= s.ended_s for s in spans) for t in spans), default=0)


def test_a_timeline_without_spans_makes_a_file_too() -> None:
    told = chrome_trace([PeerTimeline(peer="a", stage=0, spans=[])], [], {})
    assert {event["ph"] for event in told["traceEvents"]} == {"M"}
