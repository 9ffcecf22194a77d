"""How many connections a path has follows from what is lost, and one that is lost because of them ends them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.route.parallel import GROWTH, LEAST_SEGMENTS, LOOKS_ALONE, MOST, MOST_ALONE, Parallel


def looks(parallel: Parallel, share: Callable[[int], float], count: int, segments: int = 1000) -> list[int]:
    """The numbers after each of so many looks. `share`: of segments lost, by the number of connections."""
    found = []
    for _ in range(count):
        parallel.counted(segments, round(share(parallel.number) * segments), 20.0)
        found.append(parallel.number)
    return found


def test_a_line_that_loses_segments_by_itself_soon_has_many() -> None:
    assert looks(Parallel(), lambda _number: 0.03, 4) == [GROWTH, 30, 30, 30]
    assert looks(Parallel(), lambda _number: 0.2, 3)[-1] == MOST


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.009])
def test_a_line_that_loses_little_has_one(share: float) -> None:
    assert set(looks(Parallel(), lambda _number: share, 20)) == {1}


def test_a_full_line_that_loses_more_with_more_goes_back_to_one_and_several_are_tried_ever_more_seldom() -> None:
    numbers = looks(Parallel(), lambda number: min(0.3, 0.012 * number**2), 20 * MOST_ALONE)
    tried = [look for look, number in enumerate(numbers) if number > 1]
    pauses = [later - earlier for earlier, later in itertools.pairwise(tried)]
    assert pauses[0] == LOOKS_ALONE + 1
    assert pauses == sorted(pauses)
    assert pauses[-1] == MOST_ALONE + 1


@given(st.integers(0, 1 << 32))
def test_shares_that_differ_by_chance_make_no_line_a_full_one(seed: int) -> None:
    chance, parallel = random.Random(seed), Parallel()
    for _ in range(100):
        parallel.counted(LEAST_SEGMENTS, sum(chance.random() < 0.03 for _ in range(LEAST_SEGMENTS)), 2.0)
    assert parallel._next_alone <= 2 * LOOKS_ALONE


def test_a_line_that_loses_no_more_has_fewer_from_look_to_look() -> None:
    parallel = Parallel()
    looks(parallel, lambda _number: 0.03, 3)
    assert looks(parallel, lambda _number: 0.0, 6) == [15, 7, 3, 1, 1, 1]


def test_a_share_is_taken_of_enough_segments() -> None:
    parallel = Parallel()
    assert [parallel.counted(LEAST_SEGMENTS // 4, LEAST_SEGMENTS // 40, 1.0) for _ in range(4)] == [False, False, False, True]


def test_where_none_opens_one_is_left_for_long() -> None:
    parallel = Parallel()
    looks(parallel, lambda _number: 0.03, 3)
    parallel.failed()
    assert set(looks(parallel, lambda _number: 0.03, LOOKS_ALONE)) == {1}
    assert looks(parallel, lambda _number: 0.03, 2)[-1] > 1


@pytest.mark.parametrize(("pace", "share"), [(570, 0.3), (570, 0.01), (140, 0.2), (1700, 0.01)])
def test_a_queue_that_was_full_once_makes_no_line_that_is_quick_one_of_several(pace: int, share: float) -> None:
    """As at the end of TCP's slow start."""
    parallel = Parallel()
    assert not parallel.counted(pace, round(share * pace), 1.0)
    assert parallel.number == 1


@pytest.mark.parametrize(("round_trip_s", "number"), [(0.25, GROWTH), (0.4, 1), (0.66, 1)])
def test_a_slow_line_on_which_packets_queue_for_long_is_no_lossy_one(round_trip_s: float, number: int) -> None:
    """5 Mbit/s that three paths share, 144 segments a second for each. Where packets take so long they wait in the line's own queue."""
    parallel = Parallel()
    parallel.counted(144, 2, 1.0, round_trip_s)
    assert parallel.number == number
