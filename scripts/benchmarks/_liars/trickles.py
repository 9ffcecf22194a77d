"""Joins each round, and sends a byte of its first chunk to each member every second."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from peerd.averaging.open_round import OpenRound
from peerd.daemon.peer import Peer
from peerd.generated import averaging_pb2, averaging_pb2_grpc
from peerd.link.links import ending, remote_errors
from peerd.wire import convert
from peerd.wire.frames import opening_of_round

EVERY_S = 1.0


async def lie(_peer: Peer, _arguments: Mapping[str, Any]) -> None:
    setattr(OpenRound, "_give_once", _trickle)  # noqa: B010 - the class is another room's


async def _trickle(self: Any, peer: Any, line: Any) -> None:
    links = self._around.client._links
    stub = averaging_pb2_grpc.AveragingStub(await links.channel_for_tensors(peer))
    with line.sending() as frames, remote_errors(), ending(stub.Give(_bytes_of(self, frames))) as rpc:
        async for _word in rpc:
            pass


async def _bytes_of(self: Any, frames: Any) -> AsyncIterator[averaging_pb2.ChunkMessage]:
    yield opening_of_round(self.roster.average_id)
    async for frame in frames:
        whole = b"".join(bytes(chunk) for chunk in frame.chunks)
        yield averaging_pb2.ChunkMessage(header=convert.frame_to(frame), chunk=whole[:1])
        for byte in whole[1:]:
            await asyncio.sleep(EVERY_S)
            yield averaging_pb2.ChunkMessage(chunk=bytes([byte]))
