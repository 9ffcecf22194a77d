"""Choosing a stage: which one a joiner takes, by weakness, by what its line carries, by who means to stay, and by nearness."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.swarm.choosing import NEAR_EQUAL, Joiner, choose_stage, stage_strengths
from peerd.policy.swarm.rates import SampleDemand, computed_elsewhere
from peerd.policy.swarm.rebalance import Rebalancing, Rule
from peerd.table.record import Coordinate, PeerId, PeerRecord, Phase
from peerd.table.view import LiveView
from tests.policy.test_rebalance import changed, counts_of, settled, swarm_of
from tests.strategies import live_views, member, view_of

ME = member("me", phase=Phase.JOINING)
TWO, THREE = Joiner(lacking=["", ""]), Joiner(lacking=[""] * 3)


def at(ms: int) -> Coordinate:
    """So many milliseconds of round trip away from the joiners of these tests, which are at 0."""
    return Coordinate(10 * ms, 0, 1, 50)


def placed(name: str, stage: int, ms: int, throughput: float = 1.0) -> PeerRecord:
    return member(name, stage=stage, throughput=throughput, coordinate=at(ms))


@given(live_views(), st.lists(st.sampled_from(["", "2 GB of memory"]), min_size=2, max_size=4))
def test_a_stage_that_does_not_fit_is_never_chosen(live: LiveView, lacking: list[str]) -> None:
    choice = choose_stage(live, Joiner(lacking=lacking))
    if choice.stage is None:
        assert all(lacking)
        assert "2 GB of memory" in choice.reason
    else:
        assert not lacking[choice.stage]


@given(live_views(num_stages=3), st.booleans())
def test_an_empty_stage_comes_before_any_other(live: LiveView, is_reliable: bool) -> None:
    empty = [s for s in range(3) if not any(r.stage == s and not r.leaving and r.peer != live.me for r in live.records)]
    choice = choose_stage(live, replace(THREE, is_reliable=is_reliable))
    if empty:
        assert choice.stage in empty


@given(live_views(num_stages=3))
def test_no_stage_is_chosen_that_is_stronger_than_the_weakest_by_more_than_measuring_errors(live: LiveView) -> None:
    strengths = stage_strengths(live, range(3))
    stage = choose_stage(live, replace(THREE, coordinate=at(0))).stage
    assert stage is not None
    assert strengths[stage] <= NEAR_EQUAL * min(strengths.values())


def test_a_peer_takes_the_stage_that_the_organiser_wishes_it_in_where_it_fits() -> None:
    strong, weak = member("a", throughput=4.0), member("b", stage=1, throughput=1.0)
    choice = choose_stage(view_of(ME, strong, weak), replace(TWO, wished=0))
    assert (choice.stage, choice.reason) == (0, "the organiser wishes this peer in stage 0")
    assert choose_stage(view_of(ME, strong, weak), replace(TWO, wished=0, lacking=["memory", ""])).stage == 1
    assert choose_stage(view_of(ME, strong, weak), replace(TWO, wished=2)).stage == 1, "there is no such stage"


def test_the_weakest_stage_is_helped_and_a_peer_that_still_downloads_counts() -> None:
    strong, weak = member("a", throughput=4.0), member("b", stage=1, throughput=1.0)
    joining = [member(f"j{n}", stage=1, phase=Phase.JOINING) for n in range(2)]
    assert choose_stage(view_of(ME, strong, weak), TWO).stage == 1
    assert choose_stage(view_of(ME, strong, weak, *joining), TWO).stage == 0


def test_a_leaving_peer_is_no_strength() -> None:
    live = view_of(ME, member("a"), member("b", stage=1, throughput=9.0, leaving=True))
    assert choose_stage(live, TWO).stage == 1


def test_joiners_at_one_moment_spread_over_equal_stages() -> None:
    served = tuple(member(f"p{stage}", stage=stage, throughput=1.0) for stage in range(3))
    chosen = Counter(choose_stage(LiveView(me=PeerId(f"j{n}"), records=served), THREE).stage for n in range(90))
    assert all(15 <= chosen[stage] <= 45 for stage in range(3))


def test_a_stage_whose_lines_are_slow_is_the_weakest_however_fast_its_peers_compute() -> None:
    slow_lines = [member(f"a{n}", throughput=0.6, computes=10.0, up=625_000) for n in range(5)]
    fast_lines = [member(f"b{n}", stage=1, throughput=8.0, computes=8.0, up=12_500_000) for n in range(5)]
    assert choose_stage(view_of(ME, *slow_lines, *fast_lines), TWO).stage == 0


def test_of_stages_that_are_about_as_weak_the_near_one_is_taken_whoever_joins() -> None:
    served = [placed("a", 0, 80), placed("b", 1, 80), placed("c", 2, 5, 1.04), placed("d", 3, 5, 1.04), placed("e", 4, 5, 1.2)]
    for name in ("j1", "j2", "j3", "j4"):
        choice = choose_stage(view_of(member(name, phase=Phase.JOINING), *served), Joiner(lacking=[""] * 5, coordinate=at(0)))
        assert choice.stage == 3, "its mates and both neighbours are near; stage 4 is stronger, and the neighbour of stage 2 is far"
        assert "is near, at 5 ms" in choice.reason


def test_a_weaker_stage_is_taken_though_it_is_far() -> None:
    served = [placed("a", 0, 300, 1.0), placed("b", 1, 5, 1.1), placed("c", 2, 5, 1.1)]
    assert choose_stage(view_of(ME, *served), replace(THREE, coordinate=at(0))).stage == 0


def test_of_stages_as_weak_that_one_is_taken_whose_boundaries_the_line_carries() -> None:
    served = [member(name, stage=stage, throughput=1.0) for stage, name in enumerate("abc")]
    demands = [SampleDemand(sends=1e6, receives=1e6), SampleDemand(sends=2e6, receives=2e6), SampleDemand(sends=1e6, receives=1e6)]
    joiner = replace(THREE, up=5e5, down=1e7, demands=demands)
    chosen = {choose_stage(view_of(member(f"j{n}", phase=Phase.JOINING), *served), joiner).stage for n in range(20)}
    assert chosen == {0, 2}


def test_a_stage_whose_averages_the_line_does_not_carry_is_left_to_others_even_if_it_is_the_weakest() -> None:
    live = view_of(ME, member("a", throughput=1.0), member("b", stage=1, throughput=2.0))
    joiner = replace(TWO, up=1e6, round_rates=[2e6, 5e5])
    assert choose_stage(live, joiner).stage == 1
    assert choose_stage(live, replace(joiner, up=0.0)).stage == 0, "nothing is known of the line"
    assert choose_stage(live, replace(joiner, up=1e5)).stage == 0, "it carries neither"


def test_a_joiner_that_means_to_stay_goes_where_fewest_mean_to_stay_whoever_else_is_there() -> None:
    live = view_of(ME, member("a", throughput=9.0), member("b", stage=1, throughput=1.0, stays_hours=5))
    assert choose_stage(live, TWO).stage == 1
    choice = choose_stage(live, replace(TWO, is_reliable=True))
    assert choice.stage == 0
    assert "by peers that mean to stay" in choice.reason
    everywhere = view_of(ME, member("a", throughput=9.0, stays_hours=1), member("b", stage=1, throughput=1.0, stays_hours=5))
    assert choose_stage(everywhere, replace(TWO, is_reliable=True)).stage == 1
    nowhere = view_of(ME, member("a", throughput=9.0), member("b", stage=1, throughput=1.0))
    assert choose_stage(nowhere, replace(TWO, is_reliable=True)).stage == 1


def test_a_peer_that_moves_computes_as_its_new_stages_work_allows() -> None:
    demands = (SampleDemand(work=1.0), SampleDemand(work=4.0))
    assert computed_elsewhere(100.0, demands, 0, 1) == 25.0
    assert computed_elsewhere(25.0, demands, 1, 0) == 100.0
    assert computed_elsewhere(25.0, (), 1, 0) == 25.0


def test_hole_62_a_stage_of_few_comes_first_however_strong_its_peers_say_that_they_are() -> None:
    strong, weak = [member("a", throughput=1e9), member("b", throughput=1e9)], [member(name, stage=1, throughput=1.0) for name in "cdef"]
    live = view_of(ME, *strong, *weak)
    assert choose_stage(live, TWO).stage == 1
    assert choose_stage(live, Joiner(lacking=["", ""], least_peers=3)).stage == 0
    assert choose_stage(live, Joiner(lacking=["too much", ""], least_peers=3)).stage == 1
    enough = view_of(ME, *strong, member("g", throughput=1e9), *weak)
    assert choose_stage(enough, Joiner(lacking=["", ""], least_peers=3)).stage == 1


@pytest.mark.parametrize("rule", [Rule.IMPROVED, Rule.QUEUES])
def test_hole_62_a_peer_that_claims_to_be_fast_or_never_busy_is_not_left_alone_in_its_stage(rule: Rule) -> None:
    """Its mates would move to the other stage one by one, and it would be most of its own."""
    params = Rebalancing(rule=rule, least_peers=3)

    def settles_at(counts: tuple[int, int], params: Rebalancing) -> list[int]:
        live = changed(swarm_of(*counts), "s0p000", throughput=1e9)
        live = replace(live, records=tuple(replace(r, backlog=9 * r.stage) for r in live.records))
        return counts_of(settled(live, 2, params)[0], 2)

    assert settles_at((4, 3), params) == [3, 4]
    assert settles_at((3, 3), params) == [3, 3]
    assert settles_at((3, 1), params) == [2, 2], "neither has enough"
    assert settles_at((3, 0), params) == [2, 1] or rule is Rule.QUEUES
    assert min(settles_at((4, 3), replace(params, least_peers=1))) < 3
