"""Timelines travel whole, and those that cannot be are refused."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.daemon.watching.tracing import offset_to
from peerd.errors import BadMessageError, WrongStateError
from peerd.generated import swarm_pb2
from peerd.table.record import RunId
from peerd.timeline.spans import MAX_SPANS, Span, SpanKind, SpanRing
from peerd.wire.swarm_client import ReceivedTimeline, SwarmClient
from peerd.wire.timelines import spans_from, spans_to
from tests.wire.callee import RUN, Callee, new_identity

spans = st.builds(
    lambda kind, began_s, took_s, step, number, peer, size: Span(kind, began_s, began_s + took_s, step, number, peer, size),
    st.sampled_from(SpanKind),
    st.integers(0, 10**6).map(float),
    st.integers(0, 1000).map(float),
    st.integers(0, 2**40),
    st.integers(-1, 8191),
    st.sampled_from(["", "abc", "def"]),
    st.integers(0, 2**40),
)


@given(st.lists(spans, max_size=20), st.booleans())
def test_spans_travel_as_they_are(given: list[Span], complete: bool) -> None:
    reply = swarm_pb2.TimelineReply.FromString(spans_to(given, complete).SerializeToString())
    assert spans_from(reply) == given
    assert reply.complete is complete


def reply_of(**changes: Any) -> swarm_pb2.TimelineReply:
    sound: dict[str, Any] = {
        "peers": ["abc"],
        "kinds": bytes([1]),
        "began_s": [1.0],
        "took_s": [1.0],
        "steps": [1],
        "microbatches": [0],
        "other": [1],
        "num_bytes": [5],
    }
    return swarm_pb2.TimelineReply(**{**sound, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"kinds": bytes([1, 1])},
        {"kinds": bytes([0])},
        {"kinds": bytes([99])},
        {"began_s": [float("nan")]},
        {"took_s": [float("inf")]},
        {"took_s": [-1.0]},
        {"steps": []},
        {"steps": [1 << 63]},
        {"microbatches": [-2]},
        {"other": [2]},
        {"peers": ["a b"]},
        {"peers": ["x" * 65]},
        {"num_bytes": [1 << 63]},
        {"kinds": bytes(MAX_SPANS + 1), "began_s": [0.0] * (MAX_SPANS + 1)},
    ],
)
def test_a_timeline_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    assert spans_from(reply_of())
    with pytest.raises(BadMessageError):
        spans_from(reply_of(**changes))


async def test_a_peer_tells_the_last_spans_of_some_steps_and_its_clock(callee: Callee) -> None:
    ring = callee.door.spans = SpanRing(100)
    for step in range(5):
        ring.add(SpanKind.FORWARD, time.monotonic() - 1, step, 3)
    client = SwarmClient(callee.links(), RUN)
    told = await client.timeline(callee.caller.peer, (1, 3), 2, 5.0)
    assert [(span.kind, span.step, span.microbatch) for span in told.spans] == [(SpanKind.FORWARD, 2, 3), (SpanKind.FORWARD, 3, 3)]
    assert not told.complete
    probe = await client.timeline(callee.caller.peer, (1, 3), 0, 5.0)
    assert probe.spans == []
    offset_s, error_s = offset_to([told, probe])
    assert abs(offset_s) <= error_s  # the callee has the very same clock
    assert error_s < 2.0


async def test_timelines_are_made_one_after_another_whoever_asks(callee: Callee) -> None:
    """Each takes a thread for a while; the clock alone is told at once."""
    at_once, most, go_on = 0, 0, threading.Event()

    class Slow(SpanRing):
        def of_steps(self, first: int, last: int, most_spans: int) -> Any:
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            go_on.wait(20)
            at_once -= 1
            return super().of_steps(first, last, most_spans)

    callee.door.spans = Slow(100)
    clients = [SwarmClient(callee.links(other := new_identity()), RUN).timeline(other.peer, (0, 1), 5, 20.0) for _ in range(3)]
    asked = [asyncio.ensure_future(client) for client in clients]
    await SwarmClient(callee.links(), RUN).timeline(callee.caller.peer, (0, 1), 0, 20.0)
    go_on.set()
    await asyncio.gather(*asked)
    assert most == 1


async def test_of_another_run_nothing_is_told(callee: Callee) -> None:
    with pytest.raises(WrongStateError, match="this peer serves run"):
        await SwarmClient(callee.links(), RunId("b" * 32)).timeline(callee.caller.peer, (0, 1), 5, 5.0)


def test_the_quickest_answer_says_most_about_a_clock() -> None:
    slow = ReceivedTimeline(spans=[], complete=True, clock_s=103.5, asked_s=0.0, answered_s=4.0)
    quick = ReceivedTimeline(spans=[], complete=True, clock_s=110.0, asked_s=10.0, answered_s=10.2)
    offset_s, error_s = offset_to([slow, quick])
    assert offset_s == pytest.approx(-99.9)
    assert error_s == pytest.approx(0.1)


async def test_what_crosses_the_wire_is_noted_at_both_ends(callee: Callee) -> None:
    callee.door.spans = callee.state.spans = SpanRing(100)
    await callee.assert_lives()
    kinds = [span.kind for span in callee.door.spans.of_steps(0, 0, 100)[0]]
    assert {SpanKind.RECEIVE, SpanKind.QUEUED, SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.SEND_GRADIENT} == set(kinds)
