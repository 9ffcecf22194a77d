"""The links of the benchmark of rounds, and the least time of a round over links that change."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.benchmarks._home_scenarios import (
    BROKEN_S,
    DOWN_MBIT,
    LOSS,
    OTHER,
    SCENARIOS,
    SLOWED_MBIT,
    STRUCK,
    Scenario,
    chosen,
    passed_s,
)
from scripts.benchmarks._switch import Links

NUM_BYTES = 64_000_000
ADDRESSES = ("10.99.0.1", "10.99.0.2", "10.99.0.3", "10.99.0.4")
changes = st.lists(st.tuples(st.floats(0.1, 20), st.floats(0, 100)), max_size=6)


def find(name: str, peers: int) -> Scenario:
    (found,) = chosen([name], [peers])
    return found


def links_of(scenario: Scenario, struck: bool) -> Links:
    return scenario.links(ADDRESSES[: scenario.num_peers], struck)


@given(st.floats(0, 1000), changes, st.floats(0.1, 100))
def test_so_many_bytes_have_passed_at_that_moment_and_not_before(num_bytes: float, lasting: list[tuple[float, float]], last: float) -> None:
    begins = [0.0, *itertools.accumulate(length_s for length_s, _ in lasting)]
    rates = list(zip(begins, [*(rate for _, rate in lasting), last], strict=True))
    moment_s = passed_s(num_bytes, rates)

    def by(now_s: float) -> float:
        ends = [*begins[1:], float("inf")]
        return sum(rate * max(0.0, min(now_s, end_s) - since_s) for (since_s, rate), end_s in zip(rates, ends, strict=True))

    assert by(moment_s) == pytest.approx(num_bytes, abs=1e-6)
    assert by(0.9 * moment_s) <= num_bytes + 1e-6


def test_the_bounds_are_those_of_the_issue() -> None:
    """Two peers send their 64 MB once, four peers one and a half times; of unlike uplinks the slowest sends only its part."""
    seconds = {(each.name, each.num_peers): each.bound_s(NUM_BYTES) for each in SCENARIOS if not each.worse}
    seconds = {key: value for key, value in seconds.items() if key[0].startswith("up-")}
    wanted = {("up-20", 2): 25.6, ("up-20", 4): 38.4, ("up-5", 2): 102.4, ("up-5", 4): 153.6, ("up-5-20-20-100", 4): 102.4}
    assert seconds == pytest.approx(wanted)


@pytest.mark.parametrize("peers", [2, 4])
def test_a_link_that_becomes_slow_in_the_middle_passes_the_other_half_at_the_slow_rate(peers: int) -> None:
    drop = find("drop", peers)
    usual_s = drop.bound_s(NUM_BYTES)
    assert drop.bound_s(NUM_BYTES, usual_s / 2) == pytest.approx(usual_s / 2 + usual_s / 2 * 100 / SLOWED_MBIT)
    assert drop.bound_s(NUM_BYTES, 2 * usual_s) == pytest.approx(usual_s)


@pytest.mark.parametrize("peers", [2, 4])
def test_a_link_that_breaks_costs_the_time_for_which_it_is_broken(peers: int) -> None:
    broken = find("break", peers)
    usual_s = broken.bound_s(NUM_BYTES)
    assert broken.bound_s(NUM_BYTES, usual_s / 2) == pytest.approx(usual_s + BROKEN_S)


def test_a_link_that_loses_packets_carries_so_many_fewer() -> None:
    assert find("rough", 2).bound_s(NUM_BYTES) == pytest.approx(find("up-20", 2).bound_s(NUM_BYTES) / (1 - LOSS))


def test_what_does_not_pass_between_two_peers_is_carried_by_the_others() -> None:
    """Of four slices each of the two gives the other a part of one and the sum of another: a quarter four times, shared by two mates."""
    assert find("one-way", 4).bound_s(NUM_BYTES) == pytest.approx((1.5 + 4 / 4 / 2) / 1.5 * find("up-20", 4).bound_s(NUM_BYTES))


def test_the_bound_of_a_round_with_a_liar_is_that_of_the_others_alone() -> None:
    honest = Scenario(name="", up_mbit=(20,) * 3)
    assert find("silent", 4).bound_s(NUM_BYTES) == honest.bound_s(NUM_BYTES)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: f"{each.name}-{each.num_peers}")
def test_every_peer_has_its_uplink_and_only_the_ways_of_the_struck_one_get_worse(scenario: Scenario) -> None:
    before, after = links_of(scenario, struck=False), links_of(scenario, struck=True)
    assert [before.rates[address].up for address in ADDRESSES[: scenario.num_peers]] == list(scenario.up_mbit)
    assert {rates.down for rates in before.rates.values()} == {DOWN_MBIT}
    changed = {address for address in before.rates if before.rates[address] != after.rates[address]}
    changed |= {end for old, new in zip(before.ways, after.ways, strict=True) if old != new for end in (new.origin, new.target)}
    assert (changed != set()) == (scenario.worse in ("drop", "break"))
    for way in after.ways:
        assert ADDRESSES[STRUCK] in (way.origin, way.target)
        is_dead = (way.origin, way.target) == (ADDRESSES[STRUCK], ADDRESSES[OTHER])
        worse = {"break": (1, 0), "rough": (LOSS, 100), "one-way": (float(is_dead), 0)}
        assert (way.loss, way.jitter_ms) == worse.get(scenario.worse, (0, 0))


def test_no_two_scenarios_have_one_name_and_size() -> None:
    assert len({(each.name, each.num_peers) for each in SCENARIOS}) == len(SCENARIOS)
