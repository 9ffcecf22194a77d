"""Stochastic wiring: shares follow speed in every step, whoever sends; newcomers are tried but not flooded; who failed waits."""

from __future__ import annotations

import itertools
import random
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heapify, heappop, heappush

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.route import wiring
from peerd.policy.route.wiring import FIRST_PAUSE_S, RECENT, Router, next_pause_s, point_of
from peerd.table.record import PeerId, PeerRecord
from tests.strategies import member

sizes = st.integers(1, 300)


def measured(response_s: dict[str, float], times: int = 5) -> tuple[Router, list[PeerRecord]]:
    """A router that has measured everybody, and peers that claim what they do."""
    router, peers = Router(), [member(name, throughput=1 / each_s) for name, each_s in response_s.items()]
    for _ in range(times):
        for peer in peers:
            router.observe(peer.peer, response_s[peer.peer])
    return router, peers


def one_step(routers: list[Router], candidates: list[PeerRecord], num_microbatches: int) -> Counter[str]:
    """Who gets how much of a step whose microbatches these callers send, each some of them."""
    chosen: Counter[str] = Counter()
    rng = random.Random(num_microbatches)
    for index in range(num_microbatches):
        record = rng.choice(routers).choose(candidates, point_of(index, num_microbatches))
        assert record is not None
        chosen[record.peer] += 1
    return chosen


@given(st.lists(st.floats(0.1, 5.0), min_size=1, max_size=6), sizes, st.integers(1, 4))
def test_of_every_step_each_peer_gets_its_share_to_within_one_whoever_sends(responses: list[float], size: int, num_callers: int) -> None:
    times = {f"p{number}": response for number, response in enumerate(responses)}
    made = [measured(times) for _ in range(num_callers)]
    chosen = one_step([router for router, _ in made], made[0][1], size)
    fine = one_step([made[0][0]], made[0][1], 2_000)
    assert all(abs(chosen[name] - size * fine[name] / 2_000) <= 1.3 for name in times)


@given(sizes)
def test_points_of_a_step_are_at_equal_distances(size: int) -> None:
    points = sorted(point_of(index, size) for index in range(size))
    assert all(abs(point - (number + 0.5) / size) < 1e-9 for number, point in enumerate(points))


@given(st.integers(12, 300), st.integers(2, 6), st.data())
def test_what_is_in_flight_at_a_moment_is_spread_as_evenly(size: int, num_peers: int, data: st.DataObject) -> None:
    """Launched in the order of their indices, a window of the step gives nobody much more than its share."""
    length = data.draw(st.integers(num_peers, size))
    first = data.draw(st.integers(0, size - length))
    router, peers = measured({f"p{number}": 1.0 for number in range(num_peers)})
    chosen = Counter(router.choose(peers, point_of(index, size)).peer for index in range(first, first + length))  # type: ignore[union-attr]
    assert max(chosen.values()) <= length / num_peers + 4


def test_lanes_are_made_anew_at_every_step_so_that_each_caller_meets_everybody() -> None:
    """Two stages of two: who sends on what came to it, to whom, by step. Within a step always to the same."""
    first, second = (measured({f"{stage}{number}": 1.0 for number in range(2)}) for stage in "ab")
    met: set[tuple[str, str]] = set()
    for step in range(12):
        lanes = set()
        for index in range(8):
            sender, receiver = (router.choose(peers, point_of(index, 8), step=step) for router, peers in (first, second))
            assert sender is not None
            assert receiver is not None
            lanes.add((sender.peer, receiver.peer))
        assert len(lanes) == 2
        met |= lanes
    assert len(met) == 4


@given(st.integers(0, 299), st.integers(1, 5))
def test_another_attempt_goes_to_another_peer(index: int, attempt: int) -> None:
    router, peers = measured({"a": 1.0, "b": 1.0})
    first, second = (router.choose(peers, point_of(index, 300, number)) for number in (2 * attempt, 2 * attempt + 1))
    assert first != second


@given(st.floats(1.0, 1e3), st.floats(0.01, 10.0))
def test_a_slower_peer_gets_less(factor: float, fast_s: float) -> None:
    router, peers = measured({"fast": fast_s, "slow": factor * fast_s}, times=60)
    chosen = one_step([router], peers, 300)
    assert chosen["slow"] <= 150
    assert abs(chosen["slow"] - 300 / (1 + factor)) <= 5 or factor < 1.3


