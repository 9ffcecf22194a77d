"""Chunks of one file asked of several donors: all come, as fast as the lines carry, and no donor is waited for."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.policy.route.chunk_shares import LEAST_ASKED, MOST_ASKED, AskingPace, ChunkShares

NEVER_S = 1e9


def came_at_s(num_chunks: int, chunk_s: Mapping[str, float], round_trip_s: float = 0.0) -> tuple[float, dict[str, int]]:
    """When all chunks are here, and how many each donor has sent. `chunk_s`: how long each donor's line takes for one."""
    shares, paces = ChunkShares(num_chunks), {donor: AskingPace() for donor in chunk_s}
    free_s, sent, under_way = dict.fromkeys(chunk_s, 0.0), dict.fromkeys(chunk_s, 0), list[tuple[float, str, int]]()

    def ask(donor: str, now_s: float) -> None:
        while paces[donor].num_asked < paces[donor].most and (number := shares.next_for(donor)) is not None:
            paces[donor].asked(now_s)
            free_s[donor] = max(free_s[donor], now_s + round_trip_s / 2) + chunk_s[donor]
            heapq.heappush(under_way, (free_s[donor] + round_trip_s / 2, donor, number))

    for donor in chunk_s:
        ask(donor, 0.0)
    now_s = 0.0
    while shares.num_left:
        now_s, donor, number = heapq.heappop(under_way)
        paces[donor].came(now_s)
        shares.came(number)
        sent[donor] += 1
        for each in chunk_s:
            ask(each, now_s)
    return now_s, sent


def test_three_donors_take_a_third_of_the_time_of_one() -> None:
    one_s, _ = came_at_s(400, {"a": 0.1}, 0.06)
    three_s, sent = came_at_s(400, {"a": 0.1, "b": 0.1, "c": 0.1}, 0.06)
    assert three_s < 0.345 * one_s
    assert sum(sent.values()) <= 410


def test_each_donor_sends_as_much_as_its_line_carries() -> None:
    took_s, sent = came_at_s(400, {"a": 0.05, "b": 0.1, "c": 0.2}, 0.06)
    assert took_s < 1.05 * 400 / (20 + 10 + 5)
    assert sent["a"] > 1.8 * sent["b"] > 3 * sent["c"]


def test_a_donor_that_sends_nothing_costs_hardly_anything() -> None:
    assert came_at_s(400, {"a": 0.1, "b": 0.1, "mute": NEVER_S}, 0.06)[0] < 1.05 * came_at_s(400, {"a": 0.1, "b": 0.1}, 0.06)[0]


@pytest.mark.parametrize(("chunk_s", "round_trip_s"), [(0.1, 0.06), (0.02, 0.06), (0.02, 0.2), (0.002, 0.0)])
def test_a_line_is_kept_full_and_little_waits_at_the_donor(chunk_s: float, round_trip_s: float) -> None:
    took_s, _ = came_at_s(1000, {"a": chunk_s}, round_trip_s)
    assert took_s < 1.05 * 1000 * chunk_s + 4 * round_trip_s
    pace, now_s = AskingPace(), 0.0
    for _ in range(100):
        pace.asked(now_s)
        now_s += chunk_s + round_trip_s
        pace.came(now_s)
    assert LEAST_ASKED <= pace.most <= min(MOST_ASKED, 3 + round_trip_s / chunk_s)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(("ask", "come", "go"))), max_size=200), st.integers(0, 9))
@settings(max_examples=200)
def test_whatever_donors_do_each_chunk_is_asked_for_until_it_has_come(events: list[tuple[str, str]], num_chunks: int) -> None:
    shares, asked, here = ChunkShares(num_chunks), {donor: list[int]() for donor in "abc"}, set[int]()
    for donor, event in events:
        if event == "ask" and (number := shares.next_for(donor)) is not None:
            assert number not in here
            assert number not in asked[donor]
            asked[donor].append(number)
        elif event == "come" and asked[donor]:
            number = asked[donor].pop(0)
            assert shares.is_due(number) == (number not in here)
            shares.came(number)
            here.add(number)
        elif event == "go":
            shares.gone(donor)
            asked[donor].clear()
        assert shares.num_left == num_chunks - len(here)
        assert all(shares.is_due(number) for numbers in asked.values() for number in numbers if number not in here)
    while (number := shares.next_for("last")) is not None:
        shares.came(number)
    for donor in "abc":
        shares.gone(donor)
    while (number := shares.next_for("last")) is not None:
        shares.came(number)
    assert shares.num_left == 0
