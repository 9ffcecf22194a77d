"""Finds what mates have sent on and have no receipt for, because nobody asked them, or they have not answered: rule 20 (audit).

The peers of the next stage show it. An honest mate has sent such a thing where its call broke off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from peerd.audit.host import AuditHost
from peerd.audit.replays import AuditedStep
from peerd.errors import RemoteError
from peerd.policy.step.receipts import SentOn, SignedPass
from peerd.stage.state import StageState
from peerd.table.record import PeerId
from peerd.wire.audit_client import AuditClient

ASKED_AT_ONCE = 8
MOST_TIMES = 8
"""A peer has added each microbatch once; one that has lost its ledger, as often as that. It tells so many of each at most."""
Answer = TypeVar("Answer")


class UnclaimedWork:
    """What one peer looks for. `client` asks others, and `host` is the peer."""

    def __init__(self, state: StageState, client: AuditClient, host: AuditHost) -> None:
        self._state, self._client, self._host = state, client, host

    async def of(self, finished: AuditedStep, shown: Iterable[SignedPass]) -> tuple[list[SentOn], set[PeerId]]:
        """What mates have sent on in a step beside what these receipts show, and the mates that name other parameters than the step's."""
        known, run = dict[PeerId, list[bytes]](), self._host.run
        for below in (each.below.asked for each in shown if each.below is not None):
            known.setdefault(below.callee, []).append(below.name(run))

        async def ask(holder: PeerId) -> list[SentOn]:
            return await self._ask(holder, finished.step, known.get(holder, ()))

        holders = [record.peer for record in self._host.live().serving(self._state.record.stage + 1)]
        found = [each for told in await few_at_once(holders, ask) for each in told]
        sound = await asyncio.to_thread(lambda: [each for each in found if not each.why_unsigned(run, self._host.has_signed)])
        apart = {each.got.asked.callee for each in sound if each.gave.asked.lineage != finished.lineage}
        return [each for each in sound if each.got.asked.callee not in apart], apart

    async def _ask(self, holder: PeerId, step: int, known: Sequence[bytes]) -> list[SentOn]:
        """What one peer of the next stage shows of mates; nothing if it does not answer. No signature is checked."""
        stage, most = self._state.record.stage, MOST_TIMES * self._state.num_microbatches
        try:
            told = await self._client.get_sent_on(holder, stage, step, known, most, self._host.patience_s)
        except RemoteError:
            return []
        due, mates = (stage, step, holder), {record.peer for record in self._host.live().serving(stage)} - {self._host.me}
        its = [each for each in told if (each.got.asked.stage, each.got.asked.step, each.gave.asked.callee) == due]
        return [each for each in its if each.got.asked.callee in mates]  # a holder can sign anything with keys of its own making


async def few_at_once(peers: Sequence[PeerId], ask: Callable[[PeerId], Awaitable[Answer]]) -> list[Answer]:
    """What each peer answers, ASKED_AT_ONCE at one time."""
    found = list[Answer]()
    for first in range(0, len(peers), ASKED_AT_ONCE):
        found += await asyncio.gather(*map(ask, peers[first : first + ASKED_AT_ONCE]))
    return found