@given(st.integers(2, 8), st.integers(0, 1 << 30))
def test_like_peers_get_like_shares_however_noisy_their_responses(num_peers: int, seed: int) -> None:
    """And so all callers part the line alike, though each has measured something else."""
    rng = random.Random(seed)
    shares = []
    for _ in range(8):
        router, peers = Router(), [member(f"p{number}", throughput=rng.uniform(0.97, 1.03)) for number in range(num_peers)]
        for _ in range(40):
            for peer in peers:
                router.observe(peer.peer, rng.uniform(0.8, 1.2))
        shares.append(one_step([router], peers, 60 * num_peers))
    typical = sorted(max(abs(share[f"p{number}"] - 60) for number in range(num_peers)) for share in shares)[3]
    assert typical <= 4


@given(st.floats(2.0, 9.0), st.integers(0, 1 << 30))
def test_noise_does_not_hide_that_a_peer_is_slow(factor: float, seed: int) -> None:
    rng = random.Random(seed)
    router, peers = Router(), [member("fast", throughput=1.0), member("slow", throughput=1 / factor)]
    for _ in range(40):
        router.observe(peers[0].peer, rng.uniform(0.8, 1.2))
        router.observe(peers[1].peer, factor * rng.uniform(0.8, 1.2))
    chosen = one_step([router], peers, 300)
    assert 0.7 * factor < chosen["fast"] / chosen["slow"] < 1.3 * factor


@given(st.floats(1.0, 60.0), st.integers(1, RECENT))
def test_one_slow_response_says_nothing(outlier_s: float, when: int) -> None:
    """Connections are set up and kernels used for the first time; and home machines are used for other things."""
    router, peers = Router(), [member("a"), member("b")]
    for number in range(1, 9):
        router.observe(peers[0].peer, 0.1)
        router.observe(peers[1].peer, outlier_s if number == when else 0.1)
        chosen = one_step([router], peers, 30)
        assert chosen["b"] >= 14


@given(st.floats(0.05, 2.0))
def test_a_newcomer_is_tried_at_once_and_not_flooded(newcomer_s: float) -> None:
    router, peers = measured({"a": 0.5, "b": 0.5})
    peers.append(member("new"))
    assert one_step([router], peers, 12)["new"] == 4
    router.observe(peers[2].peer, newcomer_s)
    assert one_step([router], peers, 12)["new"] == 4, "one response is chance"
    peers[2] = member("new", throughput=1e9)
    assert one_step([router], peers, 12)["new"] == pytest.approx(12 * 3 / 5, abs=1), "a claim that nothing bears out yet"


def test_who_has_not_been_heard_from_for_longest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wiring, "REMEMBERED", 2)
    router, _ = measured({"a": 0.1, "b": 0.7})
    router.observe(PeerId("a"), 0.1)
    for _ in range(2):
        router.observe(PeerId("c"), 0.3)
    assert [router.response_s(PeerId(name)) for name in "abc"] == pytest.approx([0.1, wiring.UNKNOWN_RESPONSE_S, 0.3])


def test_a_peer_that_failed_is_left_out_until_it_announces_itself_again() -> None:
    router, failed, other = Router(), member("a", version=3), member("b")
    router.ban(failed)
    assert set(one_step([router], [failed, other], 10)) == {"b"}
    assert router.choose([failed], 0.5) is None
    assert router.choose([replace(failed, version=2)], 0.5) is None
    assert router.choose([replace(failed, version=4)], 0.5) is not None


def test_a_restarted_peer_is_no_longer_banned() -> None:
    router, failed = Router(), member("a", version=900)
    router.ban(failed)
    assert router.choose([replace(failed, incarnation=1, version=0)], 0.5) is not None


def test_who_holds_the_work_already_is_preferred_unless_banned() -> None:
    router, holder, other = Router(), member("z"), member("a")
    assert router.choose([holder, other], 0.1, prefer=[holder.peer]) == holder
    router.ban(holder)
    assert router.choose([holder, other], 0.1, prefer=[holder.peer]) == other


