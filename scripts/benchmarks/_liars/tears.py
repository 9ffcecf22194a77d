"""Joins each round, and breaks off each chunk before its last byte: nothing of it ever arrives whole."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from peerd.averaging.open_round import OpenRound
from peerd.daemon.peer import Peer
from peerd.generated import averaging_pb2, averaging_pb2_grpc
from peerd.link.links import CHUNK_BYTES, ending, remote_errors
from peerd.wire import convert
from peerd.wire.frames import opening_of_round


async def lie(_peer: Peer, _arguments: Mapping[str, Any]) -> None:
    setattr(OpenRound, "_give_once", _tear)  # noqa: B010 - the class is another room's


async def _tear(self: Any, peer: Any, line: Any) -> None:
    links = self._around.client._links
    stub = averaging_pb2_grpc.AveragingStub(await links.channel_for_tensors(peer))
    with line.sending() as frames, remote_errors(), ending(stub.Give(_torn(self, frames))) as rpc:
        async for _word in rpc:
            pass


async def _torn(self: Any, frames: Any) -> AsyncIterator[averaging_pb2.ChunkMessage]:
    yield opening_of_round(self.roster.average_id)
    async for frame in frames:
        most = b"".join(bytes(chunk) for chunk in frame.chunks)[:-1]
        yield averaging_pb2.ChunkMessage(header=convert.frame_to(frame), chunk=most[:CHUNK_BYTES])
        for start in range(CHUNK_BYTES, len(most), CHUNK_BYTES):
            yield averaging_pb2.ChunkMessage(chunk=most[start : start + CHUNK_BYTES])
        return
