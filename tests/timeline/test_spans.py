"""The ring of a peer's latest spans is bounded, thread-safe and cheap."""

from __future__ import annotations

import threading
import time
import timeit
import tracemalloc

from peerd.timeline.spans import Span, SpanKind, SpanRing
from tests.swarm.machine import slowdown


def ring_of(*spans: Span, most: int = 100) -> SpanRing:
    ring = SpanRing(most)
    for span in spans:
        ring.put(span)
    return ring


def test_the_spans_of_the_steps_asked_for_come_in_order_and_are_said_to_be_all() -> None:
    ring = ring_of(*(Span(SpanKind.FORWARD, step, step + 1, step) for step in range(5)))
    spans, complete = ring.of_steps(1, 3, 10)
    assert [span.step for span in spans] == [1, 2, 3]
    assert complete


def test_of_more_than_may_be_told_the_newest_come() -> None:
    ring = ring_of(*(Span(SpanKind.FORWARD, n, n + 1, 0, n) for n in range(5)))
    spans, complete = ring.of_steps(0, 0, 2)
    assert [span.microbatch for span in spans] == [3, 4]
    assert not complete
    assert ring.of_steps(0, 0, 0) == ([], False)


def test_a_ring_that_has_forgotten_some_of_a_step_says_so() -> None:
    ring = ring_of(*(Span(SpanKind.FORWARD, n, n + 1, n // 4, n) for n in range(10)), most=7)
    assert ring.of_steps(0, 0, 10)[1] is False
    assert ring.of_steps(1, 2, 10)[1] is True


def test_a_ring_gives_back_what_was_put_into_it() -> None:
    spans = [Span(kind, -1.5, 2.0**40 + 0.1, 10**12, number, f"peer {number % 3}", 10**11) for number, kind in enumerate(SpanKind)]
    assert ring_of(*spans).of_steps(10**12, 10**12, 100) == (spans, True)
    assert ring_of(*spans, most=4).of_steps(10**12, 10**12, 100) == (spans[-4:], False)


def test_a_full_ring_takes_no_more_memory() -> None:
    tracemalloc.start()
    try:
        ring = SpanRing(1000)
        before = tracemalloc.get_traced_memory()[0]
        for number in range(3000):
            ring.put(Span(SpanKind.FORWARD, number + 0.5, number + 0.7, number + 1000, number, "peer", 10**6))
        assert tracemalloc.get_traced_memory()[0] - before < 2000
    finally:
        tracemalloc.stop()


def test_a_ring_of_none_keeps_nothing_and_says_nothing() -> None:
    ring = ring_of(Span(SpanKind.FORWARD, 0, 1, 0), most=0)
    assert ring.of_steps(0, 0, 10) == ([], True)
    assert ring.spent_s[SpanKind.FORWARD] == 1


def test_the_spans_of_a_microbatch_are_found_from_a_moment_on() -> None:
    ring = ring_of(*(Span(SpanKind.FORWARD, n, n + 1, 0, n % 2) for n in range(6)))
    assert [span.began_s for span in ring.of_microbatch(0, 1, 3.5)] == [3, 5]


def test_it_can_be_read_while_another_thread_adds() -> None:
    ring, stop = SpanRing(1000), threading.Event()

    def add() -> None:
        while not stop.is_set():
            ring.add(SpanKind.BACKWARD, 0.0, 1)

    adding = threading.Thread(target=add)
    adding.start()
    try:
        ends_s = time.monotonic() + 0.3
        while time.monotonic() < ends_s:
            spans, _ = ring.of_steps(0, 1, 1000)
            assert all(span.step == 1 for span in spans)
    finally:
        stop.set()
        adding.join()


def test_a_span_costs_a_few_microseconds() -> None:
    """At ten spans for a microbatch of 20 ms this is 0.1 % of its time."""
    ring = SpanRing()
    took_s = min(timeit.repeat(lambda: ring.add(SpanKind.FORWARD, 0.0, 1, 2), number=10_000, repeat=5)) / 10_000
    assert took_s < 10e-6 * slowdown()
