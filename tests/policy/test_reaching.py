"""When silence is a peer's own: everybody fell silent at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.swarm.reaching import all_gone_silent, missed_since
from peerd.table.record import PeerId
from peerd.table.swarm_view import SwarmView
from tests.strategies import member

TTL_S = 3.0
NEVER = float("-inf")
heard_times = st.lists(st.floats(0, 20), max_size=6)


def heard_at(*times_s: float, leaving: bool = False) -> SwarmView:
    """I, and one other for each time at which it was heard last."""
    view = SwarmView(me=PeerId("me"), ttl_s=TTL_S)
    view.merge(member("me"), 0.0)
    for number, time_s in enumerate(times_s):
        view.merge(member(f"p{number}", leaving=leaving), time_s)
    return view


def test_two_that_fall_silent_together_are_asked_and_one_alone_is_not() -> None:
    assert all_gone_silent(heard_at(10.0, 11.0), 14.5, NEVER) == ("p0", "p1")
    assert all_gone_silent(heard_at(11.0), 14.5, NEVER) == ()
    assert all_gone_silent(heard_at(5.0, 11.0), 14.5, NEVER) == (), "the first had died before"
    assert all_gone_silent(heard_at(10.0, 11.0, leaving=True), 14.5, NEVER) == (), "they said that they go"


@given(heard_times, st.floats(0, 30))
def test_nobody_is_asked_while_somebody_is_heard(times_s: list[float], now_s: float) -> None:
    if any(now_s - time_s < TTL_S for time_s in times_s):
        assert all_gone_silent(heard_at(*times_s), now_s, NEVER) == ()


@given(heard_times, st.floats(0, 30))
def test_nobody_is_asked_again_before_somebody_was_heard(times_s: list[float], now_s: float) -> None:
    assert all_gone_silent(heard_at(*times_s), now_s, max(times_s, default=0.0)) == ()


@given(heard_times, st.floats(0, 30))
def test_a_peer_that_fenced_itself_asks_nobody(times_s: list[float], now_s: float) -> None:
    view = heard_at(*times_s)
    view.clear()
    assert all_gone_silent(view, now_s, NEVER) == ()


def test_a_fence_makes_nobody_missed_for_long() -> None:
    """Its connections to them outlive the fence."""
    view = heard_at(10.0, 11.0)
    assert missed_since({}, view, view.live(12.0), 12.0) == {}
    view.clear()
    missed = missed_since({}, view, view.live(12.5), 12.5)
    assert missed == {"p0": 12.5, "p1": 12.5}
    view.merge(member("p0", version=2), 13.0)
    assert missed_since(missed, view, view.live(13.0), 13.0) == {"p1": 12.5}
