"""Stochastic wiring: shares follow speed in every step, whoever sends; newcomers are tried but not flooded; who failed waits."""

from __future__ import annotations

import itertools
import math
import random
import sys
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import accumulate
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.route import wiring
from peerd.policy.route.wiring import FIRST_PAUSE_S, RECENT, Router, next_pause_s, own_time_s, point_of
from peerd.table.record import PeerId, PeerRecord
from tests.strategies import member

sizes = st.integers(1, 300)


def measured(response_s: dict[str, float], times: int = 5) -> tuple[Router, list[PeerRecord]]:
    """A router that knows how fast everybody is."""
    router, peers = Router(), [member(name) for name in response_s]
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
        router, peers = Router(), [member(f"p{number}") for number in range(num_peers)]
        for _ in range(40):
            for peer in peers:
                router.observe(peer.peer, rng.uniform(0.8, 1.2))
        shares.append(one_step([router], peers, 60 * num_peers))
    typical = sorted(max(abs(share[f"p{number}"] - 60) for number in range(num_peers)) for share in shares)[3]
    assert typical <= 4


@given(st.floats(2.0, 9.0), st.integers(0, 1 << 30))
def test_noise_does_not_hide_that_a_peer_is_slow(factor: float, seed: int) -> None:
    rng = random.Random(seed)
    router, peers = Router(), [member("fast"), member("slow")]
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
    told_by_one = one_step([router], peers, 12)["new"]
    assert 4 <= told_by_one <= 12 / (1 + 4 * min(newcomer_s, 0.5)) + 1, "one slow response is chance"


def test_who_has_not_been_heard_from_for_longest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wiring, "REMEMBERED", 2)
    router, _ = measured({"a": 0.1, "b": 0.7})
    router.observe(PeerId("a"), 0.1)
    for _ in range(2):
        router.observe(PeerId("c"), 0.3)
    assert [router.response_s(PeerId(name)) for name in "abc"] == pytest.approx([0.1, 0.2, 0.3])  # b counts as the mean of the others


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


def plainly(router: Router, pool: list[PeerRecord]) -> list[float]:
    """The response times that shares are computed from, where each peer makes its own guess: the choice as it is defined."""
    found = [router.response_s(peer.peer) for peer in pool]
    known = [measured for peer in pool if (measured := router._measured.get(peer.peer)) is not None and measured.count > 1]
    if len(known) < 2:
        return found
    about_s = fmean(each.mean_s for each in known)
    spread2 = sum((each.mean_s - about_s) ** 2 for each in known) / (len(known) - 1)
    noise2 = wiring.STANDARD_ERRORS**2 * fmean(each.error2(wiring.SMOOTHING) for each in known)
    real = max(0.0, 1 - noise2 / spread2) if spread2 else 0.0
    return [fmean(found) + real * (each_s - fmean(found)) for each_s in found]


def guessed_s(router: Router, peer: PeerId) -> float:
    """What a single peer's response time is guessed from: everybody's average, or the least of what few told."""
    known, everybody = router._measured.get(peer), router._measured.values()
    if known is not None and known.count > 1:
        return known.mean_s
    told = [each.mean_s for each in everybody if each.count > 1]
    guess_s = fmean(told) if told else min((each.mean_s for each in everybody), default=wiring.UNKNOWN_RESPONSE_S)
    return guess_s if known is None else min(known.mean_s, guess_s)


@given(st.lists(st.tuples(st.integers(0, 11), st.floats(0.0, 30.0)), max_size=60), st.floats(0, 1, exclude_max=True), st.integers(0, 9))
def test_one_guess_for_all_decides_as_a_guess_for_each(observed: list[tuple[int, float]], point: float, step: int) -> None:
    router, peers = Router(), [member(f"p{number}") for number in range(12)]
    for number, response_s in observed:
        router.observe(peers[number].peer, response_s)
    assert [router.response_s(peer.peer) for peer in peers] == [guessed_s(router, peer.peer) for peer in peers]
    pool = sorted(peers, key=lambda peer: wiring._place(peer.peer, step))
    ends = list(accumulate(1 / max(each_s, wiring.LEAST_RESPONSE_S) for each_s in plainly(router, pool)))
    assert router.choose(peers, point, step=step) == pool[min(bisect_right(ends, point * ends[-1]), len(pool) - 1)]


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


def test_a_wait_that_a_callee_tells_is_believed_as_far_as_its_queue_can_be_the_reason() -> None:
    assert own_time_s(2.0, 0.5, 1.0, 8) == 0.5
    for queued_s in (1.75, 1e9, math.inf):
        assert own_time_s(2.0, 0.2, queued_s, 8) == pytest.approx(0.2)
    for strange_s in (1e9, math.inf, math.nan, -1.0):
        assert 0.0 <= own_time_s(2.0, strange_s, 0.0, 8) <= 2.0


def test_a_slow_peer_that_tells_long_waits_gets_no_more_than_a_fast_one() -> None:
    router = Router()
    for _ in range(40):
        router.observe(PeerId("fast"), own_time_s(0.25, 0.0, 0.15, 8))
        router.observe(PeerId("liar"), own_time_s(1.1, 0.0, 1e9, 8))
    pool = [member("fast"), member("liar")]
    chosen = [router.choose(pool, point_of(index, 100)) for index in range(100)]
    assert sum(record is not None and record.peer == "liar" for record in chosen) <= 50


