"""Rounds of simulated stages, chunk by chunk over the members' lines."""

from __future__ import annotations

import math

import pytest

from peerd.planner.network import PeerSpec
from peerd.policy.round.needs import averaging_s
from peerd.policy.round.slices import least_exchange_s
from peerd.sim.averaging import MOST_PLAYED, PlayedRound, exchanged
from peerd.sim.network import Homes, Pairs
from tests.sim.test_step_run import network

MBIT = 125e3
AVERAGING_S = averaging_s(5.0)


def home_round(ups: list[float], num_bytes: float, delay_s: float = 0.03) -> PlayedRound:
    peers = [PeerSpec(name=f"home-{number}", up=up * MBIT, down=100 * MBIT) for number, up in enumerate(ups)]
    return exchanged(num_bytes, range(len(ups)), Pairs(network(*peers, delay_s=delay_s)), AVERAGING_S, slow_start=True)


@pytest.mark.parametrize(("ups", "sent"), [([20] * 2, [64] * 2), ([20] * 4, [96] * 4), ([5, 20, 20, 100], [64, 64, 64, 192])])
def test_a_long_round_takes_hardly_more_than_its_bytes_by_the_slices_that_a_daemon_proposes(ups: list[float], sent: list[float]) -> None:
    found = home_round(ups, 64e6)
    assert 1.0 <= found.took_s / least_exchange_s(64e6, [up * MBIT for up in ups]) <= 1.02
    assert [found.sent_bytes[member] / 1e6 for member in range(len(ups))] == pytest.approx(sent, rel=0.01)


def test_a_short_round_takes_its_round_trips_and_even_slices() -> None:
    found = home_round([5, 20, 20, 100], 1e4)
    assert 3.5 * 0.06 <= found.took_s <= 3.5 * 0.06 + 0.15
    assert set(found.sent_bytes.values()) == {1.5e4}


def test_lines_that_differ_little_get_even_slices_and_the_round_takes_as_long_as_the_slowest_needs_for_one() -> None:
    found, rates = home_round([20, 20, 17], 1e7), [20 * MBIT, 20 * MBIT, 17 * MBIT]
    even_s = 4 / 3 * 1e7 / min(rates)
    assert least_exchange_s(1e7, rates) < 0.95 * even_s < found.took_s < 1.15 * even_s
    assert len(set(found.sent_bytes.values())) == 1


def test_a_pair_with_a_limit_binds_its_members() -> None:
    rates = ((math.inf, 1e5), (1e5, math.inf))
    peers = network(PeerSpec(name="a", up=1e7, down=1e7), PeerSpec(name="b", up=1e7, down=1e7))
    found = exchanged(1e6, (0, 1), Pairs(type(peers)(peers.peers, peers.delay_s, rates)), AVERAGING_S, slow_start=False)
    assert found.took_s == pytest.approx(10.0, rel=0.02)


@pytest.mark.parametrize("num_members", [0, 1])
def test_whoever_is_alone_exchanges_nothing(num_members: int) -> None:
    assert exchanged(1e9, range(num_members), Homes(2, 1e12, 0), AVERAGING_S, slow_start=True) == PlayedRound(0.0, {})


def test_a_stage_of_thousands_takes_the_time_of_its_bytes_and_costs_no_time() -> None:
    homes = Homes(2000, 1e12, 0)
    found = exchanged(1e8, range(2000), homes, AVERAGING_S, slow_start=False)
    least_s = least_exchange_s(1e8, [min(peer.up, peer.down) for peer in homes.peers])
    assert least_s <= found.took_s <= 1.01 * least_s
    assert len(found.sent_bytes) == 2000


def test_what_is_played_and_what_is_not_differ_little_where_one_member_more_decides() -> None:
    played, counted = (home_round([20] * number, 1e7).took_s for number in (MOST_PLAYED, MOST_PLAYED + 1))
    assert 0.9 <= played / counted <= 1.1
