"""The stepper of a founder: where the run had come further before, and nobody can give that, it says so once and begins."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from peerd.policy.step.acts import Serve, Wait
from peerd.policy.step.recovery import Beginning
from peerd.policy.step.situation import StepRules
from peerd.stage.executor import Executor
from peerd.step.stepper import Stepper
from peerd.table.record import PeerId, PeerRecord
from peerd.wire.bans import Bans
from tests.paper_host import PaperHost, PaperRounds
from tests.strategies import view_of


async def test_a_run_that_is_begun_anew_is_told_of_once_with_what_to_do() -> None:
    mine = PeerRecord(peer=PeerId("me"))
    membership: Any = SimpleNamespace(live=lambda: view_of(mine), view=SimpleNamespace(sightings={}), me=mine.peer, bans=Bans())
    state: Any = SimpleNamespace(record=mine, round=None, microbatch_size=1, keeps_versions=False)
    rounds: Any = PaperRounds()
    unused: Any = None
    rules = StepRules(num_stages=1, num_microbatches=4, ttl_s=3.0, averaging_s=2.0)
    stepper = Stepper(state, unused, membership, rounds, unused, rules, Beginning(reached=7), PaperHost())
    with capture_logs() as logs:
        decisions = [stepper._decide() for _ in range(2)]
    assert [type(decision) for decision in decisions] == [Serve, Serve]
    (told,) = logs
    assert told["log_level"] == "warning"
    assert told["reason"] == "the run begins anew at step 0: it was at step 7, of which no checkpoint is in sight"
    assert "peerd join" in told["remedy"]


@pytest.mark.parametrize("needs_state", [True, False])
async def test_hole_70_a_peer_that_went_back_lacks_the_state_that_the_run_begins_from_if_there_is_one(needs_state: bool) -> None:
    """And it begins no run anew."""
    mine = PeerRecord(peer=PeerId("me"))
    membership: Any = SimpleNamespace(live=lambda: view_of(mine), view=SimpleNamespace(sightings={}), me=mine.peer, bans=Bans())
    state: Any = SimpleNamespace(record=mine, round=None, microbatch_size=1, keeps_versions=False, given_up=[])
    state.give_up_state = state.given_up.append
    rounds: Any = PaperRounds()
    unused: Any = None
    executor, rules = Executor(), StepRules(num_stages=1, num_microbatches=4, ttl_s=3.0, averaging_s=2.0)
    stepper = Stepper(state, executor, membership, rounds, unused, rules, Beginning(step=4, needs_state=needs_state), PaperHost())
    stepper._beginning = replace(stepper._beginning, needs_state=False)  # as once it was loaded
    await stepper._give_up_state()
    executor.close()
    assert state.given_up == [4]
    assert stepper.own_state().has_start is not needs_state
    assert isinstance(stepper._decide(), Wait)
