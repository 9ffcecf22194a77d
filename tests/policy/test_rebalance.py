"""Rebalancing: who moves, who never does, and that planners on unlike views do not all run at once."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from peerd.policy.swarm.rates import SampleDemand
from peerd.policy.swarm.rebalance import Move, Plan, Rebalancing, Rule, move_of, plan
from peerd.table.record import PeerId, PeerRecord, Phase
from peerd.table.view import LiveView
from tests.strategies import member

IMPROVED = Rebalancing()
ALGORITHM_2 = Rebalancing(rule=Rule.QUEUES)

rules = st.sampled_from([*(Rebalancing(rule=rule) for rule in Rule), Rebalancing(download_s=240, noise=0.0), Rebalancing(noise=0.3)])
nobody_says, some_stay = st.just(0), st.sampled_from([0, 0, 0, 5])
throughputs = st.sampled_from([0.0, 0.3, 1.0, 2.5, 8.0])


@st.composite
def swarms(
    draw: st.DrawFn, num_stages: int = 3, throughput: st.SearchStrategy[float] = throughputs, stays: st.SearchStrategy[int] = nobody_says
) -> LiveView:
    """Some peers on some stages, in every phase, loaded and fast in every way."""
    records = [
        member(
            f"peer{number:02}",
            stage=draw(st.integers(0, num_stages - 1)),
            phase=draw(st.sampled_from([Phase.JOINING, Phase.ACCUMULATING, Phase.AVERAGED])),
            leaving=draw(st.integers(0, 9)) == 0,
            backlog=draw(st.integers(0, 5)) / 1.0,
            throughput=draw(throughput),
            stays_hours=draw(stays),
        )
        for number in range(draw(st.integers(1, 14)))
    ]
    return LiveView(me=records[0].peer, records=tuple(records))


def swarm_of(*counts: int, throughput: float = 1.0) -> LiveView:
    """So many equal peers on each stage."""
    records = [member(f"s{stage}p{n:03}", stage=stage, throughput=throughput) for stage, count in enumerate(counts) for n in range(count)]
    return LiveView(me=records[0].peer, records=tuple(records))


def counts_of(live: LiveView, num_stages: int) -> list[int]:
    found = Counter(record.stage for record in live.records)
    return [found[stage] for stage in range(num_stages)]


def changed(live: LiveView, peer: str, **fields: object) -> LiveView:
    records = tuple(replace(r, **fields) if r.peer == peer else r for r in live.records)  # type: ignore[arg-type]
    return replace(live, records=records)


def carried_out(live: LiveView, found: Plan, phase: Phase = Phase.ACCUMULATING) -> LiveView:
    for move in found.moves:
        live = changed(live, move.peer, stage=move.to_stage, phase=phase)
    return live


def settled(live: LiveView, num_stages: int, params: Rebalancing, periods: int = 200) -> tuple[LiveView, int]:
    """The swarm once nobody moves any more, and the number of moves it took."""
    for period in range(periods):
        found = plan(live, num_stages, period, params)
        if not found.moves:
            return live, period
        live = carried_out(live, found)
    raise AssertionError("it never comes to rest")


# What holds for every rule


@given(swarms(stays=some_stay), st.integers(0, 3), rules)
def test_a_stage_is_never_left_empty(live: LiveView, seed: int, params: Rebalancing) -> None:
    for move in plan(live, 3, seed, params).moves:
        staying = [r for r in live.serving(move.from_stage) if not r.leaving and r.peer != move.peer]
        assert staying != []


@given(swarms(stays=some_stay), st.integers(0, 3), rules)
def test_the_last_peer_of_a_stage_that_means_to_stay_never_moves(live: LiveView, seed: int, params: Rebalancing) -> None:
    for move in plan(live, 3, seed, params).moves:
        mover = live.find(move.peer)
        others = [r for r in live.serving(move.from_stage) if r.is_reliable and r.peer != move.peer]
        assert mover is not None
        assert others or not mover.is_reliable


@pytest.mark.parametrize("rule", [Rule.IMPROVED, Rule.QUEUES])
def test_a_stage_without_a_peer_that_means_to_stay_gets_one_from_the_stage_with_most(rule: Rule) -> None:
    params = Rebalancing(rule=rule)
    records = [member(f"s{s}p{n}", stage=s, throughput=1.0, stays_hours=n < have) for s, have in enumerate((1, 0, 3)) for n in range(4)]
    live = LiveView(me=records[0].peer, records=tuple(records))
    found = plan(live, 3, 0, params)
    assert [(move.from_stage, move.to_stage) for move in found.moves] == [(2, 1)]
    assert "no peer that means to stay" in found.reason
    assert not plan(carried_out(live, found, Phase.JOINING), 3, 0, params).moves or rule is Rule.IMPROVED
    at_rest, _ = settled(live, 3, params)
    assert all(any(r.is_reliable for r in at_rest.of_stage(stage)) for stage in range(3))
    assert not plan(swarm_of(2, 2, 2), 3, 0, params).moves, "nobody says so: nothing changes"


@given(swarms(stays=some_stay), st.integers(0, 3), rules, st.randoms(use_true_random=False))
def test_the_order_of_records_and_whose_view_it_is_do_not_matter(
    live: LiveView, seed: int, params: Rebalancing, chance: random.Random
) -> None:
    shuffled = list(live.records)
    chance.shuffle(shuffled)
    assert plan(LiveView(me=PeerId("else"), records=tuple(shuffled)), 3, seed, params) == plan(live, 3, seed, params)


@given(swarms(stays=some_stay), st.integers(0, 3), rules)
def test_at_most_one_peer_moves_and_only_one_that_serves_and_stays(live: LiveView, seed: int, params: Rebalancing) -> None:
    found = plan(live, 3, seed, params)
    assert len(found.moves) <= 1
    for move in found.moves:
        mover = live.find(move.peer)
        assert mover is not None
        assert mover.stage == move.from_stage != move.to_stage
        assert mover.phase is not Phase.JOINING
        assert not mover.leaving
        assert move_of(found, mover) == move


@given(swarms(), rules)
def test_every_decision_has_its_reason(live: LiveView, params: Rebalancing) -> None:
    found = plan(live, 3, 0, params)
    assert found.reason
    assert all(move.reason == found.reason for move in found.moves)


@given(swarms())
def test_without_rebalancing_or_with_one_stage_nobody_moves(live: LiveView) -> None:
    assert plan(live, 3, 0, Rebalancing(rule=Rule.NONE)).moves == ()
    assert plan(live, 1, 0, IMPROVED).moves == ()


def test_who_has_moved_or_still_downloads_or_leaves_ignores_the_plan() -> None:
    found = Plan((Move(peer=PeerId("a"), from_stage=0, to_stage=1, reason="why"),), "why")
    assert move_of(found, member("a", stage=0)) == found.moves[0]
    assert move_of(found, member("b", stage=0)) is None
    assert move_of(found, member("a", stage=1)) is None
    assert move_of(found, member("a", stage=0, leaving=True)) is None
    assert move_of(found, member("a", stage=0, phase=Phase.JOINING)) is None


@pytest.mark.parametrize(
    "wrong",
    [{"period_s": 0}, {"horizon_s": float("inf")}, {"download_s": -1}, {"slack": 1.5}, {"noise": float("nan")}],
)
def test_a_broken_parameter_is_named(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Rebalancing(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["demands", "needed_bytes"])
def test_figures_per_stage_must_be_there_for_every_stage(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        plan(swarm_of(1, 1), 2, 0, Rebalancing(**{field: (1, 1, 1)}))  # type: ignore[arg-type]


# Algorithm 2


def test_algorithm_2_takes_the_least_loaded_peer_of_the_least_loaded_stage_to_the_most_loaded() -> None:
    idle = [member("a", backlog=2), member("b", backlog=1), member("c", backlog=2)]
    others = [member("d", stage=1, backlog=7), member("e", stage=2, backlog=9)]
    (move,) = plan(LiveView(me=PeerId("a"), records=(*idle, *others)), 3, 0, ALGORITHM_2).moves
    assert (move.peer, move.from_stage, move.to_stage) == ("b", 0, 2)
    assert "stage 0 has 5 queued and stage 2 has 9" in move.reason


def test_algorithm_2_moves_nobody_between_equal_loads_nor_the_last_of_a_stage() -> None:
    assert plan(swarm_of(2, 2), 2, 0, ALGORITHM_2).moves == ()
    alone = LiveView(me=PeerId("a"), records=(member("a", backlog=0), member("b", stage=1, backlog=5)))
    found = plan(alone, 2, 0, ALGORITHM_2)
    assert found.moves == ()
    assert "empty" in found.reason


# The improved rule


@given(swarms(throughput=st.sampled_from([0.3, 1.0, 2.5, 8.0])), st.integers(0, 3))
def test_no_move_makes_a_bottleneck_worse_and_each_raises_the_weakest_stage(live: LiveView, seed: int) -> None:
    def strengths(of: LiveView) -> list[float]:
        return [sum(r.throughput for r in of.records if r.stage == stage and not r.leaving) for stage in range(3)]

    found = plan(live, 3, seed, IMPROVED)
    assume(found.moves)
    before, after = strengths(live), strengths(carried_out(live, found))
    (move,) = found.moves
    assert before[move.to_stage] == min(before)
    assert min(after[move.to_stage], after[move.from_stage]) > min(before)
    assert min(after) >= min(before)


@given(
    st.lists(st.integers(0, 12), min_size=2, max_size=4).filter(any), st.sampled_from([0.1, 1.0, 3.7]), st.sampled_from([0.0, 0.02, 0.1])
)
def test_equal_peers_end_at_the_best_partition_in_the_fewest_moves(counts: list[int], throughput: float, noise: float) -> None:
    live, num_moves = settled(swarm_of(*counts, throughput=throughput), len(counts), Rebalancing(noise=noise))
    share = sum(counts) // len(counts)
    assert min(counts_of(live, len(counts))) == share
    assert num_moves == sum(max(0, share - count) for count in counts)


@given(swarms(num_stages=4, throughput=st.floats(1.0, 8.0)), st.integers(0, 3))
def test_unlike_peers_come_to_rest(live: LiveView, seed: int) -> None:
    settled(live, 4, IMPROVED)


def test_seven_and_one_become_four_and_four_in_three_periods() -> None:
    live, num_moves = settled(swarm_of(7, 1), 2, IMPROVED)
    assert counts_of(live, 2) == [4, 4]
    assert num_moves == 3


def test_a_move_in_flight_counts_and_is_not_moved_again() -> None:
    live = swarm_of(4, 2)
    once = carried_out(live, plan(live, 2, 0, IMPROVED), Phase.JOINING)
    assert counts_of(once, 2) == [3, 3]
    assert plan(once, 2, 1, IMPROVED).moves == ()


def test_the_peer_that_fits_the_gap_best_moves() -> None:
    strong = [member(f"a{speed}", throughput=float(speed)) for speed in (1, 2, 4, 8)]
    weak = [member("b", stage=1, throughput=7.0)]
    (move,) = plan(LiveView(me=PeerId("b"), records=(*strong, *weak)), 2, 0, IMPROVED).moves
    assert move.peer == "a4"
    assert "stage 1 is the weakest, at 7 of a fair 11 samples/s" in move.reason


def test_a_lack_of_less_than_one_peer_is_made_good_where_one_move_raises_the_whole() -> None:
    """Five and three, and stage 0 takes a little longer for the same: four and four are better by a seventh."""
    slow, fast = [member(f"a{n}", throughput=9.3) for n in range(5)], [member(f"b{n}", stage=1, throughput=10.7) for n in range(3)]
    (move,) = plan(LiveView(me=PeerId("b0"), records=(*slow, *fast)), 2, 0, Rebalancing(noise=0.05)).moves
    assert (move.from_stage, move.to_stage) == (0, 1)
    third = [member(f"c{n}", stage=2, throughput=10.7) for n in range(3)]
    found = plan(LiveView(me=PeerId("b0"), records=(*slow, *fast, *third)), 3, 0, Rebalancing(noise=0.05))
    assert found.moves == (), "the third stage would be as weak as before"
    assert "less than one peer" in found.reason


@given(st.lists(st.integers(0, 50), min_size=9, max_size=9))
def test_queues_however_noisy_do_not_change_the_improved_plan(queues: list[int]) -> None:
    live = swarm_of(6, 3)
    noisy = replace(live, records=tuple(replace(r, backlog=q) for r, q in zip(live.records, queues, strict=True)))
    assert plan(noisy, 2, 0, IMPROVED) == plan(live, 2, 0, IMPROVED)


@given(st.integers(1, 30), st.lists(st.floats(-1, 1), min_size=2, max_size=4), st.floats(0, 0.25), st.data())
def test_even_stages_whose_totals_are_off_by_one_standard_deviation_are_left_alone(
    num_peers: int, deviations: list[float], noise: float, data: st.DataObject
) -> None:
    """Any two of them then differ by no more than two; how the errors are spread over a stage's peers does not matter."""
    records = []
    for stage, deviation in enumerate(deviations):
        errors = data.draw(st.lists(st.floats(-1, 1), min_size=num_peers, max_size=num_peers))
        shift = deviation / math.sqrt(num_peers) - math.fsum(errors) / num_peers
        records += [member(f"s{stage}p{n}", stage=stage, throughput=1 + noise * (error + shift)) for n, error in enumerate(errors)]
    assert plan(LiveView(me=records[0].peer, records=tuple(records)), len(deviations), 0, Rebalancing(noise=noise)).moves == ()


