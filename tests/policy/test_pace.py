"""How long a microbatch takes, as far as records tell."""

from __future__ import annotations

from dataclasses import replace

from peerd.policy.swarm.pace import MOST_TIMES_TYPICAL, still_since, way_s
from peerd.table.record import PeerId
from tests.strategies import member, view_of

SIZE = 2


def test_a_microbatch_takes_the_time_of_the_slowest_peer_of_each_stage() -> None:
    first = [member("a", throughput=0.1), member("b", throughput=0.05), member("new")]
    assert way_s(view_of(*first, member("c", stage=1, throughput=0.02)), 2, SIZE) == 40.0 + 100.0
    assert way_s(view_of(*first, member("c", stage=1)), 2, SIZE) == 40.0, "nobody of the second stage knows yet"
    assert way_s(view_of(member("a"), member("c", stage=1)), 2, SIZE) == 0.0


def test_one_peer_that_says_that_it_takes_for_ever_holds_nobody_up_for_ever() -> None:
    honest = [member(name, throughput=0.1) for name in "abc"]
    for stage in (0, 1):
        liar = member("liar", stage=stage, throughput=5e-324)
        assert way_s(view_of(*honest, liar), 2, SIZE) <= 20.0 + MOST_TIMES_TYPICAL * 20.0


def test_a_peer_stands_still_until_its_step_phase_or_ledger_changes() -> None:
    one, other = member("a", done=0b1), member("b", stage=1)
    seen = still_since({}, view_of(one, other), 10.0)
    seen = still_since(seen, view_of(replace(one, version=9, queue=3, throughput=0.1), replace(other, done=0b1)), 20.0)
    assert {peer: since_s for peer, (_, since_s) in seen.items()} == {"a": 10.0, "b": 20.0}
    assert set(still_since(seen, view_of(other), 30.0)) == {PeerId("b")}, "nothing stays of a peer that is gone"
