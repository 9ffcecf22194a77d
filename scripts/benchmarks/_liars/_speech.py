"""What liars have in common: a false record of their own, records of made-up peers, calls to everybody without an end, false chunks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any, cast

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from peerd.averaging.line import PairLine
from peerd.averaging.open_round import OpenRound
from peerd.daemon.peer import Peer
from peerd.errors import PeerdError
from peerd.generated import averaging_pb2, averaging_pb2_grpc
from peerd.link.links import ending, remote_errors
from peerd.stage.executor import Priority
from peerd.stage.state import StageState
from peerd.swarm import membership
from peerd.swarm.identity import Identity
from peerd.swarm.signed import SignedRecord, sign_record
from peerd.table.record import PeerId, PeerRecord, RawRecord, RunId
from peerd.wire import services
from peerd.wire.frames import opening_of_round
from peerd.wire.messages import Frame

RECORDS_AT_ONCE = 64
TIMEOUT_S = 5.0
PAUSE_S = 0.05
"""After a call that was refused or failed."""

LOOK_S = 0.02


def say(change: Callable[[PeerRecord], PeerRecord]) -> None:
    """Sign another record than this peer's own, from now on. The liar itself believes the true one."""

    def signed(record: PeerRecord, identity: Identity, run: RunId) -> SignedRecord:
        return sign_record(change(record), identity, run)

    setattr(membership, "sign_record", signed)  # noqa: B010 - the name is imported there


def others(peer: Peer) -> list[PeerId]:
    """All live peers but this one and those that it made up."""
    return [record.peer for record in peer.membership.live().records if record.peer != peer.membership.me]


def made_up(how_many: int) -> list[Identity]:
    return [Identity(Ed25519PrivateKey.generate()) for _ in range(how_many)]


async def push(peer: Peer, raws: Sequence[RawRecord]) -> None:
    """Send records to everybody."""
    for first in range(0, len(raws), RECORDS_AT_ONCE):
        some = raws[first : first + RECORDS_AT_ONCE]
        await asyncio.gather(*(attempt(peer.swarm_client.gossip(other, some, TIMEOUT_S)) for other in others(peer)))


async def attempt(call: Awaitable[Any]) -> bool:
    """Return whether the call was answered."""
    try:
        await call
    except PeerdError:
        return False
    return True


async def flood(victims: Sequence[PeerId], at_once: int, call: Callable[[PeerId], Awaitable[Any]]) -> None:
    """Call each victim again and again, so many times at once, for ever."""

    async def on_and_on(victim: PeerId) -> None:
        while True:
            if not await attempt(call(victim)):
                await asyncio.sleep(PAUSE_S)

    await asyncio.gather(*(on_and_on(victim) for victim in victims for _ in range(at_once)))


Messages = Callable[[Frame], AsyncIterator[averaging_pb2.ChunkMessage]]
"""What a liar sends in place of one chunk of a round."""


def give(messages_of: Messages) -> None:
    """Send something else in place of each chunk of a round, from now on: over calls of this peer (Give), and over those of the
    others (Take). Each stream ends after one chunk.
    """

    async def told(line: PairLine) -> AsyncIterator[averaging_pb2.ChunkMessage]:
        with line.sending() as frames:
            async for frame in frames:
                async for message in messages_of(frame):
                    yield message
                return

    async def sent(round_of: OpenRound, line: PairLine) -> AsyncIterator[averaging_pb2.ChunkMessage]:
        yield opening_of_round(round_of.roster.average_id)
        async for message in told(line):
            yield message

    async def give_once(self: Any, peer: PeerId, line: PairLine) -> None:
        stub = averaging_pb2_grpc.AveragingStub(await self._around.client._links.channel_for_tensors(peer))
        with remote_errors(), ending(stub.Give(sent(self, line))) as rpc:
            async for _word in rpc:
                pass

    async def taken(self: Any, caller: PeerId, _words: Any) -> AsyncIterator[averaging_pb2.ChunkMessage]:
        line = self.lines[caller]
        with line.taken():
            async with contextlib.aclosing(cast(AsyncGenerator[Any], told(line))) as messages:
                async for message in messages:
                    yield message

    for owner, name, lie in (
        (OpenRound, "_give_once", give_once),
        (OpenRound, "taken", taken),
        (services, "messages_of", lambda message: (message,)),  # `taken` gives messages, which the service sends as they are
        (services, "count_sent", lambda *_: None),
    ):
        setattr(owner, name, lie)


async def keep_making_up(peer: Peer, make_up: Callable[[Peer, StageState, int], bool]) -> None:
    """Run `make_up` on the thread that computes, with a number of attempt that no honest round has, and announce what it has made up."""
    seat, attempt = peer.seat, 1_000_000
    assert seat is not None
    while True:
        attempt += 1
        if await seat.executor.run(Priority.CONTROL, partial(make_up, peer, seat.state, attempt)):
            peer.announce(True)
        await asyncio.sleep(LOOK_S)