@pytest.mark.parametrize("answers", [0, 1, 2])
def test_a_choice_among_more_peers_takes_no_more_than_so_many_times_the_work(answers: int) -> None:
    """Whatever is known of them: nothing, one response each, or an average."""

    def work(num_peers: int) -> int:
        router, peers = measured({f"p{number}": 1.0 + number for number in range(num_peers)}, answers)
        router.choose(peers, 0.5)  # the places are remembered
        events = 0

        def count(*_event: object) -> None:
            nonlocal events
            events += 1

        sys.setprofile(count)
        try:
            router.choose(peers, 0.5)
        finally:
            sys.setprofile(None)
        return events

    assert work(300) < 3.5 * work(100)


def test_nobody_to_choose_from_gives_nobody() -> None:
    assert Router().choose([], 0.5) is None


@given(st.lists(st.floats(0.1, 9.0), min_size=2, max_size=40), st.floats(0.01, 1.0))
def test_a_response_time_is_a_moving_average_of_medians(times: list[float], smoothing: float) -> None:
    router, expected = Router(smoothing), 0.0
    for number, time in enumerate(times):
        router.observe(member("a").peer, time)
        typical = sorted(times[max(0, number - 2) : number + 1])[min(number, 2) // 2]
        weight = max(smoothing, 1 / max(1, number))
        expected = weight * typical + (1 - weight) * expected
    assert abs(router.response_s(member("a").peer) - expected) < 1e-9


@given(st.lists(st.floats(0.0, 1e9), min_size=1, max_size=30), st.floats(0.0, 1.0, exclude_max=True))
def test_whatever_is_measured_somebody_is_chosen(times: list[float], point: float) -> None:
    router, peers = Router(), [member("a"), member("b")]
    for number, time in enumerate(times):
        router.observe(peers[number % 2].peer, time)
        assert router.choose(peers, point) in peers


@dataclass
class Stage:
    """Peers that compute one microbatch after another, as simulated callers send them, each a window of its own at a time."""

    compute_s: dict[str, float]
    late_s: dict[str, float] = field(default_factory=dict)
    """Time by which peers answer late: the way to them and back."""
    claims: dict[str, float] = field(default_factory=dict)
    """Of liars: how many times as fast they claim to be. They tell that each microbatch waited for later stages only."""
    later_s: float = 0.0
    num_callers: int = 4
    window: int = 4
    took_s: float = 0.0
    """What the second half of the steps took."""

    def served(self, num_steps: int, per_step: int = 60) -> Counter[str]:
        """Who computes how many microbatches in the second half of the steps."""
        routers = [Router() for _ in range(self.num_callers)]
        peers = [member(name, throughput=self.claims.get(name, 1.0) / each_s) for name, each_s in self.compute_s.items()]
        free_s, found = dict.fromkeys(self.compute_s, 0.0), Counter[str]()
        events = [(0.0, number % self.num_callers) for number in range(self.num_callers * self.window)]
        answers: list[tuple[float, int, partial[None]]] = []
        rng, count, half_s = random.Random(1), itertools.count(), 0.0
        heapify(events)
        for number in range(num_steps * per_step):
            now_s, caller = heappop(events)
            while answers and answers[0][0] <= now_s:
                heappop(answers)[2]()
            step, index = divmod(number, per_step)
            half_s = now_s if step < num_steps / 2 else half_s
            chosen = routers[caller].choose(peers, point_of(index, per_step), step=step)
            assert chosen is not None
            name = chosen.peer
            found[name] += step >= num_steps / 2
            begins_s = max(now_s, free_s[name])
            free_s[name] = begins_s + self.compute_s[name] * rng.uniform(0.9, 1.1)
            later_s = self.later_s * rng.uniform(0.9, 1.1)
            elapsed_s = free_s[name] - now_s + self.late_s.get(name, 0.0) + later_s
            told_s = (elapsed_s if self.later_s else 0.0) if name in self.claims else later_s
            heappush(answers, (now_s + elapsed_s, next(count), partial(routers[caller].observe, name, elapsed_s, told_s)))
            heappush(events, (now_s + elapsed_s, caller))
            self.took_s = now_s - half_s
        return found


@pytest.mark.parametrize("later_s", [0.0, 0.8], ids=["the last stage", "a stage before"])
@pytest.mark.parametrize("slower", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("num_honest", [2, 3, 7])
def test_a_peer_that_claims_a_hundred_times_its_rate_gets_no_more_than_is_believed(num_honest: int, slower: float, later_s: float) -> None:
    """And the honest ones share the rest evenly."""
    peers = {**{f"p{number}": 0.1 for number in range(num_honest)}, "last": 0.1 * slower}
    window = 2 * num_honest
    honest, lied = (Stage(peers, claims=claims, later_s=later_s, window=window).served(80) for claims in ({}, {"last": 100.0}))
    assert lied["last"] <= 1.05 * wiring.BELIEVED_MORE * honest["last"]
    for found in (honest, lied):
        others = [found[name] for name in peers if name != "last"]
        assert max(others) <= 1.2 * min(others)


@pytest.mark.parametrize("late_s", [0.05, 0.2, 0.4])
def test_a_peer_that_is_far_away_gets_what_it_can_compute(late_s: float) -> None:
    """As many are in flight as fill both and the way: the stage does what its peers compute."""
    stage = Stage({"near": 0.3, "far": 0.3}, {"far": late_s}, window=3)
    found = stage.served(60)
    assert found["far"] >= 0.475 * found.total()
    assert found.total() / stage.took_s >= 0.95 * (2 / 0.3)


@pytest.mark.parametrize("slower", [2.0, 3.0, 8.0])
@pytest.mark.parametrize("num_callers", [1, 4])
def test_queues_that_are_long_for_a_while_do_not_bend_the_shares_of_honest_peers(slower: float, num_callers: int) -> None:
    """Unlike peers, as many callers as fill their queues: shares follow speed."""
    found = Stage({"a": 0.1, "b": 0.1, "c": 0.1 * slower}, num_callers=num_callers, window=24 // num_callers).served(60)
    assert found["a"] == pytest.approx(found["b"], rel=0.1)
    assert found["a"] / found["c"] == pytest.approx(slower, rel=0.2)


def test_a_peer_whose_line_binds_makes_no_mate_look_slow() -> None:
    """What its microbatches wait for its line counts as later stages' time: what it takes here says nothing of its claim."""
    router, peers = Router(), [member("wide", throughput=5.0, computes=5.0), member("narrow", throughput=2.4, computes=5.0)]
    rng = random.Random(0)
    for _ in range(20):
        for peer, took_s in zip(peers, (0.6, 0.25), strict=True):
            later_s = rng.uniform(0.0, 4.0)
            router.observe(peer.peer, took_s + later_s, later_s)
    assert one_step([router], peers, 74)["narrow"] == pytest.approx(24, abs=1)


def test_a_fast_peer_that_was_measured_bears_out_that_others_may_be_as_fast() -> None:
    router, peers = measured({"slow": 1.0, "slow too": 1.0, "fast": 0.1})
    peers.append(member("new", throughput=10.0))
    found = one_step([router], peers, 220)
    assert found["new"] == pytest.approx(found["fast"], abs=1)


def test_a_peer_that_has_not_measured_itself_counts_as_the_median_and_by_what_it_takes() -> None:
    """The first microbatches of a run: no record tells anything. A peer that takes 8 times as long gets 4.5/8 of what others do."""
    router, peers = Router(), [member("a"), member("b"), member("slow")]
    assert one_step([router], peers, 30) == {"a": 10, "b": 10, "slow": 10}
    for _ in range(9):
        for peer, took_s in zip(peers, (0.1, 0.1, 0.8), strict=True):
            router.observe(peer.peer, took_s)
    assert one_step([router], peers, 38)["slow"] == pytest.approx(8, abs=1)


def test_a_full_peer_is_asked_again_the_more_seldom_the_longer_its_microbatches_take() -> None:
    """At a home's uplink, and hundreds of microbatches that wait, each question counts."""
    for response_s, most_s in ((0.5, 0.16), (100.0, 2.0)):
        pauses_s = [FIRST_PAUSE_S]
        for _ in range(12):
            pauses_s.append(next_pause_s(pauses_s[-1], response_s))
        assert pauses_s[:4] == [0.02, 0.04, 0.08, 0.16]
        assert pauses_s[-1] == most_s
