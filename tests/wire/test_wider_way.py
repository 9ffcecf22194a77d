"""A call that carries chunks of a round ends once a faster way to the member has opened, and is made anew over that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, cast

import pytest

from peerd.link.traffic import Traffic
from peerd.table.record import AverageId, PeerId
from peerd.wire.clients import AveragingClient
from peerd.wire.door import Door
from peerd.wire.handlers import AveragingHandler, Frames, Tell
from peerd.wire.messages import Frame, Verified
from peerd.wire.services import AveragingServicer
from tests.link.local_peers import serving
from tests.wire.callee import DOOR_PATIENCE_S, PATIENCE_S, RUN

ROUND = AverageId(bytes(range(16)))


class Endless:
    """Takes what comes, and gives nothing."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        """Set once something has come."""

    async def give(self, _caller: PeerId, _average_id: AverageId, frames: Frames, _tell: Tell) -> None:
        async for _ in frames(lambda _frame: 1):
            self.begun.set()

    async def take(self, _caller: PeerId, _average_id: AverageId, words: AsyncGenerator[Verified]) -> AsyncIterator[Frame]:
        async for held in words:
            self.begun.set()
            if not held.part:
                yield Frame(0, 0, 0, 0)


@pytest.mark.parametrize("is_given", [True, False])
async def test_a_stream_of_chunks_ends_once_a_faster_way_has_opened(is_given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, handler = asyncio.Event(), Endless()

    async def until_other_way(_peer: PeerId) -> None:
        await opened.wait()

    async def no_end(of: Frame | Verified) -> AsyncGenerator[Any]:
        yield of
        await asyncio.Event().wait()

    async def takes(_frame: Frame) -> None: ...

    async with serving([AveragingServicer(Door(RUN, DOOR_PATIENCE_S, Traffic()), cast(AveragingHandler, handler))]) as served:
        links, peer = served.links_of("caller"), PeerId("caller")
        monkeypatch.setattr(links, "until_other_way", until_other_way)
        client = AveragingClient(links, RUN)
        if is_given:
            call = client.give(peer, ROUND, no_end(Frame(1, 0, 0, 1, chunks=(b"1",))), lambda _held: None)
        else:
            call = client.take(peer, ROUND, no_end(Verified(part=1)), lambda _frame: 1, takes)
        calling = asyncio.ensure_future(call)
        await asyncio.wait_for(handler.begun.wait(), PATIENCE_S)
        assert not calling.done()
        opened.set()
        await asyncio.wait_for(calling, PATIENCE_S)