@given(swarms(throughput=st.sampled_from([0.3, 1.0, 2.5, 8.0])), st.integers(0, 3), st.sampled_from([0.0, 0.02, 0.1, 0.3]))
def test_a_stage_that_lacks_a_mean_peer_gets_one_where_the_source_stays_ahead_by_more_than_the_error(
    live: LiveView, seed: int, noise: float
) -> None:
    rates = [[r.throughput for r in live.records if r.stage == stage and not r.leaving] for stage in range(3)]
    strengths = [math.fsum(found) for found in rates]
    weakest = strengths.index(min(strengths))
    serving = [[r.throughput for r in live.serving(stage) if not r.leaving] for stage in range(3)]
    lack = math.fsum(strengths) / 3 - strengths[weakest]
    num_peers = sum(len(found) for found in rates)
    assume(num_peers > 0 and lack >= math.fsum(strengths) / num_peers)
    assume(strengths.count(strengths[weakest]) == 1)
    assume(serving[weakest] or not rates[weakest])
    spared = [
        rate
        for stage in range(3)
        if stage != weakest and len(serving[stage]) > 1
        for rate in serving[stage]
        if strengths[stage] - rate > 1e-6 + strengths[weakest] + 2 * noise * math.hypot(*rates[stage], *rates[weakest])
    ]
    found = plan(live, 3, seed, Rebalancing(noise=noise))
    assert [move.to_stage for move in found.moves] == ([weakest] if spared else [])


