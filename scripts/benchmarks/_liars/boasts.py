"""Does its share, and tells false numbers of it: losses, norms, evaluations, and who has computed how much.

It tells them in its record, as one through which a microbatch of an evaluation passes, and to those that ask for contributions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from peerd.daemon.peer import Peer
from peerd.policy.step.contributions import StageTally
from peerd.stage.calls import StageService
from peerd.table.record import Evaluation, PeerRecord
from peerd.wire.messages import CallResult
from scripts.benchmarks._liars._speech import say

FALSE_LOSS, FALSE_SHARE = 0.5, 0.5


async def lie(peer: Peer, _arguments: Mapping[str, Any]) -> None:
    me, true_evaluate, true_tallies = peer.membership.me, StageService._evaluate, Peer.tallies

    def false(told: Evaluation | None) -> Evaluation | None:
        return None if told is None else replace(told, loss=FALSE_LOSS)

    def boast(record: PeerRecord) -> PeerRecord:
        norm = record.gradient_norm
        return replace(
            record,
            last_loss=None if record.last_loss is None else FALSE_LOSS,
            gradient_norm=None if norm is None else FALSE_SHARE * norm,
            norms=tuple(replace(each, norm=FALSE_SHARE * each.norm) for each in record.norms),
            evaluation=false(record.evaluation),
            evaluated=false(record.evaluated),
        )

    async def evaluate(self: StageService, *given: Any) -> CallResult:
        return replace(await true_evaluate(self, *given), loss=FALSE_LOSS)

    async def tallies(self: Peer) -> Sequence[StageTally]:
        return [_all_mine(each, me) for each in await true_tallies(self)]

    say(boast)
    setattr(StageService, "_evaluate", evaluate)  # noqa: B010 - it is a lie
    setattr(Peer, "tallies", tallies)  # noqa: B010


def _all_mine(true: StageTally, me: str) -> StageTally:
    """What others have computed, too, under this peer's name."""
    rows, total = [row for row in true.tallies if row.peer == me], sum(row.microbatches for row in true.tallies)
    tokens = sum(row.tokens for row in true.tallies)
    return replace(true, tallies=tuple(replace(row, steps=true.steps, microbatches=total, tokens=tokens) for row in rows))
