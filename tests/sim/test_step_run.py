"""Steps of a run in virtual time: what follows from links and devices, and that every microbatch is computed once."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import combinations
from statistics import fmean

import pytest

from peerd.planner import placing
from peerd.planner.network import PeerSpec, Topology
from peerd.planner.steady import Members, RunCost, StageDemand, SteadyModel
from peerd.sim.churn import Churn
from peerd.sim.ledgers import NOBODY, Ledgers
from peerd.sim.network import Homes, Pairs, SharedLines
from peerd.sim.run import simulate_run
from peerd.sim.step_run import RunResult, RunSettings, joined
from peerd.timeline.critical import critical_shares
from peerd.timeline.spans import SpanKind


def cost(num_stages: int, num_microbatches: int, boundary: float = 1e4, gradients: float = 0.0, hidden: bool = False) -> RunCost:
    ends = [boundary] * (num_stages - 1) + [0.0]
    stages = [StageDemand(flops=1e12, memory_bytes=0, forth_bytes=end, back_bytes=end, gradient_bytes=gradients) for end in ends]
    return RunCost(
        stages=tuple(stages),
        microbatches_per_step=num_microbatches,
        tokens_per_microbatch=10,
        is_averaging_hidden=hidden,
        slots=2 * num_stages + 4,
    )


def network(*peers: PeerSpec, delay_s: float = 0.0) -> Topology:
    count = range(len(peers))
    delays = tuple(tuple(delay_s * (a != b) for b in count) for a in count)
    return Topology(peers, delays, ((math.inf,) * len(peers),) * len(peers))


def homes(num_peers: int, seed: int) -> Topology:
    drawn, count = Homes(num_peers, 1e12, seed), range(num_peers)
    delays = tuple(tuple(0.0 if a == b else drawn.delay_s(a, b) for b in count) for a in count)
    return Topology(drawn.peers, delays, ((math.inf,) * num_peers,) * num_peers)


def simulated(run: RunCost, peers: Topology, members: Members, num_steps: int = 3, noise: float = 0.0) -> RunResult:
    settings = RunSettings(num_steps=num_steps, slots=run.slots, microbatch_size=1, noise=noise)
    return simulate_run(run, Pairs(peers), members, settings)


def test_one_peer_alone_takes_what_its_microbatches_take() -> None:
    found = simulated(cost(1, 8), network(PeerSpec(name="a", flops=2e12)), ((0,),))
    assert found.step_s == pytest.approx([4.0] * 3)
    assert found.tokens_per_s == pytest.approx(20.0)
    assert sum(found.sent_bytes) == 0


def test_two_stages_of_a_peer_take_the_passage_of_one_microbatch_more_than_a_stage_does() -> None:
    peers = network(PeerSpec(name="a", flops=1e12), PeerSpec(name="b", flops=1e12), delay_s=0.1)
    found = simulated(cost(2, 32), peers, ((0,), (1,)))
    assert 32 <= min(found.step_s) <= max(found.step_s) <= 32 + 4
    assert found.sent_bytes == pytest.approx((3 * 32 * 1e4, 3 * 32 * 1e4))


def test_a_slow_uplink_binds_and_averages_that_overlap_cost_nothing_while_they_are_shorter() -> None:
    peers = network(*(PeerSpec(name=name, flops=1e13, up=1e6, down=1e7) for name in "abcd"))
    shown = simulated(cost(2, 40, boundary=1e6, gradients=5e6), peers, ((0, 1), (2, 3)), num_steps=6)
    hidden = simulated(cost(2, 40, boundary=1e6, gradients=5e6, hidden=True), peers, ((0, 1), (2, 3)), num_steps=6)
    assert shown.averaging_s == hidden.averaging_s == pytest.approx(5.0, rel=0.015)
    assert min(shown.step_s) >= 20 + 5
    assert sum(hidden.step_s) < sum(shown.step_s)


def test_every_stage_computes_every_microbatch_once_and_peers_tell_what_they_did() -> None:
    run, peers = cost(3, 50), homes(9, seed=1)
    found = simulated(run, peers, placing.joining(SteadyModel(run, peers)), noise=0.1)
    for stage in range(3):
        for kind in (SpanKind.FORWARD, SpanKind.BACKWARD):
            spans = [span for each in found.timelines if each.stage == stage for span in each.spans if span.kind is kind]
            assert Counter((span.step, span.microbatch) for span in spans) == Counter((step, n) for step in range(3) for n in range(50))
    shares = critical_shares(found.timelines)
    assert shares.compute + shares.wait + shares.wire + shares.step_end == pytest.approx(1.0)
    assert shares.compute > 0.3


def test_the_same_seed_gives_the_same_steps() -> None:
    run, peers = cost(2, 40), homes(8, seed=2)
    members = placing.dealt(SteadyModel(run, peers))
    assert simulated(run, peers, members, noise=0.2) == simulated(run, peers, members, noise=0.2)


@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 7))])
def test_the_steady_state_foretells_what_the_simulation_shows_and_in_which_order(seed: int) -> None:
    """Placements that it tells apart by more than a tenth."""
    run, peers = cost(4, 256, gradients=1e5), homes(24, seed)
    steady = SteadyModel(run, peers)
    placements = [placing.at_random(steady, seed), placing.dealt(steady), placing.searched(steady, 0)]
    expected = [steady.state(members).step_s for members in placements]
    found = [fmean(simulated(run, peers, members, num_steps=4, noise=0.05).step_s[1:]) for members in placements]
    assert expected == sorted(expected, reverse=True)
    for (here, told), (later, told_later) in combinations(zip(found, expected, strict=True), 2):
        assert later < here or told_later > 0.9 * told
    assert all(0.9 <= here / there <= 1.15 for here, there in zip(found, expected, strict=True))


def test_a_thousand_homes_join_evenly_and_take_a_step_in_a_second_of_a_core() -> None:
    run, links = cost(4, 1024), Homes(1000, 1e12, seed=0)
    members = joined(run, links)
    assert sorted(peer for peers in members for peer in peers) == list(range(1000))
    found = simulate_run(run, links, members, RunSettings(num_steps=2, slots=12, microbatch_size=1))
    assert len(found.step_s) == 2
    assert len(found.timelines) == 64


def test_a_stage_without_a_peer_is_named() -> None:
    with pytest.raises(ValueError, match="stage 1 has no peer"):
        simulated(cost(2, 4), network(PeerSpec(name="a")), ((0,), ()))


def test_transfers_share_the_uplink_in_order_and_a_pair_with_a_limit_leaves_room_for_others() -> None:
    lines = SharedLines(Pairs(network(PeerSpec(name="a", up=1e6), PeerSpec(name="b", down=1e6), PeerSpec(name="c"))))
    assert lines.send(0, 1, 1e6, 0.0) == pytest.approx((0.0, 1.0))
    assert lines.send(0, 2, 1e6, 0.0) == pytest.approx((1.0, 2.0))
    assert lines.send(2, 1, 1e6, 0.0) == pytest.approx((0.0, 2.0)), "b's downlink takes them one after the other"
    assert lines.send(1, 1, 1e9, 3.0) == (3.0, 3.0)


def test_a_connection_that_was_idle_is_slow_at_first_and_one_that_is_busy_is_not() -> None:
    """14,480 bytes at first, then twice as many each round trip: 262 KB need five of 0.2 s, in one of which the line sends 2 MB."""
    peers = [PeerSpec(name=name, up=1e7, down=1e7) for name in "ab"]
    lines = SharedLines(Pairs(network(*peers, delay_s=0.1)))
    sent_s = [lines.send(0, 1, 262_144, now_s)[1] - now_s for now_s in (0.0, 1.0, 1.05, 1.1, 60.0)]
    assert sent_s[0] == pytest.approx(0.1 + 4 * 0.2 + 0.0262 - 0.0217, abs=0.001)
    assert max(sent_s[1:4]) <= 0.1 + 3 * 0.0262 + 0.2
    assert sent_s[4] == pytest.approx(sent_s[0])


@pytest.mark.parametrize(("one", "other"), [(2, 1), (1, 2), (2, 0)])
def test_a_connection_that_was_idle_is_slower_still_where_other_tensors_fill_a_line_on_its_way(one: int, other: int) -> None:
    """Segments from 0 to 1 wait before the downlink of 1, acknowledgements before its uplink and the downlink of 0."""
    peers = [PeerSpec(name=name, up=1e6, down=1e6) for name in "abc"]
    free, filled = (SharedLines(Pairs(network(*peers, delay_s=0.1))) for _ in range(2))
    filled.send(one, other, 1e6, 0.0)
    alone_s, late_s = (lines.send(0, 1, 100_000, 0.0)[1] for lines in (free, filled))
    waits, queue_s = 2, 0.2 + 0.2  # after 14 and 43 KB; a round trip, and 0.1 s for each of two connections
    behind_s = 1.0 if other == 1 else 0.0  # its own bytes come after those of the other transfer, too
    assert alone_s + waits * queue_s - 1e-9 <= late_s <= alone_s + waits * queue_s + behind_s + 1e-9


def test_a_transfer_that_comes_slowly_holds_up_no_other() -> None:
    slow, fast = PeerSpec(name="slow", up=1e5), PeerSpec(name="fast", up=1e7)
    lines = SharedLines(Pairs(network(slow, fast, PeerSpec(name="to", down=1e6))))
    assert lines.send(0, 2, 1e6, 0.0) == pytest.approx((0.0, 10.0))
    assert lines.send(1, 2, 1e6, 0.0) == pytest.approx((0.0, 2.0)), "after as many bytes of the other"
    limited = ((math.inf, 1e5, math.inf), (math.inf,) * 3, (math.inf,) * 3)
    lines = SharedLines(Pairs(replace(network(fast, slow, PeerSpec(name="to")), rate=limited)))
    assert [lines.send(0, 1, 1e6, 0.0)[1] for _ in range(2)] == pytest.approx([10.0, 20.0])
    assert lines.send(0, 2, 1e6, 0.0)[1] == pytest.approx(0.3), "a pair that is slow leaves the uplink to others"


@pytest.mark.parametrize("seed", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_where_lines_bind_steps_take_what_the_steady_state_says(seed: int) -> None:
    run, peers = cost(4, 256, boundary=1e6, gradients=1e5), homes(24, seed)
    steady = SteadyModel(run, peers)
    for members in (placing.dealt(steady), placing.searched(steady, 0)):
        found = fmean(simulated(run, peers, members, num_steps=4, noise=0.05).step_s[1:])
        assert 0.95 <= found / steady.state(members).step_s <= 1.2


@pytest.mark.parametrize("share", [0.2, 0.4, 0.6])
def test_whoever_goes_all_averages_are_exact_and_each_stage_keeps_a_reliable_peer(share: float) -> None:
    """Six in ten of the unreliable peers go in each step, of 16 homes in 2 stages."""
    run, links, churn = cost(2, 128, boundary=1e5, gradients=1e6), Homes(16, 1e12, seed=0), Churn(share=share, rate=0.6)
    members = joined(run, links, churn.unreliable(16, 0))
    settings = RunSettings(num_steps=6, slots=run.slots, microbatch_size=1, churn=churn)
    found = simulate_run(run, links, members, settings)
    assert len(found.step_s) == 6
    assert found.churn.departures >= 6
    assert found.churn.relaunched > 0
    assert found.churn.inexact == 0
    assert found.churn.least_reliable >= 1
    calm = simulate_run(run, links, members, replace(settings, churn=replace(churn, rate=0.0)))
    assert calm.churn.departures == calm.churn.relaunched == 0
    assert found.tokens_per_s >= calm.tokens_per_s / 3
    assert simulate_run(run, links, members, settings) == found, "the same seed, the same departures"


def test_what_a_dead_peer_held_is_computed_again_in_its_stage_alone() -> None:
    """Two of three equal peers of the last stage go in every step: they take what they did with them, the first stage's peer stays."""
    peers = network(*(PeerSpec(name=name, flops=1e12) for name in "abcd"), delay_s=0.01)
    churn = Churn(share=0.5, rate=1.0, noticed_s=1.0)
    seed = next(seed for seed in range(99) if churn.unreliable(4, seed) == {2, 3})
    settings = RunSettings(num_steps=1, slots=12, microbatch_size=1, noise=0.0, seed=seed, churn=churn)
    found = simulate_run(cost(2, 30), Pairs(peers), ((0,), (1, 2, 3)), settings)
    kinds = Counter((each.stage, span.kind) for each in found.timelines for span in each.spans)
    assert found.churn.departures == 2
    assert kinds[0, SpanKind.BACKWARD] == 30, "no gradient comes twice"
    assert kinds[0, SpanKind.FORWARD] >= 30 + found.churn.relaunched
    assert found.churn.inexact == 0


def test_ledgers_know_what_is_missing_and_what_two_peers_did() -> None:
    ledgers = Ledgers(2, 3)
    ledgers.open(0)
    assert [ledgers.add(0, 0, index, index % 2) for index in range(3)] == [True] * 3
    assert not ledgers.add(0, 0, 1, 7)
    assert ledgers.suppressed == 1
    assert ledgers.why_inexact(0, 0) is None
    assert ledgers.is_complete(0, 0)
    assert not ledgers.is_complete(1, 0)
    assert ledgers.drop(0, 1, frozenset({0})) == [], "its stage has averaged the step"
    assert ledgers.drop(0, 0, frozenset()) == [(0, 0, 0), (0, 0, 2)]
    assert ledgers.holder(0, 0, 0) == NOBODY
    assert ledgers.holder(0, 0, 1) == 1
    assert ledgers.why_inexact(0, 0) is not None
    ledgers.close(0)
    assert not ledgers.add(0, 0, 0, 1)
    assert not ledgers.is_missing_from(0, 0, 0)