@given(st.lists(st.integers(1, 20), min_size=2, max_size=5), st.sampled_from([0.0, 0.02, 0.1, 0.3]))
def test_the_allowance_for_errors_keeps_back_no_more_than_it_says(counts: list[int], noise: float) -> None:
    """At rest the weakest stage lacks at most one of the equal peers and two deviations, after no more moves than peers were misplaced."""
    live, num_moves = settled(swarm_of(*counts), len(counts), Rebalancing(noise=noise))
    mean, final = sum(counts) / len(counts), counts_of(live, len(counts))
    assert mean - min(final) <= 1 + 2 * noise * math.sqrt(min(final) + max(final))
    too_few = sum(max(0, math.floor(mean) - count) for count in counts)
    too_many = sum(max(0, count - math.ceil(mean)) for count in counts)
    assert num_moves <= max(too_few, too_many)


def test_a_difference_that_may_be_measuring_error_moves_nobody() -> None:
    """Sixty peers a stage: two sums that are 3 apart, of peers measured with an error of 30 % each, are not known to differ."""
    live = swarm_of(62, 58)
    assert plan(live, 2, 0, Rebalancing(noise=0.05)).moves
    found = plan(live, 2, 0, Rebalancing(noise=0.3))
    assert found.moves == ()
    assert "measuring error" in found.reason


