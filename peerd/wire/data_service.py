"""The called side of the data service: a peer that has the run's data sends it to peers that want to train, too."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, Protocol

from peerd.background import start
from peerd.generated import data_pb2, data_pb2_grpc
from peerd.link.traffic import PeerRole
from peerd.wire.deliveries import Watch
from peerd.wire.services import Servicer


class DataHandler(Protocol):
    async def give(self, digest: str, first_chunk: int) -> tuple[int, Sequence[bytes], AsyncGenerator[bytes]]:
        """Return the size, the chunk hashes and the bytes from `first_chunk` on of the file whose BLAKE3 hash is `digest`."""
        ...


class DataServicer(Servicer[DataHandler], data_pb2_grpc.DataServicer):
    register = staticmethod(data_pb2_grpc.add_DataServicer_to_server)

    async def GetData(self, request: data_pb2.DataRequest, context: Any) -> AsyncIterator[data_pb2.DataMessage]:
        async with self._door.answering(context, request.run) as caller:
            num_bytes, hashes, chunks = await self._handler.give(request.blake3.hex(), request.first_chunk)
        yield data_pb2.DataMessage(header=data_pb2.DataHeader(num_bytes=num_bytes, chunk_blake3=hashes))
        with Watch(self._door.patience_s, lambda: start(chunks.aclose())) as watch:
            async for chunk in chunks:
                watch.sends(len(chunk))
                await self._door.traffic.uplink.turn(len(chunk))
                yield data_pb2.DataMessage(chunk=chunk)
                self._door.traffic.gave("data", PeerRole.RECIPIENT, len(chunk))
        await self._door.check_taken(context, caller, watch)
