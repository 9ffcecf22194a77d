"""A fence comes before any decision of the stepper, and restarts its clocks."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from peerd.policy.step.recovery import Beginning
from peerd.policy.step.situation import StepRules
from peerd.stage.executor import Executor
from peerd.step.stepper import Stepper
from peerd.swarm.identity import Identity
from peerd.swarm.membership import Membership
from peerd.swarm.signed import sign_record
from peerd.table.record import RawRecord, RunId
from tests.paper_host import PaperHost, PaperRounds
from tests.strategies import member, view_of
from tests.swarm.fixed_row import FixedRow

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


@dataclass
class FencedRow(FixedRow):
    """Hands a fence on to its stepper, as a daemon's row does."""

    stepper: Stepper | None = None

    def fenced(self, reason: str) -> None:
        FixedRow.fenced(self, reason)
        if self.stepper is not None:
            self.stepper.fence(9)


async def test_hole_27_a_peer_that_slept_is_fenced_before_it_decides_and_listens_before_it_decides_anything() -> None:
    """What was sent while it slept comes in first, then its stepper wakes, and the announcing loop last."""
    run, ttl_s = RunId("a" * 32), 0.2
    me, other = (Identity(Ed25519PrivateKey.from_private_bytes(bytes(31) + bytes([number]))) for number in range(2))
    zombie, elsewhere = replace(member(me.peer, step=4), version=1), member(other.peer, stage=1, step=6)
    row, skipped = FencedRow(mine=zombie), list[int]()

    def news(version: int) -> RawRecord:
        return sign_record(replace(elsewhere, version=version), other, run).raw

    membership = Membership(me, run, ttl_s, row)
    membership.publish()
    membership.absorb([news(1)])
    state: Any = SimpleNamespace(record=zombie, round=None, fence=lambda _incarnation: None, skip_step=lambda: skipped.append(1))
    rounds: Any = PaperRounds()
    unused: Any = None
    executor = Executor()
    rules = StepRules(num_stages=2, num_microbatches=4, ttl_s=ttl_s, averaging_s=0.1)
    stepper = row.stepper = Stepper(state, executor, membership, rounds, unused, rules, Beginning(), PaperHost())
    membership.ran()
    stepper._decide()
    assert stepper.own_state().lost_since_s is not None
    time.sleep(4 * ttl_s)  # noqa: ASYNC251 - nothing of this process runs meanwhile, as when a machine sleeps
    membership.absorb([news(2)])
    asyncio.get_running_loop().call_soon(membership.absorb, [news(3)])
    await stepper._take_turn()
    executor.close()
    assert skipped == []
    assert stepper.own_state().lost_since_s is None
    assert stepper.decision.reason == "listening after a fence"
    assert len(row.fences) == 1