def test_with_many_stages_a_small_lack_is_let_be() -> None:
    counts = [100] * 7 + [98, 104, 100]
    assert "within 3%" in plan(swarm_of(*counts), 10, 0, IMPROVED).reason
    assert plan(swarm_of(*counts), 10, 0, Rebalancing(slack=0.0)).moves


def test_a_move_that_does_not_pay_is_not_made() -> None:
    live = swarm_of(6, 2)
    assert plan(live, 2, 0, Rebalancing(download_s=600, horizon_s=3600)).moves
    found = plan(live, 2, 0, Rebalancing(download_s=2000, horizon_s=3600))
    assert found.moves == ()
    assert "does not pay" in found.reason


def test_planners_with_other_downloads_name_the_same_peer_or_nobody() -> None:
    live = swarm_of(9, 4, 2)
    named = {move.peer for download_s in (0, 60, 600, 3000) for move in plan(live, 3, 5, Rebalancing(download_s=download_s)).moves}
    assert len(named) == 1


def test_a_stage_with_twice_the_work_gets_twice_the_peers() -> None:
    """Throughput is measured at the present stage: at the heavy one the same machine does half as many samples."""
    live = swarm_of(6, 6)
    params = Rebalancing(demands=(SampleDemand(work=1.0), SampleDemand(work=2.0)))
    for period in range(4):
        live = replace(live, records=tuple(replace(r, throughput=1.0 / (1 + r.stage)) for r in live.records))
        live = carried_out(live, plan(live, 2, period, params))
    assert counts_of(live, 2) == [4, 8]


