"""Mates that do not show what their part of an average is made of are left out of steps, ever longer."""

from __future__ import annotations

from peerd.policy.step.withholding import ENOUGH, MOST_WITHHOLDING, OF_THE_LAST, Withholding
from peerd.table.record import PeerId

MATE = PeerId("mate")


def steps_without(seen: Withholding, last: int = 200) -> list[int]:
    return [step for step in range(last) if seen.left_out(step) == (MATE,)]


def test_one_step_costs_nothing_and_two_of_ten_eight_steps() -> None:
    seen = Withholding()
    assert not seen.withheld(MATE, 3)
    assert steps_without(seen) == []
    assert seen.withheld(MATE, 5)
    assert max(steps_without(seen)) == 5 + 1 + 8


def test_two_steps_that_are_far_apart_cost_nothing() -> None:
    seen = Withholding()
    assert not any(seen.withheld(MATE, step) for step in range(0, 100, OF_THE_LAST))
    assert steps_without(seen) == []


def test_one_step_counts_once() -> None:
    seen = Withholding()
    assert not any(seen.withheld(MATE, 7) for _ in range(3))


def test_each_further_time_lasts_twice_as_long() -> None:
    seen, found, until = Withholding(), list[int](), -1
    for _ in range(12):
        for step in (until + 1, until + ENOUGH):
            is_left_out = seen.withheld(MATE, step)
        assert is_left_out
        until = step
        while seen.left_out(until + 1):
            until += 1
        found.append(until - step - 1)
    assert found == [8 * 2 ** min(number, 8) for number in range(12)]


def test_only_the_last_peers_are_remembered() -> None:
    seen = Withholding()
    for number in range(MOST_WITHHOLDING + 1):
        for step in (0, 1):
            seen.withheld(PeerId(f"p{number}"), step)
    assert len(seen.left_out(1)) == MOST_WITHHOLDING
    assert PeerId("p0") not in seen.left_out(1)
