"""Favours are rationed: within any minute nobody gets more than its share, and all together no more than the whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.owner.rate_limit import WINDOW_S, Ration
from peerd.table.record import PeerId

calls = st.lists(st.tuples(st.floats(0, 30), st.sampled_from("abcdef")), max_size=60)


@given(calls, st.integers(1, 4), st.integers(1, 10))
def test_no_minute_holds_more_than_the_ration(gaps: list[tuple[float, str]], each: int, total: int) -> None:
    ration, now_s, granted = Ration(each=each, total=total), 0.0, []
    for gap_s, caller in gaps:
        now_s += gap_s
        if not ration.take(PeerId(caller), now_s):
            granted.append((now_s, caller))
        lately = [peer for at_s, peer in granted if at_s > now_s - WINDOW_S]
        assert len(lately) <= total
        assert max((lately.count(peer) for peer in lately), default=0) <= each


def test_who_has_had_its_share_does_not_use_up_that_of_others() -> None:
    ration = Ration(each=2, total=3)
    assert [bool(ration.take(PeerId("a"), 0.0)) for _ in range(5)] == [False, False, True, True, True]
    assert ration.take(PeerId("b"), 1.0) == ""
    assert "others" in ration.take(PeerId("c"), 1.0)


def test_a_minute_later_it_is_granted_again() -> None:
    ration = Ration(each=1, total=1)
    assert ration.take(PeerId("a"), 5.0) == ""
    assert ration.take(PeerId("a"), 5.0 + WINDOW_S - 0.1)
    assert ration.take(PeerId("a"), 5.0 + WINDOW_S) == ""
