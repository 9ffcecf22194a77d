"""A fence comes before any decision of the stepper, and restarts its clocks."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from functools import partial
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
from peerd.table.record import Phase, RunId
from peerd.wire.bans import Bans
from tests.paper_host import PaperHost, PaperRounds
from tests.strategies import member, view_of
from tests.swarm.fixed_row import FixedRow

RUN = RunId("a" * 32)
RULES = StepRules(num_stages=2, num_microbatches=4, ttl_s=3.0, averaging_s=2.0)


async def test_hole_14_a_fence_starts_the_wait_for_a_lost_step_anew() -> None:
    """Rule T3 (fence): a peer that slept has not looked for its mates all the while."""
    zombie, elsewhere = member("p3", step=4), member("p0", stage=1, step=6)
    membership: Any = SimpleNamespace(live=lambda: view_of(zombie, elsewhere), wake=lambda: None, bans=Bans())
    state: Any = SimpleNamespace(record=zombie, round=None, microbatch_size=1, keeps_versions=False, fence=lambda _inc: None)
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


class Sleeper:
    """A peer with a real membership that knows a peer of another stage, which is two steps ahead, and no mate."""

    def __init__(self, phase: Phase) -> None:
        me, self._other = (Identity(Ed25519PrivateKey.from_private_bytes(bytes(31) + bytes([number]))) for number in range(2))
        self.ttl_s, self.done = 0.2, list[str]()
        record = replace(member(me.peer, step=4, phase=phase), version=1)
        self.row = FencedRow(mine=record)
        self.membership = Membership(me, RUN, self.ttl_s, self.row)
        self.membership.publish()
        self.hear(1)
        state: Any = SimpleNamespace(record=record, round=None, microbatch_size=1, keeps_versions=False, fence=lambda _inc: None)
        state.skip_step, state.serve = partial(self.done.append, "skip"), partial(self.done.append, "serve")
        rounds: Any = PaperRounds()
        unused: Any = None
        self.executor = Executor()
        rules = StepRules(num_stages=2, num_microbatches=4, ttl_s=self.ttl_s, averaging_s=0.1)
        self.stepper = Stepper(state, self.executor, self.membership, rounds, unused, rules, Beginning(), PaperHost())
        self.row.stepper = self.stepper
        self.membership.ran()

    def hear(self, version: int) -> None:
        """A record of the other peer comes."""
        record = replace(member(self._other.peer, stage=1, step=6), version=version)
        self.membership.absorb([sign_record(record, self._other, RUN).raw])

    async def sleep_and_wake(self) -> None:
        """What was sent while it slept comes in first, then its stepper wakes, and the announcing loop last."""
        time.sleep(4 * self.ttl_s)  # noqa: ASYNC251 - nothing of this process runs meanwhile, as when a machine sleeps
        self.hear(2)
        asyncio.get_running_loop().call_soon(self.hear, 3)
        await self.stepper._take_turn()
        self.executor.close()


async def test_hole_27_a_peer_that_slept_is_fenced_before_it_decides() -> None:
    sleeper = Sleeper(Phase.ACCUMULATING)
    sleeper.stepper._decide()
    lost_since_s = sleeper.stepper.own_state().lost_since_s
    assert lost_since_s is not None
    await sleeper.sleep_and_wake()
    assert sleeper.done == []
    assert (sleeper.stepper.own_state().lost_since_s or lost_since_s + 1.0) > lost_since_s + 3 * sleeper.ttl_s
    assert len(sleeper.row.fences) == 1


async def test_hole_27_a_joiner_that_slept_does_not_serve_because_it_hears_of_nobody_yet() -> None:
    sleeper = Sleeper(Phase.JOINING)
    await sleeper.sleep_and_wake()
    assert sleeper.done == []
    assert sleeper.stepper.decision.reason == "listening after a fence"
