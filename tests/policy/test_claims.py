"""A claimed checkpoint that its peer does not load holds a run up for a while, and not for ever: rule J3 (resume), hole 69."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peerd.policy.step.claims import TIMES_ITS_COST, WAITS, Claims
from peerd.policy.step.recovery import plan
from peerd.policy.step.situation import StepRules
from peerd.table.record import PeerId, Phase
from peerd.table.view import LiveView
from tests.policy.model_faults import Fault, Kind, Scenario
from tests.policy.protocol_model import World
from tests.strategies import member, view_of

RULES = StepRules(num_stages=2, num_microbatches=4, ttl_s=3.0, averaging_s=1.5)
LIMIT_S = WAITS * RULES.lost_wait_s
MINE = member("me", stage=1, phase=Phase.JOINING, checkpoints=(4,))
OTHER = member("first", stage=0, step=9, checkpoints=(4,))
LIAR = member("liar", stage=1, phase=Phase.JOINING, checkpoints=(9,))


def view(*records: object) -> LiveView:
    return replace(view_of(MINE, OTHER, *records), me=MINE.peer)  # type: ignore[arg-type]


def test_a_run_resumes_at_another_step_once_the_one_that_is_claimed_was_waited_for_long_enough() -> None:
    claims, live = Claims(), view(LIAR)
    assert "step 9, which another peer" in plan(MINE, claims.believed(live, MINE, RULES, 0.0), RULES).reason
    assert claims.believed(live, MINE, RULES, LIMIT_S - 1) is live
    assert "step 4, to which stage 0" in plan(MINE, claims.believed(live, MINE, RULES, LIMIT_S), RULES).reason
    again_s = LIMIT_S * (1 + TIMES_ITS_COST)
    assert claims.believed(live, MINE, RULES, again_s - 1) is not live
    assert claims.believed(live, MINE, RULES, again_s) is live, "it may have another one by now"


def test_a_claim_that_comes_and_goes_is_waited_for_no_longer() -> None:
    claims, now_s = Claims(), 0.0
    for _ in range(3):
        for live, for_s in ((view(LIAR), LIMIT_S / 2 - 1), (view(), 5.0)):
            believed = claims.believed(live, MINE, RULES, now_s)
            now_s += for_s
            believed = claims.believed(live, MINE, RULES, now_s)
    assert believed == view()
    assert claims.believed(view(LIAR), MINE, RULES, now_s) != view(LIAR)


def test_one_that_loads_what_it_has_begins_anew() -> None:
    claims = Claims()
    for start_s in (0.0, 1000.0):
        assert claims.believed(view(LIAR), MINE, RULES, start_s) == view(LIAR)
        assert claims.believed(view(LIAR), MINE, RULES, start_s + LIMIT_S - 1) == view(LIAR)
        serving = view(replace(LIAR, phase=Phase.ACCUMULATING, step=9))
        assert claims.believed(serving, MINE, RULES, start_s + LIMIT_S) == serving


def resumed_s(lasts_s: float, limit_s: float, off: frozenset[str] = frozenset()) -> float:
    """When the stage goes on whose peers have all died, one of which claims a step that it does not have, and how long that may take."""
    faults = (Fault(8.7, Kind.STAGE_WIPED, name="p1", lasts_s=0.4), Fault(9.2, Kind.PRETEND, name="p1", lasts_s=lasts_s))
    world = World(Scenario(seed=0, peers_per_stage=4, last_step=1000, faults=faults if lasts_s else faults[:1], off=off, limit_s=limit_s))
    world.run(until=lambda: world.now > 10.0)
    assert world.counts["stages wiped"] == 1
    reached = max(peer.record.step for peer in world.peers.values())
    honest = [peer for peer in world.peers.values() if peer.record.stage == 1 and peer.name != PeerId("p1")]
    world.run(until=lambda: any(peer.alive and peer.record.step > reached for peer in honest))
    assert world.violations == []
    return world.now


def test_hole_69_a_checkpoint_that_nobody_loads_holds_a_stage_up_for_a_while_and_not_for_ever() -> None:
    assert resumed_s(0.0, 300.0) < 100.0
    assert resumed_s(1e4, 1000.0) < 100.0 + LIMIT_S


@pytest.mark.slow
def test_hole_69_if_it_were_always_believed_it_would_hold_it_up_for_ever() -> None:
    assert resumed_s(1e4, 400.0, frozenset({"doubt checkpoints"})) >= 400.0
