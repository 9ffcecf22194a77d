"""What a callee tells its caller while it works on a microbatch. However slowly the caller reads, this holds one peer for each stage."""

from __future__ import annotations

import asyncio

from peerd.generated import stage_pb2
from peerd.table.record import PeerId


class Replies:
    """The messages before the result of one call."""

    def __init__(self) -> None:
        self._news = asyncio.Event()
        self._is_accepted = self._is_over = False
        self._hops: dict[int, PeerId] = {}
        """By later stage, the peer that the microbatch last went on to, as far as the caller has not heard it."""

    def accept(self) -> None:
        self._is_accepted = True
        self._news.set()

    def forward(self, stage: int, peer: PeerId) -> None:
        self._hops[stage] = peer
        self._news.set()

    def end(self) -> None:
        """The result is there, or an error."""
        self._is_over = True
        self._news.set()

    async def next(self, within_s: float) -> stage_pb2.ReplyMessage | None:
        """Return the next message, WORKING if there is none in time; None at the end."""
        try:
            async with asyncio.timeout(within_s):
                await self._news.wait()
        except TimeoutError:
            return stage_pb2.ReplyMessage(working=stage_pb2.Working())
        if self._is_accepted:
            self._is_accepted = False
            return stage_pb2.ReplyMessage(accepted=stage_pb2.Accepted())
        if self._hops:
            stage = next(iter(self._hops))
            return stage_pb2.ReplyMessage(forwarded=stage_pb2.Forwarded(stage=stage, peer=self._hops.pop(stage)))
        if self._is_over:
            return None
        self._news.clear()
        return await self.next(within_s)
