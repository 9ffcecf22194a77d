"""The shares of a step's time, and of its critical path."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.timeline.critical import critical_shares
from peerd.timeline.shares import Shares, by_stage, merged, shares_of, window
from peerd.timeline.spans import PeerTimeline, Span, SpanKind
from tests.timeline.pipelines import microbatch, one_step, shifted

spans = st.lists(
    st.builds(
        lambda kind, began_s, took_s, step, number: Span(kind, began_s, began_s + took_s, step, number),
        st.sampled_from(SpanKind),
        st.integers(0, 50).map(float),
        st.integers(0, 20).map(float),
        st.integers(0, 2),
        st.integers(-1, 2),
    ),
    max_size=25,
)
timelines = st.lists(
    st.builds(lambda stage, each: PeerTimeline(peer=f"p{stage}", stage=stage, spans=each), st.integers(0, 2), spans), max_size=4
)


def total(shares: Shares) -> float:
    return shares.compute + shares.wait + shares.wire + shares.step_end


def test_a_pipeline_that_holds_one_microbatch_computes_in_turn() -> None:
    pipeline = one_step()
    assert window(pipeline) == (0, 10)
    first, last = by_stage(pipeline, window(pipeline))
    assert (first.stage, first.num_peers) == (0, 1)
    assert dataclasses.astuple(first.shares) == pytest.approx((0.3, 0.3, 0.2, 0.2))
    assert dataclasses.astuple(last.shares) == pytest.approx((0.3, 0.3, 0.2, 0.2))


def test_the_critical_path_goes_through_every_stage_and_over_the_wire() -> None:
    """1 + 1 + 2 + 2 s of passes, twice 1 s on the wire, 2 s of the step's end: nothing waits."""
    assert dataclasses.astuple(critical_shares(one_step())) == pytest.approx((0.6, 0.0, 0.2, 0.2))


def test_a_stage_that_always_computes_makes_the_path_and_hides_the_wire() -> None:
    busy = [Span(SpanKind.FORWARD, n, n + 1, 0, n) for n in range(9)]
    idle = [Span(SpanKind.FORWARD, n + 1, n + 1.2, 0, n) for n in range(8)]
    sent = [Span(SpanKind.SEND, n + 0.5, n + 1, 0, n) for n in range(8)]
    end = Span(SpanKind.COMMIT, 9, 10, 0)
    path = critical_shares(
        [PeerTimeline(peer="a", stage=0, spans=[*busy, *sent, end]), PeerTimeline(peer="b", stage=1, spans=[*idle, end])]
    )
    assert path.compute == pytest.approx(0.9)
    assert path.step_end == pytest.approx(0.1)


def test_two_steps_are_joined_where_the_first_one_commits() -> None:
    again = [
        dataclasses.replace(timeline, spans=[*timeline.spans, *(span._replace(step=1) for span in shifted(timeline, 10.5).spans)])
        for timeline in one_step()
    ]
    path = critical_shares(again)
    assert path.compute == pytest.approx(12 / 20.5)
    assert path.step_end == pytest.approx(4.5 / 20.5)


def test_where_steps_overlap_nothing_of_a_steps_end_is_on_the_path() -> None:
    """Peer b averages step 0 while both compute step 1; step 1's first pass waits for no update of step 0."""
    passes = [Span(SpanKind.FORWARD if n % 2 == 0 else SpanKind.BACKWARD, n, n + 1, n // 4, n // 2 % 2) for n in range(8)]
    end = [Span(SpanKind.AVERAGING, 4, 6, 0), Span(SpanKind.AVERAGED, 6, 6.2, 0), Span(SpanKind.COMMIT, 7.9, 8, 0)]
    shares = critical_shares([PeerTimeline(peer="a", stage=0, spans=[*passes, *end])])
    assert shares.compute == pytest.approx(1.0, abs=0.02)
    assert shares.step_end == pytest.approx(0.0, abs=0.02)


def test_a_clock_that_is_a_little_off_changes_the_path_a_little() -> None:
    first, last = one_step()
    path = critical_shares([first, shifted(last, 0.05)])
    assert path.compute == pytest.approx(0.6, abs=0.02)
    assert total(path) == pytest.approx(1.0)


def test_a_peer_that_told_nothing_leaves_the_path_of_the_others() -> None:
    path = critical_shares(one_step()[:1])
    assert path.compute == pytest.approx(0.3)
    assert path.wire == pytest.approx(0.2)


def test_of_two_peers_of_a_stage_the_mean_is_told() -> None:
    pipeline = one_step()
    idle = PeerTimeline(peer="c", stage=0, spans=[Span(SpanKind.AVERAGED, 8, 10, 0)])
    assert by_stage([*pipeline, idle], (0, 10))[0].shares.compute == pytest.approx(0.15)


def test_nothing_is_told_of_nothing() -> None:
    assert critical_shares([]) == shares_of([], (0, 0)) == Shares()
    assert by_stage([], (0, 0)) == []


@given(timelines)
def test_every_moment_is_counted_once(given: list[PeerTimeline]) -> None:
    within = window(given)
    for shares in [found.shares for found in by_stage(given, within)]:
        assert within[0] == within[1] or total(shares) == pytest.approx(1.0)
        assert min(dataclasses.astuple(shares)) >= 0


@given(timelines)
def test_the_critical_path_fills_the_whole_time_and_no_more(given: list[PeerTimeline]) -> None:
    within = window(given)
    path = critical_shares(given)
    assert min(dataclasses.astuple(path)) >= 0
    assert within[0] == within[1] or total(path) == pytest.approx(1.0)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda two: (float(min(two)), float(max(two)))), max_size=10))
def test_a_union_covers_what_its_parts_cover(parts: list[tuple[float, float]]) -> None:
    union = merged(parts)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(union))
    for began_s, ended_s in parts:
        assert any(low <= began_s and ended_s <= high for low, high in union)


def test_many_microbatches_take_no_time_to_walk_through() -> None:
    """Two hundred microbatches in a pipeline of two: each pass is looked at a few times, and none is compared with all others."""
    both = [microbatch(number, 2.0 * number) for number in range(200)]
    pipeline = [PeerTimeline(peer=name, stage=stage, spans=[s for one in both for s in one[stage]]) for stage, name in enumerate("ab")]
    assert total(critical_shares(pipeline)) == pytest.approx(1.0)
