"""What a fence leaves of a stepper's clocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from peerd.policy.step.recovery import Beginning
from peerd.policy.step.situation import StepRules
from peerd.stage.executor import Executor
from peerd.step.stepper import Stepper
from tests.paper_host import PaperHost, PaperRounds
from tests.strategies import member, view_of

RULES = StepRules(num_stages=2, num_microbatches=4, ttl_s=3.0, averaging_s=2.0)


async def test_hole_14_a_fence_starts_the_wait_for_a_lost_step_anew() -> None:
    """Rule T3 (fence): a peer that slept has not looked for its mates all the while."""
    zombie, elsewhere = member("p3", step=4), member("p0", stage=1, step=6)
    membership: Any = SimpleNamespace(live=lambda: view_of(zombie, elsewhere), wake=lambda: None)
    state: Any = SimpleNamespace(record=zombie, round=None, fence=lambda _incarnation: None)
    rounds: Any = PaperRounds()
    unused: Any = None
    executor = Executor()
    stepper = Stepper(state, executor, membership, rounds, unused, RULES, Beginning(), PaperHost())
    stepper._decide()
    assert stepper.own_state().lost_since_s is not None
    stepper.fence(9)
    await stepper._apply_fence()
    executor.close()
    assert stepper.own_state().lost_since_s is None
