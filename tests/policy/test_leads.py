"""Whose line a round shows, and what is believed of lines after rounds."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.round.chunks import WINDOW
from peerd.policy.round.leads import GROWTH, KnownLine, Leads, SentRate, believed_ups, is_as_expected, line_after
from peerd.policy.round.slices import exchange_s, least_exchange_s, rates_matter, shares_by_rate


def test_those_wait_whose_parts_are_ahead_of_the_slowest_ones() -> None:
    leads = Leads([100] * 4)
    for row in range(10):
        leads.told(0, (0, row + 2, row + 2, row), (row,) * 4)
        leads.told(3, (row + 1, row, row, 0), (row,) * 4)
    assert [leads.waited(member) for member in range(4)] == [False, False, False, False]
    for row in range(30):
        leads.told(0, (0, row + WINDOW, row + WINDOW, row), (row,) * 4)
    assert [leads.waited(member) for member in range(4)] == [False, True, True, False]


def test_those_wait_whose_sums_are_ahead_since_another_reduces_a_larger_slice_than_its_line_is_good_for() -> None:
    leads = Leads([100, 0, 100, 100])
    for row in range(30):
        leads.told(1, (0, 0, 0, 0), (row, 0, row + 9, row + 9))
        leads.told(2, (row, row, 0, row), (row, 0, row, row + 9))
    assert [leads.waited(member) for member in range(4)] == [False, False, True, True]


def test_nobody_waits_before_chunks_come_and_after_all_have_come() -> None:
    leads = Leads([8] * 3)
    for _ in range(50):
        leads.told(0, (0, 0, 0), (0, 0, 0))
        leads.told(0, (0, 8, 8), (8, 8, 8))
        leads.told(1, (8, 0), (8, 8, 8))
    assert not any(leads.waited(member) for member in range(3))


@given(st.lists(st.tuples(st.integers(0, 2), *[st.lists(st.integers(-(2**70), 2**70), min_size=2, max_size=4)] * 2), max_size=30))
def test_whatever_a_member_tells_counts_as_one_window_at_most(told: list[tuple[int, list[int], list[int]]]) -> None:
    leads = Leads([9] * 3)
    for _ in range(4 * len(told)):
        leads.told(0, (0, 3, 4), (4, 3, 4))
        leads.told(1, (3, 0, 4), (3, 4, 4))
    for teller, parts, sums in told:
        leads.told(teller, parts, sums)
    assert not leads.waited(0)
    assert not leads.waited(1)


def test_a_line_that_got_much_slower_is_believed_at_once_and_one_that_is_somewhat_faster_by_and_by() -> None:
    assert line_after(None, SentRate(5.0)) == KnownLine(5.0)
    assert line_after(KnownLine(100.0), SentRate(5.0)) == KnownLine(5.0)
    assert line_after(KnownLine(8.0), SentRate(5.0)) == KnownLine(6.5)
    assert line_after(KnownLine(math.inf, waits=True), SentRate(5.0)) == KnownLine(5.0)


def test_more_is_believed_of_a_line_whose_member_waited_but_not_more_than_it_says() -> None:
    waited = line_after(KnownLine(8.0), SentRate(5.0, waited=True))
    assert waited == KnownLine(GROWTH * 8.0, waits=True)
    assert believed_ups([10.0, None], [waited, KnownLine(9.0)]) == [10.0, 9.0]
    assert believed_ups([100.0, None], [waited, KnownLine(9.0)]) == [12.0, 9.0]


def test_a_member_that_waits_round_by_round_is_as_fast_as_it_has_ever_said_meanwhile() -> None:
    line = None
    for claim in (1.1, 0.9, 0.8):
        line = line_after(line, SentRate(0.7, waited=True), claim)
    assert believed_ups([0.8, None], [line, KnownLine(0.6)]) == [1.1, 0.6]
    assert line_after(line, SentRate(0.7)) == KnownLine(0.7)


def test_what_a_member_that_waited_has_sent_tells_nothing_of_its_line() -> None:
    """Slices that are unlike by mistake would be unlike for ever otherwise: who has a larger one sends more."""
    shares = [0.45, 0.1, 0.2, 0.25]
    known = [line_after(None, SentRate(1 + 2 * share, waited=share < 0.45)) for share in shares]
    assert believed_ups([1.9, 1.2, 1.4, 1.5], known) == [1.9] * 4


def test_a_first_round_that_filled_no_line_makes_equal_lines_no_unlike_ones() -> None:
    """Four lines that had become 20 times slower, 5 Mbit/s each: the chunks were too large, and one member by chance did not wait."""
    claims, sent = [5.12, 5.37, 4.64, 5.64], [3.7, 3.64, 3.63, 3.83]
    known = [line_after(None, SentRate(rate, waited=rate != 3.63), claim, False) for rate, claim in zip(sent, claims, strict=True)]
    paces = [125e3 * (rate or 0.0) / 64e6 for rate in believed_ups(claims, known)]
    assert not rates_matter(paces, averaging_s=9.0)


def test_what_a_member_says_of_its_line_makes_it_no_faster_than_the_round_allows() -> None:
    first = line_after(None, SentRate(2.0), claim=100.0, is_as_planned=False)
    assert first == KnownLine(GROWTH * 2.0)
    assert line_after(first, SentRate(2.0), claim=100.0) == KnownLine(2.5)
    assert line_after(None, SentRate(2.0), claim=1.0, is_as_planned=False) == KnownLine(2.0)
    assert line_after(None, SentRate(2.0), claim=100.0) == KnownLine(2.0)


def test_a_round_much_longer_than_expected_shows_that_lines_have_changed() -> None:
    assert is_as_expected(60.0, 40.0, 9.0)
    assert not is_as_expected(90.0, 40.0, 9.0)
    assert is_as_expected(8.0, 0.1, 9.0)


def test_a_round_much_shorter_than_expected_shows_that_a_line_was_believed_to_be_too_slow() -> None:
    assert is_as_expected(40.0, 60.0, 9.0)
    assert is_as_expected(0.1, 8.0, 9.0)
    assert not is_as_expected(0.1, 460_808.0, 9.0)


@pytest.mark.parametrize("ups", [[2.5] * 4, [0.625, 2.5, 2.5, 12.5], [2.5, 2.5, 1.0]])
def test_whatever_is_believed_first_slices_come_to_fit_the_lines(ups: list[float]) -> None:
    """A member with too small a slice is never seen to send as fast as it could, so more is believed of it for waiting."""
    claims: list[float | None] = [0.3 + 0.5 * number for number in range(len(ups))]
    known: list[KnownLine | None] = [None] * len(ups)
    for _ in range(15):
        shares = shares_by_rate([rate or 0.01 for rate in believed_ups(claims, known)])
        took_s = exchange_s(1.0, ups, shares)
        for member, up in enumerate(ups):
            sent = (1 + (len(ups) - 2) * shares[member]) / took_s
            known[member] = line_after(known[member], SentRate(sent, waited=sent < 0.9 * up))
            claims[member] = max(sent, 0.6 * up)
    assert took_s <= 1.2 * least_exchange_s(1.0, ups)
