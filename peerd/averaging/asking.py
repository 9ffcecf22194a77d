"""How a leader asks a member to join its round: until there is an answer, or the round is over."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from peerd.averaging.open_round import FIRST_PAUSE_S, OpenRound
from peerd.averaging.surroundings import Surroundings
from peerd.errors import PeerGoneError, RemoteError
from peerd.policy.round.debts import BEHIND
from peerd.policy.step.roster import Roster
from peerd.table.record import PeerId
from peerd.wire.messages import ProposalAnswer

PREPARES = 2.0
"""A member may prepare a round for so many times as long as a microbatch takes in all stages: it joins between two passes."""


class Asking:
    """One member. `opened` is the round, once this leader has opened it itself."""

    def __init__(self, around: Surroundings, peer: PeerId, roster: Roster) -> None:
        self._around = around
        self._peer = peer
        self._roster = roster
        self._until_s = around.clock() + max(around.averaging_s, PREPARES * around.host.pass_s())
        self.opened: OpenRound | None = None

    async def answer(self) -> ProposalAnswer:
        """Return whether the member joined. It is asked again while it prepares, and for a while where a call gets no answer.

        Raises the member's RemoteError where it refuses the call, and PeerGoneError where nothing is heard of it.
        """
        pause_s, began_s = FIRST_PAUSE_S, self._around.clock()
        while True:
            try:
                answer = await self._around.client.propose(self._peer, self._roster, self._around.averaging_s)
            except PeerGoneError:
                self._around.host.report_failure(self._peer)
                if self._around.clock() - began_s > BEHIND * self._around.averaging_s:
                    if self.opened is not None:
                        self.opened.silent.append(self._peer)
                    raise
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, BEHIND * self._around.averaging_s)
                continue
            if not answer.preparing:
                self._note(answer)
                return answer
            if self.opened is not None and self._around.clock() < self._until_s:
                self.opened.preparing.add(self._peer)
            elif self.opened is not None:
                self.opened.preparing.discard(self._peer)

    async def refusal(self) -> str:
        """Return why the member did not join; empty if it did."""
        try:
            answer = await self.answer()
        except RemoteError as error:
            return f"{self._peer}: {error.message}"
        if answer.joined:
            return ""
        if self.opened is not None:
            self.opened.refused = True
        self._around.host.learn(answer.record)
        return f"{self._peer}: {answer.reason}"

    def _note(self, answer: ProposalAnswer) -> None:
        if self.opened is not None:
            self.opened.preparing.discard(self._peer)
            if answer.joined:
                self.opened.joined.add(self._peer)


async def first_refusal(answers: Sequence[asyncio.Task[str]], end: Coroutine[Any, Any, str]) -> str:
    """Return why a member refuses, or why the round has ended before all have joined (`end`); empty once they have."""
    waiting, over = set(answers), asyncio.ensure_future(end)
    try:
        while waiting:
            done, _ = await asyncio.wait({*waiting, over}, return_when=asyncio.FIRST_COMPLETED)
            refusals = [task.result() for task in done if task.result()]
            if refusals or over in done:
                return next(iter(refusals), "")
            waiting -= done
    finally:
        over.cancel()
    return ""
