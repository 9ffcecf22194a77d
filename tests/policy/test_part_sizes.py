"""Rule 22 (size): a part that is far too large is found, and no honest one is, however few microbatches it has."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.step.part_sizes import (
    AGAINST,
    FEWEST_MEMBERS,
    OUTLIERS,
    TIMES,
    FoundLarge,
    PartSize,
    even_share,
    is_sum_too_large,
    odd_ones,
    too_large,
)
from peerd.table.record import PeerId

SIZE = 64


def part_of(rng: Random, num: int, signal: float, factor: float = 1.0) -> PartSize:
    """The sum of noisy gradients, each a common one and noise of norm 1."""
    noise = [sum(rng.gauss(0, SIZE**-0.5) for _ in range(num)) for _ in range(SIZE)]
    return PartSize(factor * math.sqrt(sum((num * signal * SIZE**-0.5 + each) ** 2 for each in noise)), num)


@given(st.integers(0, 10_000), st.lists(st.integers(1, 40), min_size=FEWEST_MEMBERS, max_size=12), st.sampled_from([0.0, 0.1, 1.0, 10.0]))
def test_no_honest_part_is_too_large_however_noisy_gradients_are(seed: int, counts: list[int], signal: float) -> None:
    rng = Random(seed)
    parts = [part_of(rng, num, signal) for num in counts]
    for me in range(len(parts)):
        assert too_large(parts, me, 0.0) == []


@given(
    st.integers(0, 10_000),
    st.lists(st.integers(4, 8), min_size=FEWEST_MEMBERS, max_size=12),
    st.sampled_from([-20.0, 20.0, 100.0, 1000.0]),
    st.sampled_from([0.0, 0.1, 1.0, 10.0]),
)
def test_a_part_that_is_twenty_times_as_large_is_found_by_all_others(seed: int, counts: list[int], factor: float, signal: float) -> None:
    rng = Random(seed)
    parts = [part_of(rng, num, signal) for num in counts]
    parts[-1] = PartSize(abs(factor) * parts[-1].norm, parts[-1].num_microbatches)
    for me in range(len(parts) - 1):
        assert too_large(parts, me, 0.0) == [len(parts) - 1]


def test_the_part_of_few_microbatches_may_be_larger_for_each_and_that_of_none_has_nothing() -> None:
    usual = [PartSize(16.0, 16)] * 3
    limit = TIMES * 4 * (1 + OUTLIERS)
    assert too_large([*usual, PartSize(limit * 0.99, 1)], 0, 0.0) == []
    assert too_large([*usual, PartSize(limit * 1.01, 1)], 0, 0.0) == [3]
    assert too_large([*usual, PartSize(0.0, 0)], 0, 0.0) == []
    assert too_large([*usual, PartSize(100.0, 0)], 0, 0.0) == [3]


def test_one_microbatch_whose_gradient_is_ten_times_as_large_makes_no_part_too_large() -> None:
    for num in range(1, 40):
        assert too_large([*([PartSize(num, num)] * 3), PartSize(num - 1 + 10.0, num)], 0, 0.0) == []


def test_of_a_slice_that_hardly_any_microbatch_has_a_gradient_for_nobody_says_what_is_usual() -> None:
    rare = [PartSize(0.0, 8), PartSize(0.0, 8), PartSize(0.0, 8), PartSize(0.5, 8)]
    assert too_large(rare, 0, 0.0) == [3]
    assert too_large(rare, 0, even_share(8.0, 8, 100, 10_000)) == []
    assert even_share(8.0, 8, 100, 10_000) == pytest.approx(0.1)


@pytest.mark.parametrize("norm", [math.inf, math.nan, 1e300])
def test_a_part_that_is_no_number_is_too_large_except_in_a_stage_of_two(norm: float) -> None:
    parts = [*([PartSize(1.0, 1)] * 3), PartSize(norm, 1)]
    assert too_large(parts, 0, 0.0) == [3]
    assert too_large(parts[1:], 0, 0.0) == [2]
    assert too_large(parts[2:], 0, 0.0) == []
    assert too_large(parts, 3, 1e9) == [3], "its own gradients may be large"
    assert too_large([PartSize(0.0, 1)] * 3 + [PartSize(1e-9, 1)], 0, 0.0) == [3]


def test_of_two_the_larger_one_is_named_first() -> None:
    assert too_large([*([PartSize(1.0, 1)] * 5), PartSize(50.0, 1), PartSize(60.0, 1)], 0, 0.0) == [6, 5]


def test_who_was_left_out_is_guilty_unless_another_has_such_large_gradients_for_the_same_microbatches() -> None:
    found, one, other = FoundLarge(), PeerId("one"), PeerId("other")
    assert found.spared(3, PeerId("another")) == 0
    found.note(3, one, 0b0110)
    found.note(3, other, 0b1000)
    assert found.spared(3, PeerId("another")) == 0b1110
    assert (found.spared(3, one), found.spared(3, other)) == (0b1000, 0b0110), "nobody spares its own part"
    assert found.spared(4, PeerId("another")) == 0
    assert found.guilty(4, []) == [], "nobody has done their microbatches again"
    found.note(3, one, 0b0110)
    found.note(3, other, 0b1000)
    assert found.guilty(3, [0b0011, 0b0001]) == [other]
    assert found.guilty(3, []) == [], "each is told once"
    found.note(4, one, 0b1)
    assert found.guilty(4, []) == [one]


def test_what_two_others_have_found_is_spared_and_what_one_says_is_not() -> None:
    found, one, other, third = FoundLarge(), PeerId("one"), PeerId("other"), PeerId("third")
    for _ in range(2):
        found.told(3, one, 0b11, other)
        assert found.spared(3, PeerId("another")) == 0
    found.told(3, one, 0b11, third)
    assert found.spared(3, PeerId("another")) == 0b11
    assert found.guilty(3, []) == [], "this peer has not seen it"
    found.told(4, other, 0b1, third)
    assert found.spared(4, PeerId("another")) == 0


@given(st.integers(0, 10_000), st.lists(st.integers(1, 40), min_size=FEWEST_MEMBERS, max_size=12), st.sampled_from([0.0, 0.1, 1.0, 10.0]))
def test_a_part_that_is_not_there_looks_odd_and_no_honest_one_does(seed: int, counts: list[int], signal: float) -> None:
    rng = Random(seed)
    parts = [part_of(rng, num, signal) for num in counts]
    assert odd_ones(parts, 0, 0.0) == []
    last = len(parts) - 1
    assert odd_ones([*parts[:-1], PartSize(0.0, counts[-1])], 0, 0.0) == [last]
    assert odd_ones([*parts[:-1], PartSize(0.0, 0)], 0, 0.0) == [], "it has computed nothing"


def test_a_part_that_points_away_from_the_others_looks_odd_and_one_of_a_rare_slice_may_be_nothing() -> None:
    usual = [PartSize(8.0, 8, 0.5)] * 3
    assert odd_ones([*usual, PartSize(8.0, 8, 1.01 * AGAINST)], 0, 0.0) == [3]
    assert odd_ones([*usual, PartSize(8.0, 8, 0.99 * AGAINST)], 0, 0.0) == []
    assert odd_ones([*usual, PartSize(0.0, 8)], 0, even=1.0) == [3]
    assert odd_ones([*usual, PartSize(0.0, 8)], 0, even=1.1) == []
    assert odd_ones([usual[0], PartSize(0.0, 8)], 0, 0.0) == [], "of two nobody can say which one is usual"


@given(st.integers(0, 10_000), st.lists(st.integers(1, 40), min_size=3, max_size=12), st.sampled_from([0.0, 0.1, 1.0, 10.0]))
def test_no_honest_sum_is_too_large_beside_anybodys_own_part(seed: int, counts: list[int], signal: float) -> None:
    rng = Random(seed)
    whole = part_of(rng, sum(counts), signal)
    for num in counts:
        assert not is_sum_too_large(whole, part_of(rng, num, signal), 0.0)


def test_a_sum_that_is_far_larger_than_ones_own_part_is_too_large_unless_that_is_of_a_rare_slice() -> None:
    own = PartSize(8.0, 8)
    limit = TIMES * (32 + OUTLIERS)
    assert is_sum_too_large(PartSize(limit * 1.01, 32), own, 0.0)
    assert not is_sum_too_large(PartSize(limit * 0.99, 32), own, 0.0)
    assert not is_sum_too_large(PartSize(limit * 1.01, 32), own, 1.1)
    assert not is_sum_too_large(PartSize(1e9, 32), PartSize(0.0, 0), 0.0), "it has computed nothing"
    assert is_sum_too_large(PartSize(math.nan, 32), own, 0.0)
