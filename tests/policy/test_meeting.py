"""Whom of the strangers a peer calls, and how many of their records it reads."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.swarm.meeting import (
    AT_ONCE,
    LONGEST_PAUSE_LIVES,
    MOST_TELLERS,
    READ_AT_FIRST,
    READ_PER_PERIOD,
    WARY_AFTER,
    WARY_LIVES,
    Meetings,
    Reading,
)
from peerd.table.record import PeerId

PERIOD_S, LIFE_S = 5.0, 15.0
MANY = [PeerId(f"g{number}") for number in range(100)]


def meetings() -> Meetings:
    return Meetings(period_s=PERIOD_S, life_s=LIFE_S)


def test_a_stranger_gets_a_period_to_prove_itself_before_it_is_called() -> None:
    mine = meetings()
    assert mine.whom(MANY[:1], 0.0, 0.0) == []
    assert mine.whom(MANY[:1], PERIOD_S - 0.1, 0.0) == []
    assert mine.whom(MANY[:1], PERIOD_S, 0.0) == MANY[:1]


@given(st.floats(0, 1, exclude_max=True))
def test_a_few_are_called_at_once_and_chance_decides_which(draw: float) -> None:
    mine = meetings()
    mine.whom(MANY, 0.0, draw)
    chosen = mine.whom(MANY, PERIOD_S, draw)
    assert len(set(chosen)) == AT_ONCE
    assert chosen[0] == MANY[int(draw * len(MANY))]


def calls(seconds: int, names: int) -> list[tuple[float, PeerId]]:
    """When a peer calls strangers that never answer, in a look each second."""
    mine, found = meetings(), []
    for now_s in range(seconds):
        for peer in mine.whom(MANY[:names], now_s, 0.0):
            found.append((float(now_s), peer))
            mine.failed(peer, now_s)
    return found


def test_where_many_do_not_answer_one_is_called_each_period() -> None:
    seconds = int(WARY_LIVES * LIFE_S)
    assert WARY_AFTER <= len(calls(seconds, len(MANY))) <= WARY_AFTER + AT_ONCE + seconds / PERIOD_S
    assert calls(seconds, WARY_AFTER - 1)[:AT_ONCE] == [(PERIOD_S, peer) for peer in MANY[:AT_ONCE]]


def test_one_that_does_not_answer_is_called_ever_more_seldom_and_is_no_reason_to_be_wary() -> None:
    times_s = [at_s for at_s, _ in calls(20_000, 1)]
    pauses_s = [after_s - before_s for before_s, after_s in pairwise(times_s)]
    assert pauses_s[:4] == [LIFE_S, 2 * LIFE_S, 4 * LIFE_S, 8 * LIFE_S]
    assert max(pauses_s) == LONGEST_PAUSE_LIVES * LIFE_S


def test_those_that_were_never_called_come_first() -> None:
    mine = meetings()
    mine.whom(MANY[:2], 0.0, 0.0)
    mine.failed(MANY[0], 0.0)
    assert mine.whom(MANY[:2], 1000.0, 0.0) == [MANY[1]]


def test_records_of_strangers_are_read_at_a_rate_for_each_teller() -> None:
    reading, one, other = Reading(PERIOD_S), PeerId("one"), PeerId("other")
    assert sum(reading.may_read(one, 0.0) for _ in range(10_000)) == READ_AT_FIRST
    assert reading.may_read(other, 0.0)
    assert sum(reading.may_read(one, PERIOD_S) for _ in range(10_000)) == READ_PER_PERIOD
    assert sum(reading.may_read(one, 1e6) for _ in range(10_000)) == READ_AT_FIRST


def test_of_many_tellers_those_that_told_last_are_remembered() -> None:
    reading = Reading(PERIOD_S)
    for number in range(MOST_TELLERS + 10):
        reading.may_read(PeerId(f"t{number}"), 0.0)
    assert len(reading._left) == MOST_TELLERS
    assert PeerId("t0") not in reading._left
