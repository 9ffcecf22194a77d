"""How many connections a path has follows from what is lost, and one that is lost because of them ends them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.route.parallel import GROWTH, LEAST_SEGMENTS, LOOKS_ALONE, LOOKS_LOSSY, MOST, MOST_ALONE, Parallel, own_queue_s


def looks(parallel: Parallel, share: Callable[[int], float], count: int, segments: int = 1000) -> list[int]:
    """The numbers after each of so many looks. `share`: of segments lost, by the number of connections."""
    found = []
    for _ in range(count):
        parallel.counted(segments, round(share(parallel.number) * segments), 100.0)
        found.append(parallel.number)
    return found


def test_a_line_that_loses_segments_by_itself_soon_has_many() -> None:
    assert looks(Parallel(), lambda _number: 0.03, LOOKS_LOSSY + 3) == [1] * (LOOKS_LOSSY - 1) + [GROWTH, 30, 30, 30]
    assert looks(Parallel(), lambda _number: 0.2, LOOKS_LOSSY + 2)[-1] == MOST


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
    looks(parallel, lambda _number: 0.03, LOOKS_LOSSY + 2)
    assert looks(parallel, lambda _number: 0.0, 6) == [15, 7, 3, 1, 1, 1]


def test_a_share_is_taken_of_enough_segments() -> None:
    parallel = Parallel()
    looks(parallel, lambda _number: 0.1, LOOKS_LOSSY - 1)
    assert [parallel.counted(LEAST_SEGMENTS // 4, LEAST_SEGMENTS // 40, 1.0) for _ in range(4)] == [False, False, False, True]


def test_where_none_opens_one_is_left_for_long() -> None:
    parallel = Parallel()
    looks(parallel, lambda _number: 0.03, LOOKS_LOSSY + 2)
    parallel.failed()
    assert set(looks(parallel, lambda _number: 0.03, LOOKS_ALONE)) == {1}
    assert looks(parallel, lambda _number: 0.03, 2)[-1] > 1


@pytest.mark.parametrize(("pace", "share"), [(570, 0.3), (570, 0.01), (140, 0.2), (1700, 0.01)])
def test_a_queue_that_was_full_once_makes_no_line_that_is_quick_one_of_several(pace: int, share: float) -> None:
    """As at the end of TCP's slow start."""
    parallel = Parallel()
    assert not any(parallel.counted(pace, round(share * pace), 1.0) for _ in range(2 * LOOKS_LOSSY))


def test_a_queue_that_is_full_now_and_then_makes_no_lossy_line() -> None:
    parallel = Parallel()
    for _ in range(20):
        shares = [*looks(parallel, lambda _number: 0.05, LOOKS_LOSSY - 1), *looks(parallel, lambda _number: 0.0, 1)]
        assert set(shares) == {1}


@pytest.mark.parametrize("busy_s", [0.4, 0.0])
def test_a_path_that_has_little_to_send_is_not_slow_for_what_it_loses(busy_s: float) -> None:
    """100 segments a second of a boundary's tensors, on a line whose queue is full at times; 0: the kernel does not tell."""
    parallel = Parallel()
    assert not any(parallel.counted(100, 5, busy_s) for _ in range(20))


@pytest.mark.parametrize("round_trip_s", [0.16, 0.25])
def test_a_path_that_is_held_back_by_what_it_loses_has_several(round_trip_s: float) -> None:
    """3 % lost, 100 ms of jitter: one connection carries 0.07 MB/s, as measured."""
    parallel = Parallel()
    assert any(parallel.counted(48, 1 + look % 2, 1.0, round_trip_s) for look in range(4 * LOOKS_LOSSY))


@pytest.mark.parametrize("round_trip_s", [0.25, 0.4, 0.66])
def test_a_slow_line_on_which_packets_queue_for_long_is_no_lossy_one(round_trip_s: float) -> None:
    """5 Mbit/s that three paths share, 144 segments a second for each. Where packets take so long they wait in the line's own queue."""
    parallel = Parallel()
    assert not any(parallel.counted(144, 2, 1.0, round_trip_s) for _ in range(2 * LOOKS_LOSSY))


@pytest.mark.parametrize("share", [0.02, 0.05, 0.14])
def test_a_line_whose_own_queue_is_full_is_no_lossy_one_however_many_paths_share_it(share: float) -> None:
    """2.5 Mbit/s that four paths share, 54 segments a second for each; the modem holds a second of them."""
    parallel = Parallel()
    assert not any(parallel.counted(54, round(54 * share), 1.0, 0.7, 0.66) for _ in range(8 * LOOKS_LOSSY))


def test_a_path_on_which_words_wait_at_the_other_end_has_several_if_it_loses() -> None:
    """The other end's queue is full: a round trip to it takes a second, and to others it does not."""
    parallel = Parallel()
    assert any(parallel.counted(10, look % 2, 1.0, 1.0, 0.02) for look in range(20 * LOOKS_LOSSY))


def test_segments_wait_before_the_own_line_as_long_as_they_take_longer_to_all() -> None:
    bloated, quick, silent = (1.0, 0.1), (0.12, 0.1), (0.0, 0.0)
    assert own_queue_s([bloated, (0.8, 0.05)]) == pytest.approx(0.75)
    assert own_queue_s([bloated, quick]) == pytest.approx(0.02)
    assert own_queue_s([bloated]) == own_queue_s([bloated, silent]) == own_queue_s([]) == 0.0
