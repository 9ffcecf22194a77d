"""A swarm whose members sign what they count: a receipt of one of them, checked by who has nothing but the file."""

from __future__ import annotations

import base64
from functools import partial
from typing import Any

import pytest

from peerd.config.receipt_file import read_receipt
from peerd.policy.step.accounts import EVERY
from peerd.policy.step.work_receipts import Proven, WorkReceipt, proven
from peerd.table.record import RunId
from tests.swarm.daemons import Daemon, Swarm, until
from tests.swarm.runs import swarm_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.slow, pytest.mark.timeout(240)]

STEPS = 3 * EVERY + 4
"""The last account has only the steps that are left at the end of the run."""


def accounts_of(daemon: Daemon, step: int) -> list[dict[str, Any]]:
    """The account of this step that a daemon keeps, once it does."""
    return [each for each in daemon.request("accounts")["accounts"] if each["step"] == step]


def receipt_of(daemon: Daemon, run: RunId) -> tuple[WorkReceipt, Proven]:
    """A daemon's receipt, as somebody reads it who has nothing else, and what it proves."""
    receipt = read_receipt(base64.b64decode(daemon.request("receipt")["receipt"]), run).receipt
    (stage,) = proven(receipt)
    return receipt, stage


def test_each_peer_proves_what_it_has_computed() -> None:
    with Swarm(swarm_manifest(num_stages=2, steps=STEPS)) as swarm:
        first = swarm.start(stage=0, compute_stand_in_ms=20)
        others = [swarm.join(stage, compute_stand_in_ms=20) for stage in (1, 0, 0)]
        daemons = [first, *others]
        for daemon in daemons:
            daemon.wait_for_step(STEPS)
        newest = set[tuple[int, str]]()
        for daemon in daemons:
            newest |= {(told["stage"], told["id"]) for told in until(partial(accounts_of, daemon, STEPS))}
        assert len(newest) == 2, "all members of a stage have the same account"
        per_step = swarm.manifest.train.microbatches_per_step
        done = {0: 0, 1: 0}
        run = RunId(first.request("accounts")["run"])
        known = [bytes.fromhex(each["id"]) for each in first.request("accounts")["accounts"]]
        for daemon in daemons:
            until(lambda daemon=daemon: receipt_of(daemon, run)[1].is_by_organiser)  # type: ignore[misc]
            receipt, stage = receipt_of(daemon, run)
            assert {proven(receipt, known)[0].is_anchored, stage.is_anchored} == {True}, "without a word of another daemon"
            assert receipt.peer == daemon.ready.peer
            assert stage.work.microbatches <= daemon.counters["accumulated_microbatches"]
            done[stage.stage] += stage.work.microbatches
        assert done == {0: STEPS * per_step, 1: STEPS * per_step}
        rows = [row for stage in first.request("contributions")["stages"] for row in stage["peers"]]
        assert {row["peer"] for row in rows if row["week_tokens"]} == {daemon.ready.peer for daemon in daemons}
