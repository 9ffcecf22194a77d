"""The steady state: what binds a placement, and placements that are at least as good as the simple ones."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.planner import placing
from peerd.planner.flow import most_flow
from peerd.planner.network import PeerSpec, Topology
from peerd.planner.queues import UNEVEN, waiting_share
from peerd.planner.slow_start import ROUND_TRIPS
from peerd.planner.steady import RunCost, StageDemand, SteadyModel

MIDDLE = StageDemand(flops=1e9, memory_bytes=1e9, forth_bytes=1e6, back_bytes=1e6, gradient_bytes=4e6)
LAST = replace(MIDDLE, forth_bytes=0.0, back_bytes=0.0)


def run_of(num_stages: int, **changes: object) -> RunCost:
    run = RunCost(
        stages=(*(MIDDLE,) * (num_stages - 1), LAST), microbatches_per_step=100, tokens_per_microbatch=10, is_averaging_hidden=False
    )
    return replace(run, **changes)  # type: ignore[arg-type]


def network(*peers: PeerSpec, delay_s: float = 0.0, rate: float = math.inf) -> Topology:
    count = range(len(peers))
    return Topology(peers, tuple(tuple(delay_s * (a != b) for b in count) for a in count), tuple(tuple(rate for _ in count) for _ in count))


def peer(name: str, flops: float = 1e10, **lines: float) -> PeerSpec:
    return PeerSpec(name=name, flops=flops, **lines)  # type: ignore[arg-type]


def test_without_links_a_step_takes_what_the_slowest_stage_computes() -> None:
    found = SteadyModel(run_of(2), network(peer("a"), peer("b"), peer("c"))).state(((0, 1), (2,)))
    assert found.stage_rates == pytest.approx((20.0, 10.0))
    assert found.rate == pytest.approx(10.0)
    assert found.step_s == pytest.approx(100 / 10 + 0.1)  # and one microbatch through the other stage
    assert found.tokens_per_s == pytest.approx(1000 / found.step_s)
    assert found.bound_by == ("compute", "compute")


def test_a_peer_is_as_fast_as_its_slower_line_lets_it_be() -> None:
    """The middle of three stages sends 2 MB a microbatch: activations on, gradients back."""
    steady = SteadyModel(run_of(3), network(peer("a"), peer("b", up=4e6), peer("c", down=1e6)))
    assert steady.traffic(1) == (2e6, 2e6)
    assert steady.peer_rate(1, 1).rate == pytest.approx(2.0)
    assert steady.peer_rate(0, 1).rate == pytest.approx(4.0)
    found = steady.state(((0,), (1,), (2,)))
    assert found.bound_by == ("compute", "up of b", "down of c")
    assert found.rate == pytest.approx(1.0)


def test_queues_cost_less_the_more_is_in_flight_and_most_where_all_of_them_bind() -> None:
    alike = [0.1] * 12
    costs = [waiting_share(alike, in_flight, 0.0) for in_flight in (1, 12, 48, 192, math.inf)]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] == pytest.approx(UNEVEN * 11), "one in flight: of twelve queues one works"
    assert costs[-2] < 0.03
    assert costs[-1] == 0
    assert waiting_share([0.1] * 4 + [0.05] * 8, 48, 0.0) < costs[2] / 2
    assert waiting_share(alike, 48, 2.0) > costs[2]


def test_lines_that_are_as_busy_as_the_devices_are_queues_of_their_own() -> None:
    """2 MB each way take as long as computing."""
    run = run_of(3, slots=10)
    wide, narrow = (
        SteadyModel(run, network(*(peer(name, up=rate, down=rate) for name in "abc"))).state(((0,), (1,), (2,))) for rate in (1e9, 2e7)
    )
    assert wide.rate == narrow.rate
    assert narrow.waiting_s > 1.3 * wide.waiting_s


def test_a_step_ends_later_where_peers_hold_few_microbatches_and_the_slowest_one_does_its_last() -> None:
    peers = network(peer("a"), peer("b", flops=1e9), peer("c", flops=1.1e10))
    free, few = (SteadyModel(run_of(2, slots=slots), peers).state(((0, 1), (2,))) for slots in (0, 4))
    assert free.waiting_s == 0
    assert few.waiting_s > 0.5, "half of b's second, and queues"
    assert few.step_s == pytest.approx(free.step_s + few.waiting_s)


def test_averaging_binds_where_it_takes_longer_than_the_microbatches_and_is_hidden_by_delayed_updates() -> None:
    peers = network(peer("a"), peer("b", up=1e5), delay_s=0.05)
    run = run_of(1)
    found = SteadyModel(run, peers).state(((0, 1),))
    assert found.averaging_s == pytest.approx(40 + ROUND_TRIPS * 0.1)
    assert found.bound_by == ("averaging",)
    assert found.step_s == pytest.approx(100 / 20 + 40 + ROUND_TRIPS * 0.1)
    hidden = SteadyModel(replace(run, is_averaging_hidden=True), peers).state(((0, 1),))
    assert hidden.step_s == pytest.approx(40 + ROUND_TRIPS * 0.1)


def test_what_a_peer_sends_a_day_follows_from_its_share() -> None:
    found = SteadyModel(run_of(2), network(peer("a"), peer("b", flops=3e10), peer("c", flops=4e10))).state(((0, 1), (2,)))
    a_day = 86400 / found.step_s
    assert found.sent_bytes_a_day[0] == pytest.approx(a_day * (25 * 1e6 + 4e6))
    assert found.sent_bytes_a_day[1] == pytest.approx(a_day * (75 * 1e6 + 4e6))
    assert found.sent_bytes_a_day[2] == pytest.approx(a_day * 100 * 1e6)


def test_links_of_pairs_bind_as_a_flow() -> None:
    """Each of two peers reaches one of the next stage well and the other badly: 1 MB each way a microbatch."""
    rate = ((9e9, 9e9, 8e6, 1e6), (9e9, 9e9, 1e6, 8e6), (8e6, 1e6, 9e9, 9e9), (1e6, 8e6, 9e9, 9e9))
    peers = replace(network(*(peer(name) for name in "abcd")), rate=rate)
    assert SteadyModel(run_of(2), peers).state(((0, 1), (2, 3))).rate == pytest.approx(18.0)


def test_a_measured_speed_counts_in_place_of_the_devices() -> None:
    steady = SteadyModel(run_of(2), network(replace(peer("a"), stage=1, microbatches_per_s=3.0), peer("b")))
    assert steady.peer_rate(0, 0).rate == pytest.approx(3.0)
    found = steady.state(((0,), (1,)))
    assert found.fill_s == pytest.approx(0.1), "the faster one's; the other is the slowest stage"
    slow_line = replace(peer("a"), stage=1, microbatches_per_s=3.0, up=2.9e6)
    assert SteadyModel(run_of(2), network(slow_line, peer("b"))).state(((0,), (1,))).bound_by[0] == "compute", "the line costs 3 %"


@given(st.lists(st.floats(0.1, 9), min_size=1, max_size=3), st.lists(st.floats(0.1, 9), min_size=1, max_size=3), st.data())
def test_a_flow_is_as_large_as_the_smallest_cut(first: list[float], second: list[float], data: st.DataObject) -> None:
    edges = [[data.draw(st.floats(0, 9)) for _ in second] for _ in first]
    cuts = []
    for left in product((True, False), repeat=len(first)):  # on the source's side
        for right in product((True, False), repeat=len(second)):
            cut = sum(each for each, here in zip(first, left, strict=True) if not here)
            cut += sum(each for each, here in zip(second, right, strict=True) if here)
            cut += sum(edges[a][b] for a, here in enumerate(left) for b, there in enumerate(right) if here and not there)
            cuts.append(cut)
    assert most_flow([first, second], [edges]) == pytest.approx(min(cuts), abs=1e-6)


specs = st.builds(
    lambda flops, line, memory: {"flops": flops, "up": line, "down": 4 * line, "memory_bytes": memory},
    st.floats(1e9, 1e11),
    st.floats(1e5, 1e8),
    st.sampled_from([5e8, 1e9, 8e9]),
)


@settings(deadline=None, max_examples=20)
@given(st.lists(specs, min_size=1, max_size=6), st.integers(1, 3), st.integers(0, 9))
def test_a_search_is_at_least_as_good_as_what_it_starts_from_and_keeps_to_memory(
    found: list[dict[str, float]], stages: int, seed: int
) -> None:
    peers = network(*(PeerSpec(name=str(number), **each) for number, each in enumerate(found)), delay_s=0.01)  # type: ignore[arg-type]
    steady = SteadyModel(run_of(stages), peers)
    searched = placing.searched(steady, seed)
    used = [each for members in searched for each in members]
    assert len(used) == len(set(used))
    assert all(steady.fits(stage, each) for stage, members in enumerate(searched) for each in members)
    simple = [steady.state(place(steady)).step_s for place in (placing.joining, placing.dealt)]
    assert steady.state(searched).step_s <= min(simple)
    assert searched == placing.searched(steady, seed)


def test_a_search_of_few_peers_finds_the_best_of_all_placements() -> None:
    peers = network(*(peer(f"p{number}", flops=(number + 1) * 1e10, up=2e6 * (5 - number)) for number in range(5)), delay_s=0.01)
    steady = SteadyModel(run_of(2, is_averaging_hidden=True), peers)
    every = []
    for choice in product((0, 1, None), repeat=5):
        members = tuple(tuple(each for each in range(5) if choice[each] == stage) for stage in range(2))
        every.append(steady.state(members).step_s)
    assert steady.state(placing.searched(steady, 0)).step_s == pytest.approx(min(every))
