"""A commit lets those go on who wait for it, before the swarm is told."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import torch

from peerd.policy.step.acts import Commit
from peerd.policy.step.recovery import Beginning
from peerd.policy.step.roster import Roster, RosterEntry
from peerd.policy.step.situation import StepRules
from peerd.stage.executor import Executor
from peerd.stage.state import StageState
from peerd.step.stepper import Stepper
from peerd.table.record import PeerId, PeerRecord
from tests.paper_host import PaperHost, PaperRounds
from tests.strategies import view_of
from tests.tiny_run import tiny_manifest

ME, NUM_MICROBATCHES, LONG_S = PeerId("me"), 3, 600.0
RULES = StepRules(num_stages=1, num_microbatches=NUM_MICROBATCHES, ttl_s=LONG_S, averaging_s=LONG_S)


def averaged(executor: Executor, host: PaperHost | None = None) -> Stepper:
    """Of a peer that serves a stage alone and has averaged its first step."""
    record = PeerRecord(peer=ME)
    state = StageState(tiny_manifest(1), record, torch.device("cpu"), lambda: view_of(record))
    state.serve()
    entry = RosterEntry(ME, state.record.incarnation, state.record.ledger_no, 2**NUM_MICROBATCHES - 1)
    state.take_average(Roster(0, 0, 0, ME, (entry,)), torch.zeros_like(state.accumulator.flat))
    rounds: Any = PaperRounds()
    awake: Any = SimpleNamespace(is_quiet=False)
    unused: Any = None
    return Stepper(state, executor, awake, rounds, unused, RULES, Beginning(), host or PaperHost())


async def test_who_waits_for_a_commit_goes_on_in_the_order_of_coming_before_others_are_told() -> None:
    executor = Executor()
    host = PaperHost()
    stepper, order = averaged(executor, host), host.told

    async def wait(name: str) -> None:
        await stepper.committed(LONG_S)
        order.append(name)

    waiting = []
    for name in ("first", "second"):
        waiting.append(asyncio.ensure_future(wait(name)))
        await asyncio.sleep(0)
    await stepper._do(Commit("all have averaged"))
    await asyncio.gather(*waiting)
    assert order == ["first", "second", "committed"]
    assert stepper._state.record.step == 1
    executor.close()


async def test_a_wait_for_a_commit_that_does_not_come_ends_in_time() -> None:
    executor = Executor()
    began_s = time.monotonic()
    await averaged(executor).committed(0.05)
    assert 0.05 <= time.monotonic() - began_s < 5
    executor.close()