@dataclass
class Stage:
    """Peers that compute one microbatch after another, as simulated callers send them, each a window of its own at a time."""

    compute_s: dict[str, float]
    late_s: dict[str, float] = field(default_factory=dict)
    """Time by which peers answer late, for no reason."""
    liar: str = ""
    """Tells that each microbatch only waited its turn, and for later stages."""
    later_s: float = 0.0
    num_callers: int = 4
    window: int = 4
    slots: int = 8

    def served(self, num_steps: int, per_step: int = 60) -> Counter[str]:
        """Who computes how many microbatches in the second half of the steps."""
        routers, peers = [Router() for _ in range(self.num_callers)], [member(name) for name in self.compute_s]
        free_s, found = dict.fromkeys(self.compute_s, 0.0), Counter[str]()
        events = [(0.0, number % self.num_callers) for number in range(self.num_callers * self.window)]
        answers: list[tuple[float, int, partial[None]]] = []
        rng, count = random.Random(1), itertools.count()
        heapify(events)
        for number in range(num_steps * per_step):
            now_s, caller = heappop(events)
            while answers and answers[0][0] <= now_s:
                heappop(answers)[2]()
            step, index = divmod(number, per_step)
            chosen = routers[caller].choose(peers, point_of(index, per_step), step=step)
            assert chosen is not None
            name = chosen.peer
            found[name] += step >= num_steps / 2
            begins_s = max(now_s, free_s[name])
            free_s[name] = begins_s + self.compute_s[name] * rng.uniform(0.9, 1.1)
            elapsed_s = free_s[name] - now_s + self.late_s.get(name, 0.0) + self.later_s * rng.uniform(0.9, 1.1)
            told = (elapsed_s, 1e9) if name == self.liar else (self.later_s, begins_s - now_s)
            own_s = own_time_s(elapsed_s, *told, self.slots, 2 if self.later_s else 1)
            observe = partial(routers[caller].observe, name, own_s, elapsed_s, told[0])
            heappush(answers, (now_s + elapsed_s, next(count), observe))
            heappush(events, (now_s + elapsed_s, caller))
        return found


@pytest.mark.parametrize("slower", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("num_honest", [2, 3, 7])
def test_a_peer_that_tells_no_time_of_its_own_gets_what_an_honest_one_of_its_speed_gets(num_honest: int, slower: float) -> None:
    """In the last stage. And the honest ones share the rest evenly."""
    peers = {**{f"p{number}": 0.1 for number in range(num_honest)}, "last": 0.1 * slower}
    window = 2 * num_honest
    honest, lied = (Stage(peers, liar=liar, window=window).served(80) for liar in ("", "last"))
    assert lied["last"] <= 1.2 * honest["last"]
    for found in (honest, lied):
        others = [found[name] for name in peers if name != "last"]
        assert max(others) <= 1.2 * min(others)


@pytest.mark.parametrize("later_s", [0.0, 0.8], ids=["the last stage", "a stage before"])
@pytest.mark.parametrize("late_s", [0.3, 1.5])
def test_a_peer_that_is_late_and_tells_no_time_of_its_own_draws_no_work_to_itself(late_s: float, later_s: float) -> None:
    """It computes as fast as the others, and no more comes to it than to them."""
    peers = {"a": 0.1, "b": 0.1, "c": 0.1, "last": 0.1}
    found = Stage(peers, {"last": late_s}, liar="last", later_s=later_s, window=8).served(80)
    assert found["last"] <= 1.2 * found.total() / len(peers)


@pytest.mark.parametrize("slower", [2.0, 3.0, 8.0])
@pytest.mark.parametrize("num_callers", [1, 4])
def test_queues_that_are_long_for_a_while_do_not_bend_the_shares_of_honest_peers(slower: float, num_callers: int) -> None:
    """Unlike peers, as many callers as fill their queues: shares follow speed."""
    found = Stage({"a": 0.1, "b": 0.1, "c": 0.1 * slower}, num_callers=num_callers, window=24 // num_callers).served(60)
    assert found["a"] == pytest.approx(found["b"], rel=0.1)
    assert found["a"] / found["c"] == pytest.approx(slower, rel=0.2)


@given(st.floats(0, 1e4), st.floats(), st.floats(), st.integers(1, 64))
def test_whatever_a_callee_tells_a_share_of_the_time_is_its_own(elapsed_s: float, later_s: float, waited_s: float, left: int) -> None:
    found_s = own_time_s(elapsed_s, later_s, waited_s, 8, left)
    assert elapsed_s / left / 81 * 0.999 <= found_s <= elapsed_s


def test_a_full_peer_is_asked_again_the_more_seldom_the_longer_its_microbatches_take() -> None:
    """At a home's uplink, and hundreds of microbatches that wait, each question counts."""
    for response_s, most_s in ((0.5, 0.16), (100.0, 2.0)):
        pauses_s = [FIRST_PAUSE_S]
        for _ in range(12):
            pauses_s.append(next_pause_s(pauses_s[-1], response_s))
        assert pauses_s[:4] == [0.02, 0.04, 0.08, 0.16]
        assert pauses_s[-1] == most_s
