"""Rebalancing by queues: what a mean tells, and that nobody moves for what passes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.swarm.queues import READINGS, MeanQueue, QueueReadings
from peerd.policy.swarm.rebalance import Plan, Rebalancing, Rule, plan
from peerd.table.record import PeerId, Phase
from peerd.table.view import LiveView
from tests.strategies import member

QUEUES = Rebalancing(rule=Rule.QUEUES)


def swarm(*queues: tuple[float, ...], joining: int | None = None) -> LiveView:
    """By stage the mean queue of each peer; perhaps one that is on its way to a stage."""
    found = [member(f"s{stage}p{n}", stage=stage, backlog=queue) for stage, each in enumerate(queues) for n, queue in enumerate(each)]
    found += [member("joiner", stage=joining, phase=Phase.JOINING)] if joining is not None else []
    return LiveView(me=found[0].peer, records=tuple(found))


def test_a_mean_follows_what_lasts_and_not_what_passes() -> None:
    queue = MeanQueue(60.0)
    for second in range(600):
        queue.read(8.0 if second % 10 == 0 else 0.0, float(second))
    assert queue.mean == pytest.approx(0.8, rel=0.2)
    for second in range(600, 780):
        queue.read(8.0, float(second))
    assert queue.mean == pytest.approx(8.0, rel=0.1)


@given(st.lists(st.tuples(st.integers(0, 1 << 20), st.floats(0, 1e6)), max_size=50), st.floats(0, 1e5))
def test_a_mean_lies_within_what_was_read(told: list[tuple[int, float]], over_s: float) -> None:
    queue, most = MeanQueue(over_s), 0
    for waiting, at_s in told:
        queue.read(waiting, at_s)
        most = max(most, waiting)
    assert 0 <= queue.mean <= most


def test_a_difference_has_to_last_and_the_reason_names_the_queues() -> None:
    live, readings = swarm((9.0, 8.0), (0.5, 0.2)), QueueReadings()
    for _ in range(READINGS - 1):
        found = readings.read(plan(live, 2, 0, QUEUES), live)
        assert found.moves == ()
        assert "more readings" in found.reason
    found = readings.read(plan(live, 2, 0, QUEUES), live)
    assert [(move.peer, move.to_stage) for move in found.moves] == [("s1p0", 0)]
    assert "stage 1 has 0.7 queued and stage 0 has 17" in found.reason
    assert readings.read(plan(live, 2, 0, QUEUES), live).moves == (), "the next move takes as many readings again"


def test_readings_that_differ_begin_anew() -> None:
    long, even, readings = swarm((9.0, 8.0), (0.5, 0.2)), swarm((2.0, 2.0), (2.0, 1.5)), QueueReadings()
    for live in (long, long, even, long, long):
        assert readings.read(plan(live, 2, 0, QUEUES), live).moves == ()
    assert plan(even, 2, 0, QUEUES).reason == "all stages have about 4 queued"


def test_who_is_on_its_way_has_to_serve_before_the_next_one_follows() -> None:
    live, readings = swarm((9.0, 8.0), (0.5, 0.2), joining=0), QueueReadings()
    for _ in range(3 * READINGS):
        found = readings.read(plan(live, 2, 0, QUEUES), live)
        assert found.moves == ()
    assert "on its way" in found.reason
    leaving = LiveView(me=live.me, records=(*swarm((9.0, 8.0), (0.5, 0.2)).records, member("s1p9", stage=1, leaving=True)))
    assert "leaves stage 1" in readings.read(plan(leaving, 2, 0, QUEUES), leaving).reason


def test_until_its_move_shows_the_same_peer_is_named_again() -> None:
    """A move takes the rest of a step, which may be longer than a period, and queues change meanwhile."""
    named = {plan(swarm((9.0, 8.0), (0.3 * n, 0.6 - 0.3 * n)), 2, 0, QUEUES).moves[0].peer for n in range(3)}
    assert len(named) == 1


def test_the_longest_queue_falls_by_half_and_then_nobody_moves() -> None:
    """Queues as of a stage at load rho, rho / (1 - rho) a peer, while the slowest stage is nearly full."""
    counts, readings, moves, longest = [4, 12], QueueReadings(), 0, list[float]()
    for _ in range(40 * READINGS):
        loads = [0.98 * min(counts) / count for count in counts]
        lengths = [load / (1 - load) for load in loads]
        longest.append(max(length * count for length, count in zip(lengths, counts, strict=True)))
        live = swarm(*((length,) * count for length, count in zip(lengths, counts, strict=True)))
        for move in readings.read(plan(live, 2, moves, QUEUES), live).moves:
            counts[move.from_stage] -= 1
            counts[move.to_stage] += 1
            moves += 1
    assert Counter(counts) == Counter([8, 8])
    assert moves == 4


def test_in_a_plan_of_no_moves_the_reason_goes_through() -> None:
    live = swarm((1.0,), (1.0,))
    assert QueueReadings().read(Plan((), "because"), live) == Plan((), "because")
    assert live.me == PeerId("s0p0")
