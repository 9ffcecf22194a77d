"""What a peer does in a stage: its line as well as what it computes; where joiners go and who moves because of it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.swarm.choosing import Joiner, choose_stage
from peerd.policy.swarm.rates import SampleDemand, carried, rate_at, speed_of
from peerd.policy.swarm.rebalance import Rebalancing, plan
from peerd.table.record import PeerId, PeerRecord
from peerd.table.view import LiveView
from tests.strategies import member

MBIT = 125_000
COMPUTES = 4.0
"""Samples per second."""
A, B = SampleDemand(sends=1e6, receives=1e6), SampleDemand(sends=1e6, receives=1e6)
PARAMS = Rebalancing(demands=(A, B), noise=0.0)
lines = st.integers(0, 1 << 40)
demands = st.builds(SampleDemand, work=st.floats(1e-3, 1e3), sends=st.floats(0, 1e9), receives=st.floats(0, 1e9))


def peer(name: str, stage: int, mbit: float) -> PeerRecord:
    """What the daemon publishes of itself once it knows its line."""
    rate = int(mbit * MBIT)
    throughput = min(COMPUTES, carried(rate, rate, (A, B)[stage]))
    return member(name, stage=stage, up=rate, down=rate, throughput=throughput, computes=COMPUTES)


def moved(live: LiveView, name: PeerId, stage: int) -> LiveView:
    records = (peer(r.peer, stage, r.up / MBIT) if r.peer == name else r for r in live.records)
    return LiveView(me=live.me, records=tuple(records))


def rate(live: LiveView) -> float:
    """What the swarm trains in a second: what its slowest stage does."""
    return min(sum(record.throughput for record in live.of_stage(stage)) for stage in (0, 1))


def test_slow_lines_draw_a_joiner_and_then_a_mover_and_the_swarm_is_half_as_fast_again() -> None:
    slow, fast = [peer(f"a{n}", 0, 5) for n in range(4)], [peer(f"b{n}", 1, 100) for n in range(4)]
    live = LiveView(me=PeerId("joiner"), records=(*slow, *fast))
    choice = choose_stage(live, Joiner(lacking=["", ""]))
    assert choice.stage == 0
    live = replace(live, records=(*live.records, peer("joiner", 0, 100)))
    by_compute = replace(live, records=tuple(replace(r, throughput=COMPUTES, computes=0.0) for r in live.records))
    assert plan(by_compute, 2, 0, PARAMS).moves == (), "taken by what it computes, the stage of slow lines is the strongest"
    before, num_moves = rate(live), 0
    while moves := plan(live, 2, num_moves, PARAMS).moves:
        assert moves[0].from_stage == 1
        live, num_moves = moved(live, moves[0].peer, 0), num_moves + 1
    assert num_moves == 1
    assert rate(live) >= 1.5 * before


def test_a_peer_whose_line_carries_little_does_not_move_to_where_it_would_do_little() -> None:
    """It computes its stage's share where nothing is sent; elsewhere its line would bind it."""
    here, there = SampleDemand(), SampleDemand(sends=1e6)
    strong = [member(f"a{n}", stage=0, up=MBIT, throughput=COMPUTES, computes=COMPUTES) for n in range(6)]
    weak = [member(f"b{n}", stage=1, up=100 * MBIT, throughput=COMPUTES, computes=COMPUTES) for n in range(2)]
    live = LiveView(me=PeerId("a0"), records=(*strong, *weak))
    assert plan(live, 2, 0, Rebalancing(demands=(here, there))).moves == ()
    assert plan(live, 2, 0, Rebalancing(demands=(here, here))).moves != ()


@given(lines, lines, st.floats(1e-3, 1e9), demands)
def test_a_claim_of_a_line_never_raises_a_rate(up: int, down: int, speed: float, demand: SampleDemand) -> None:
    plain = member("a")
    claimed = member("a", up=up, down=down, computes=1.0)
    assert rate_at(claimed, speed, demand) <= rate_at(plain, speed, demand) == speed / demand.work


@given(lines, lines, demands)
def test_a_line_that_nobody_knows_or_uses_does_not_bind(up: int, down: int, demand: SampleDemand) -> None:
    assert carried(None, None, demand) == carried(0, 0, demand) == math.inf
    assert carried(up, down, SampleDemand()) == math.inf
    assert carried(up, down, demand) <= carried(up, None, demand)


def test_what_a_peer_computes_follows_from_its_record_whatever_binds_it() -> None:
    bound, free = member("a", throughput=1.0, computes=4.0), member("b", throughput=4.0)
    assert speed_of(bound, (SampleDemand(work=3.0),)) == speed_of(free, (SampleDemand(work=3.0),)) == 12.0


@pytest.mark.parametrize("wrong", [{"work": 0.0}, {"sends": -1.0}, {"receives": math.inf}, {"work": math.nan}])
def test_a_broken_demand_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="a stage's work"):
        SampleDemand(**wrong)