def test_nobody_moves_to_a_stage_that_does_not_fit_their_memory() -> None:
    live = swarm_of(6, 2)
    small = replace(live, records=tuple(replace(r, memory_bytes=10) for r in live.records))
    params = Rebalancing(needed_bytes=(5, 20))
    assert plan(small, 2, 0, params).moves == ()
    (move,) = plan(changed(small, "s0p003", memory_bytes=30), 2, 0, params).moves
    assert move.peer == "s0p003"


def test_an_empty_stage_gets_one_peer_and_no_second_before_the_first_has_its_state() -> None:
    live = swarm_of(8, 0)
    found = plan(live, 2, 0, IMPROVED)
    assert [move.to_stage for move in found.moves] == [1]
    waiting = plan(carried_out(live, found, Phase.JOINING), 2, 1, IMPROVED)
    assert waiting.moves == ()
    assert "on its way" in waiting.reason
    assert plan(carried_out(live, found), 2, 1, IMPROVED).moves


def test_who_claims_the_speed_of_millions_drains_no_stage() -> None:
    """Believed, stage 0 would be strong enough to give away everybody else."""
    live = settled(changed(swarm_of(400, 400), "s0p000", throughput=1e30), 2, IMPROVED)[0]
    assert counts_of(live, 2)[0] >= 350


def test_peers_not_yet_measured_count_as_the_mean() -> None:
    live = changed(changed(swarm_of(3, 3, throughput=5.0), "s0p000", throughput=0.0), "s1p000", throughput=0.0)
    assert plan(live, 2, 0, IMPROVED).moves == ()
    assert plan(swarm_of(5, 1, throughput=0.0), 2, 0, IMPROVED).moves


@pytest.mark.parametrize("missed", [1, 3, 10])
def test_planners_that_each_miss_some_of_the_records_do_not_stampede(missed: int) -> None:
    """Sixty peers plan on views of their own, and each acts on what its own plan says of it."""
    live = swarm_of(30, 20, 10)
    for period in range(10):
        chance = random.Random(period)
        movers = [r for r in live.records if _moves_itself(r, live, chance, (period, missed))]
        assert len(movers) <= 3


def _moves_itself(mine: PeerRecord, live: LiveView, chance: random.Random, what: tuple[int, int]) -> bool:
    period, missed = what
    unseen = {r.peer for r in chance.sample([r for r in live.records if r.peer != mine.peer], missed)}
    seen = LiveView(me=mine.peer, records=tuple(r for r in live.records if r.peer not in unseen))
    return move_of(plan(seen, 3, period, IMPROVED), mine) is not None
