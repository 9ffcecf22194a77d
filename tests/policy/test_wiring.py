"""Stochastic wiring: shares follow speed, newcomers are tried but not flooded, who failed waits for its next announcement."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.wiring import Router
from peerd.table.record import PeerRecord
from tests.strategies import member


def shares(router: Router, candidates: list[PeerRecord], response_s: dict[str, float], rounds: int) -> Counter[str]:
    chosen: Counter[str] = Counter()
    for _ in range(rounds):
        record = router.choose(candidates)
        assert record is not None
        router.observe(record.peer, response_s[record.peer])
        chosen[record.peer] += 1
    return chosen


@given(st.floats(1.0, 6.0), st.floats(0.01, 10.0))
def test_shares_are_inversely_proportional_to_response_times(factor: float, fast_s: float) -> None:
    chosen = shares(Router(), [member("fast"), member("slow")], {"fast": fast_s, "slow": factor * fast_s}, 400)
    assert factor * 0.85 < chosen["fast"] / chosen["slow"] < factor * 1.15


def test_the_first_request_is_charged_what_it_took_and_not_what_was_guessed() -> None:
    """A guess of a second against responses of 10 ms would starve whoever was tried first for a hundred requests."""
    chosen = shares(Router(), [member("a"), member("b")], {"a": 0.01, "b": 0.01}, 10)
    assert chosen["a"] == chosen["b"] == 5


def test_a_peer_three_times_slower_gets_about_a_third() -> None:
    chosen = shares(Router(), [member("fast"), member("slow")], {"fast": 0.1, "slow": 0.3}, 60)
    assert 2.2 < chosen["fast"] / chosen["slow"] < 3.8


@given(st.lists(st.floats(0.1, 5.0), min_size=2, max_size=6))
def test_everybody_gets_something(responses: list[float]) -> None:
    times = {f"p{number}": response for number, response in enumerate(responses)}
    chosen = shares(Router(), [member(name) for name in times], times, 60 * len(times))
    assert set(chosen) == set(times)


@given(st.integers(1, 300), st.floats(0.05, 2.0))
def test_a_newcomer_is_tried_at_once_and_not_flooded(before: int, newcomer_s: float) -> None:
    router, times = Router(), {"a": 0.5, "b": 0.5, "new": newcomer_s}
    shares(router, [member("a"), member("b")], times, before)
    chosen = shares(router, [member("a"), member("b"), member("new")], times, 12)
    assert chosen["new"] >= 1
    fair = 12 * (1 / newcomer_s) / (1 / newcomer_s + 4)
    assert chosen["new"] <= fair + 3


def test_a_peer_that_failed_is_left_out_until_it_announces_itself_again() -> None:
    router, failed, other = Router(), member("a", version=3), member("b")
    router.ban(failed)
    assert {router.choose([failed, other]).peer for _ in range(10)} == {"b"}  # type: ignore[union-attr]
    assert router.choose([failed]) is None
    assert router.choose([replace(failed, version=2)]) is None
    assert router.choose([replace(failed, version=4)]) is not None


def test_a_restarted_peer_is_no_longer_banned() -> None:
    router, failed = Router(), member("a", version=900)
    router.ban(failed)
    assert router.choose([replace(failed, incarnation=1, version=0)]) is not None


def test_who_holds_the_work_already_is_preferred_unless_banned() -> None:
    router, holder, other = Router(), member("z"), member("a")
    assert router.choose([holder, other], prefer=[holder.peer]) == holder
    router.ban(holder)
    assert router.choose([holder, other], prefer=[holder.peer]) == other


def test_a_slow_peer_that_is_alone_on_time_at_each_step_does_not_start_anew() -> None:
    router, fast, slow = Router(), member("fast"), member("slow")
    for record, response_s in 2 * ((fast, 0.1), (slow, 0.3)):
        router.observe(record.peer, response_s)
    chosen: Counter[str] = Counter()
    for _ in range(20):
        here = [router.choose([slow], elsewhere=[fast]) for _ in range(2)]
        here += [router.choose([fast, slow], elsewhere=[fast, slow]) for _ in range(6)]
        chosen.update(record.peer for record in here if record is not None)
    assert 2.7 < chosen["fast"] / chosen["slow"] < 3.3


def test_who_was_away_is_a_newcomer_again() -> None:
    router, here, away = Router(), member("here"), member("away")
    for record in (here, away):
        router.observe(record.peer, 0.1)
    router.choose([here, away])
    for _ in range(100):
        router.choose([here])
    chosen = Counter(record.peer for record in (router.choose([here, away]) for _ in range(10)) if record is not None)
    assert chosen[away.peer] <= 6


def test_nobody_to_choose_from_gives_nobody() -> None:
    assert Router().choose([]) is None


@given(st.floats(0.1, 100.0), st.lists(st.floats(0.1, 9.0), min_size=1, max_size=20))
def test_a_response_time_is_a_moving_average_of_those_observed_but_the_first(first: float, times: list[float]) -> None:
    router = Router(smoothing=0.1)
    router.observe(member("a").peer, first)
    assert router.response_s(member("a").peer) == first
    expected = times[0]
    for number, time in enumerate(times):
        router.observe(member("a").peer, time)
        expected = time if number == 0 else 0.1 * time + 0.9 * expected
    assert abs(router.response_s(member("a").peer) - expected) < 1e-9


@given(st.floats(1.0, 60.0), st.integers(0, 100))
def test_a_newcomer_whose_first_response_took_seconds_soon_gets_its_share(first_s: float, before: int) -> None:
    """Connections are set up and kernels used for the first time; afterwards it is as fast as the others."""
    router, newcomer = Router(), member("new")
    old = [member("a"), member("b")]
    shares(router, old, {"a": 0.1, "b": 0.1}, 4 + before)
    while router.choose([*old, newcomer]) != newcomer:
        pass
    router.observe(newcomer.peer, first_s)
    chosen = shares(router, [*old, newcomer], {"a": 0.1, "b": 0.1, "new": 0.1}, 30)
    assert 9 <= chosen["new"] <= 11
