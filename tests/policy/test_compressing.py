"""Compression per link: never more than the link needs, never less than would help, and no coming and going."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.config.codec import parse_allowed
from peerd.policy.route.compressing import (
    FEWEST_RATES,
    MEASURED_RATES,
    MOST_LOAD,
    PATH_SHARE,
    TARGET_LOAD,
    RateMeter,
    choose_rung,
    most_s,
    pace_s,
)
from peerd.table.record import PeerId
from peerd.table.view import LiveView
from tests.strategies import member, view_of

LADDER = (4_000_000, 2_000_000, 1_015_625, 900_000, 600_000, 300_000)
"""Raw, halves, 8 bits, top-k of falling ratios."""
ladders = st.lists(st.integers(1, 1 << 28), min_size=1, max_size=9)
rates = st.floats(1.0, 1e12)
paces = st.floats(1e-4, 1e4)


def load(num_bytes: Sequence[int], rung: int, rate: float, between_s: float) -> float:
    return num_bytes[rung] / rate / between_s


@given(ladders, rates, paces, st.data())
def test_a_link_is_relieved_where_any_codec_can_and_else_as_far_as_possible(
    ladder: list[int], rate: float, between_s: float, data: st.DataObject
) -> None:
    current = data.draw(st.integers(0, len(ladder) - 1))
    chosen = choose_rung(ladder, rate, between_s, current).rung
    if load(ladder, chosen, rate, between_s) > MOST_LOAD:
        assert ladder[chosen] == min(ladder)
        assert min(ladder) / rate / between_s > TARGET_LOAD


@given(ladders, rates, paces)
def test_a_link_is_compressed_no_further_than_it_needs(ladder: list[int], rate: float, between_s: float) -> None:
    chosen = choose_rung(ladder, rate, between_s).rung
    assert all(load(ladder, rung, rate, between_s) > TARGET_LOAD for rung in range(chosen))


@given(ladders, rates, paces, st.data())
def test_a_codec_that_saves_nothing_is_never_chosen(ladder: list[int], rate: float, between_s: float, data: st.DataObject) -> None:
    chosen = choose_rung(ladder, rate, between_s, data.draw(st.integers(0, len(ladder) - 1))).rung
    assert all(ladder[chosen] < more_exact for more_exact in ladder[:chosen])


@given(ladders, rates, paces, st.data())
def test_the_same_measurements_again_change_nothing(ladder: list[int], rate: float, between_s: float, data: st.DataObject) -> None:
    once = choose_rung(ladder, rate, between_s, data.draw(st.integers(0, len(ladder) - 1)))
    assert choose_rung(ladder, rate, between_s, once.rung) == once


@given(rates, paces, st.floats(0.95, 1.05))
def test_noise_of_a_twentieth_does_not_take_back_what_was_just_chosen(rate: float, between_s: float, noise: float) -> None:
    chosen = choose_rung(LADDER, rate, between_s).rung
    if load(LADDER, chosen, rate, between_s) <= TARGET_LOAD:
        assert choose_rung(LADDER, rate * noise, between_s, chosen).rung == chosen


@pytest.mark.parametrize("current", range(len(LADDER)))
def test_after_a_slow_moment_a_link_comes_back_to_what_fits_with_little_to_spare(current: int) -> None:
    assert choose_rung(LADDER, LADDER[2] / (0.93 * TARGET_LOAD), 1.0, current).rung == 2


@given(rates, rates, paces)
def test_a_faster_link_is_never_compressed_more(one: float, other: float, between_s: float) -> None:
    slow, fast = sorted((one, other))
    assert choose_rung(LADDER, fast, between_s).rung <= choose_rung(LADDER, slow, between_s).rung


@pytest.mark.parametrize(("rate", "between_s"), [(None, 1.0), (1e6, None), (0.0, 1.0), (1e6, 0.0)])
def test_without_measurements_nothing_changes(rate: float | None, between_s: float | None) -> None:
    assert [choose_rung(LADDER, rate, between_s, rung).rung for rung in range(len(LADDER))] == list(range(len(LADDER)))


def test_the_reason_says_what_compression_spares() -> None:
    assert choose_rung(LADDER, 5e6, 1.0).reason == "the line is busy 80% of the time"
    assert choose_rung(LADDER, 2.8e6, 1.0).reason == "the line is busy 71% of the time; with less compression it would be 143%"
    assert "bottleneck" in choose_rung(LADDER, 2e5, 1.0).reason
    short = "the line is busy 20% of the time; with less compression a transfer would be a large part of a short step"
    assert choose_rung(LADDER, 1e7, 1.0, most_s=0.3).reason == short
    assert "still a large part" in choose_rung(LADDER, 1e7, 1.0, most_s=0.01).reason


@given(ladders, rates, paces, st.floats(1e-4, 1e4), st.data())
def test_a_transfer_takes_no_longer_than_it_may_where_any_codec_can(
    ladder: list[int], rate: float, between_s: float, longest_s: float, data: st.DataObject
) -> None:
    chosen = choose_rung(ladder, rate, between_s, data.draw(st.integers(0, len(ladder) - 1)), longest_s).rung
    if ladder[chosen] / rate > longest_s * MOST_LOAD / TARGET_LOAD * 1.001:
        assert ladder[chosen] == min(ladder)


@given(ladders, rates, paces, st.floats(1e-4, 1e4), st.floats(1e-4, 1e4))
def test_a_longer_step_is_never_compressed_more(ladder: list[int], rate: float, between_s: float, one: float, other: float) -> None:
    short, long = sorted((one, other))
    assert choose_rung(ladder, rate, between_s, most_s=long).rung <= choose_rung(ladder, rate, between_s, most_s=short).rung


def alike(*stages: int, throughput: float = 1.0) -> LiveView:
    """So many equal peers in each stage, named by stage and number."""
    peers = [
        member(f"{stage}.{number}", stage=stage, throughput=throughput) for stage, count in enumerate(stages) for number in range(count)
    ]
    return view_of(*peers)


def test_the_slowest_stage_sets_the_pace_and_peers_take_their_shares() -> None:
    first = member("a", throughput=8.0)
    fast, slow = member("b", stage=1, throughput=3.0), member("c", stage=1, throughput=1.0)
    live = view_of(first, fast, slow)
    assert pace_s(live, 2, PeerId("a"), PeerId("b"), 6) == pytest.approx(6 / 4), "the line of a carries what goes to c as well"
    assert pace_s(live, 2, PeerId("a"), PeerId("b"), 6, slowness=0.0) == pytest.approx(6 / 3)
    assert pace_s(live, 2, PeerId("a"), PeerId("c"), 6, slowness=0.0) == pytest.approx(6 / 1)
    assert pace_s(live, 2, PeerId("b"), PeerId("a"), 6) == pytest.approx(6 / 3)
    slower = view_of(replace(first, throughput=2.0), fast, slow)
    assert pace_s(slower, 2, PeerId("a"), PeerId("b"), 6) == pytest.approx(6 / 2)
    assert pace_s(live, 2, PeerId("a"), PeerId("nobody"), 6) is None
    assert pace_s(view_of(first, replace(fast, throughput=0.0)), 2, PeerId("a"), PeerId("b"), 6) is None


@given(st.lists(st.integers(1, 6), min_size=2, max_size=5), st.data())
def test_the_loads_of_a_lines_links_are_what_its_tensors_take_together(stages: list[int], data: st.DataObject) -> None:
    """Whatever the number of its links: where all are equally fast, each is judged by the load of the whole line."""
    live, num_stages = alike(*stages), len(stages)
    at = data.draw(st.integers(0, num_stages - 1))
    sides = [stage for stage in (at - 1, at + 1) if 0 <= stage < num_stages]
    own_microbatches_a_second = min(stages) / stages[at]
    for side in sides:
        found = pace_s(live, num_stages, PeerId(f"{at}.0"), PeerId(f"{side}.0"), 1)
        assert found == pytest.approx(1 / (len(sides) * own_microbatches_a_second))


@given(st.lists(st.integers(1, 6), min_size=2, max_size=5), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_a_link_that_is_slow_beside_its_line_answers_for_less_of_what_the_line_sends(stages: list[int], one: float, other: float) -> None:
    live = alike(*stages)
    slow, fast = (pace_s(live, len(stages), PeerId("0.0"), PeerId("1.0"), 1, slowness) or 0.0 for slowness in sorted((one, other)))
    assert slow >= fast * (1 - 1e-9)


def test_at_20_mbit_a_line_of_four_links_is_compressed_until_all_their_tensors_fit() -> None:
    """Issue 27, show c: three stages of two peers, 262 KB and 60 ms a microbatch. By its own tensors alone each link would seem idle enough
    at half the bytes, and the line of a middle peer would have 1.8 times what it carries."""
    live, codecs, rate = alike(2, 2, 2, throughput=1 / 0.06), parse_allowed("auto").codecs, 2.4e6
    sizes = [codec.num_bytes(65_536) for codec in codecs]
    longest_s = most_s(live, 3, 444)
    paces_s = [
        pace_s(live, 3, PeerId(sender), PeerId(receiver), 1) for sender, receiver in (("1.0", "2.0"), ("1.0", "0.0"), ("0.0", "1.0"))
    ]
    assert [str(codecs[choose_rung(sizes, rate, between_s, 0, longest_s).rung]) for between_s in paces_s] == ["int6", "int6", "int8"]


def test_the_transfers_that_nothing_hides_take_a_share_of_the_step() -> None:
    """Once a step each boundary is crossed both ways while nothing is computed for it."""
    live = alike(2, 2, 2)
    assert 2 * 2 * most_s(live, 3, 100) == pytest.approx(PATH_SHARE * 100 / 2)
    assert most_s(alike(1), 1, 100) == most_s(alike(1, 1, throughput=0.0), 2, 100) == float("inf")


transfers = st.lists(
    st.tuples(st.floats(0.0, 5.0), st.floats(0.01, 3.0), st.integers(1, 1 << 20)), min_size=FEWEST_RATES, max_size=2 * MEASURED_RATES
)


@given(transfers, st.floats(1e3, 1e9))
def test_transfers_one_after_another_show_the_links_rate(found: list[tuple[float, float, int]], rate: float) -> None:
    """Whatever the pauses between them, which say nothing of the link."""
    meter, now_s = RateMeter(), 0.0
    for pause_s, took_s, _ in found:
        now_s += pause_s
        meter.begin(now_s)
        now_s += took_s
        meter.end(max(1, round(rate * took_s)), now_s)
    assert meter.rate == pytest.approx(rate, rel=0.11)


@given(st.lists(st.integers(1, 1 << 20), min_size=FEWEST_RATES, max_size=2 * FEWEST_RATES))
def test_transfers_that_share_a_link_are_not_taken_for_a_slow_link(sizes: list[int]) -> None:
    """All begin at once and the link carries them in turn."""
    meter, now_s, rate = RateMeter(), 0.0, 1e5
    for _ in sizes:
        meter.begin(now_s)
    for size in sizes:
        now_s += size / rate
        meter.end(size, now_s)
    assert meter.rate == pytest.approx(rate)


@given(st.lists(st.sampled_from([1e-6, 1e3]), min_size=0, max_size=MEASURED_RATES // 2), st.integers(0, MEASURED_RATES))
def test_transfers_that_were_seen_too_late_change_nothing(wrong: list[float], before: int) -> None:
    """Fewer than half: a busy receiver finds a tensor there when it looks for its begin, or notices its end late."""
    meter, now_s = RateMeter(), 0.0
    for took_s in (*(1.0 for _ in range(MEASURED_RATES - len(wrong))), *wrong, *(1.0 for _ in range(before))):
        meter.begin(now_s)
        now_s += took_s
        meter.end(1000, now_s)
    assert meter.rate == pytest.approx(1000, rel=1e-3)


def test_a_link_that_becomes_fast_is_known_for_it_after_some_transfers() -> None:
    meter, now_s = RateMeter(), 0.0
    for took_s in (*(1.0,) * MEASURED_RATES, *(0.001,) * (1 + MEASURED_RATES // 2)):
        meter.begin(now_s)
        now_s += took_s
        meter.end(1000, now_s)
    assert meter.rate == pytest.approx(1e6)


def test_a_few_transfers_say_nothing() -> None:
    meter = RateMeter()
    for number in range(FEWEST_RATES - 1):
        meter.begin(float(number))
        meter.end(1000, number + 0.5)
    assert meter.rate is None


def test_a_peer_of_a_stage_that_the_run_does_not_have_has_no_pace() -> None:
    live = view_of(member("me", throughput=1.0), member("far", stage=4095, throughput=1.0))
    assert pace_s(live, 2, PeerId("me"), PeerId("far"), 4) is None
    assert pace_s(live, 2, PeerId("far"), PeerId("me"), 4) is None
