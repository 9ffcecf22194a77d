"""The stepper of a founder: where the run had come further before, and nobody can give that, it says so once and begins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from structlog.testing import capture_logs

from peerd.policy.step.acts import Serve
from peerd.policy.step.recovery import Beginning
from peerd.policy.step.situation import StepRules
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
