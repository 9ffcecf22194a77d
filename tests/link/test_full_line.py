"""A connection through routers over a line that other traffic fills, and over one through which nothing comes any more.

The package is left out: its packets are made up. Questions about them are the daemon's own calls. Times are a fifth of the real ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from peerd.generated import direct_pb2
from peerd.link import punched_line, punching
from peerd.link.streams import Stream
from peerd.policy.route import holes as holes_policy
from peerd.policy.route.holes import QUESTIONS, SILENT_S, QuicCounts
from peerd.table.record import PeerId
from tests.link.direct_peers import WITHIN_S, endpoint
from tests.wire.callee import new_identity

SCALE = 0.2


class Line:
    """What is sent waits in a queue, each way, and is lost while it is full; one packet in twenty is lost at any time."""

    def __init__(self) -> None:
        self.queue_s = 0.0
        self.is_full = False
        self.num_asked = 0
        self._chance = random.Random(1)
        self.ends = [End(self, bytes([number]) * 32) for number in (0, 1)]

    async def passes(self) -> None:
        """Wait as a message of the tunnel does that takes the line one way: it is sent again until it is through."""
        while self.is_full:  # noqa: ASYNC110 - as a sender would try
            await asyncio.sleep(0.01)
        await asyncio.sleep(self.queue_s)

    def carry(self, origin: End, num_bytes: int, is_answer: bool) -> None:
        (target,) = (end for end in self.ends if end is not origin)
        if not self.is_full and self._chance.random() >= 0.05:
            asyncio.get_running_loop().call_later(self.queue_s, target.take, num_bytes, is_answer)


class End:
    """The connection as one of its ends has it."""

    address, round_trip_s = "192.0.2.1:9", 0.01

    def __init__(self, line: Line, node: bytes) -> None:
        self.node, self.carried = node, QuicCounts(3_000, 3_000)
        self._line, self._ended = line, asyncio.Event()

    @property
    def is_open(self) -> bool:
        return not self._ended.is_set()

    def send_sign(self, num_bytes: int = 30, is_answer: bool = False) -> None:
        self.carried = QuicCounts(self.carried.sent + num_bytes, self.carried.received)
        self._line.carry(self, num_bytes, is_answer)

    def take(self, num_bytes: int, is_answer: bool) -> None:
        self.carried = QuicCounts(self.carried.sent, self.carried.received + num_bytes)
        if not is_answer:
            self.send_sign(is_answer=True)

    async def send(self, num_bytes: int) -> None:
        """Send, and again after twice the time, until anything comes back or the connection ends."""
        before, pause_s = self.carried.received, SCALE * 0.2
        while self.carried.received == before and self.is_open:
            self.send_sign(num_bytes)
            await asyncio.wait({ended := asyncio.ensure_future(self.closed())}, timeout=pause_s)
            ended.cancel()
            pause_s *= 2.0

    async def streams(self) -> AsyncIterator[Stream]:
        await self._ended.wait()
        for stream in list[Stream]():
            yield stream

    async def closed(self) -> None:
        await self._ended.wait()

    def close(self) -> None:
        self._ended.set()


@contextlib.asynccontextmanager
async def connected(monkeypatch: pytest.MonkeyPatch, *, tunnel_takes_it: bool) -> AsyncIterator[Line]:
    """Two peers that are connected through their routers. `tunnel_takes_it`: whether what they ask in the tunnel takes the same line."""
    for module, name in ((holes_policy, "DOUBT_S"), (holes_policy, "ASK_EACH_S"), (punching, "SILENT_S"), (punched_line, "WATCH_S")):
        monkeypatch.setattr(module, name, SCALE * getattr(module, name))
    async with endpoint() as there:
        caller, line = new_identity(), Line()
        holes = there.holes_of(caller)
        punch = holes._punch

        async def ask(peer: PeerId, told: direct_pb2.End) -> direct_pb2.End:
            line.num_asked += told.silent
            if not tunnel_takes_it:
                return await punch(peer, told)
            await line.passes()
            reply = await punch(peer, told)
            await line.passes()
            return reply

        monkeypatch.setattr(holes, "_punch", ask)
        peers = ((holes, there.peer, line.ends[0]), (there.holes, caller.peer, line.ends[1]))
        for each, peer, end in peers:
            each._expect(end.node, peer)
        taking = [asyncio.ensure_future(each._take(cast(Any, end))) for each, _, end in peers]
        try:
            yield line
        finally:
            for end in line.ends:
                end.close()
            await asyncio.gather(*taking)
            await holes.close()


async def test_a_line_that_other_traffic_fills_keeps_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer that is full for a while loses all packets, and those that come after them wait two seconds each way."""
    async with connected(monkeypatch, tunnel_takes_it=True) as line:
        for queue_s, full_s in ((2.0, 1.5), (2.0, 0.0), (0.5, 2.5)):
            line.queue_s, line.is_full = SCALE * queue_s, bool(full_s)
            sending = asyncio.ensure_future(line.ends[0].send(900))
            await asyncio.sleep(SCALE * full_s)
            line.is_full = False
            await asyncio.wait_for(sending, WITHIN_S)
            assert all(end.is_open for end in line.ends)
        assert line.num_asked, "it was in doubt"


async def test_a_hole_that_closes_is_given_up_by_both_ends_once_the_tunnel_alone_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected(monkeypatch, tunnel_takes_it=False) as line:
        await line.ends[0].send(900)
        line.is_full, began_s = True, time.monotonic()
        await asyncio.wait_for(line.ends[0].send(500_000), WITHIN_S)
        assert time.monotonic() - began_s >= SCALE * SILENT_S
        assert line.num_asked == QUESTIONS
        await asyncio.wait_for(line.ends[1].closed(), WITHIN_S)
