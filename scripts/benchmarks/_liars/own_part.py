"""Computes rightly, and puts something else into the average: its part times a factor. 0: it rides free. With `loss`: the sum of its losses
times that.

With `conceals` it also signs in its receipts that it has added each microbatch to a ledger that does not exist, so that nobody can tell
what its part must be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from peerd.daemon.peer import Peer
from peerd.policy.step.receipts import LEDGER_BYTES, SignedPass
from peerd.policy.step.roster import Roster
from peerd.stage.state import StageState
from peerd.stage.witnessing import PassWitness, ReceivedPass
from peerd.wire.messages import CallResult

FACTOR = -1.0


async def lie(_peer: Peer, arguments: Mapping[str, Any]) -> None:
    factor, loss = float(arguments.get("factor", FACTOR)), float(arguments.get("loss", 1.0))
    true_round, true_answers = StageState.open_round, PassWitness.answers

    def open_round(self: StageState, roster: Roster) -> tuple[str, Tensor | None]:
        reason, share = true_round(self, roster)
        if share is not None:
            share[: len(share) - self.accumulator.num_exact] *= factor
            share[-1] *= loss
        return reason, share

    async def answers(self: PassWitness, given: ReceivedPass, result: CallResult, below: SignedPass | None) -> CallResult:
        return await true_answers(self, given, replace(result, ledger=b"x" * LEDGER_BYTES), below)

    setattr(StageState, "open_round", open_round)  # noqa: B010 - it is a lie
    if arguments.get("conceals"):
        setattr(PassWitness, "answers", answers)  # noqa: B010
