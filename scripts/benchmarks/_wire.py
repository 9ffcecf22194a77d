"""The two ends of a call: hivemind's RPC, and peerd's through the tunnel and over a direct connection.

`python -m scripts.benchmarks._wire JSON` is one end. Rank 0 calls, rank 1 answers. A unary call carries the bytes in one message, of at
most 4 MiB on all sides. A stream carries them in chunks, like tensors: for peerd it is the call that hands over a microbatch, for
hivemind the call that forwards through an expert. The callee answers when it has all bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.benchmarks._sides import PATIENCE_S, serve

COUNT = "/bench.Wire/Count"
HIVEMIND_PART_BYTES = 1 << 19
"""Size of the parts into which hivemind cuts tensors for its streams."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    side: str
    rank: int
    folder: str


async def timed(call: Callable[[], Coroutine[Any, Any, int]], num_bytes: int, repeats: int) -> list[float]:
    """Seconds of each call, all of whose bytes have arrived."""
    took_s = []
    for _ in range(repeats):
        began_s = time.monotonic()
        assert await call() == num_bytes
        took_s.append(time.monotonic() - began_s)
    return took_s


class Hivemind:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._p2p: Any = None

    async def open(self) -> dict[str, Any]:
        from hivemind.p2p import P2P
        from hivemind.proto.runtime_pb2 import ExpertRequest, ExpertResponse

        async def count(request: Any, _context: Any) -> Any:
            return ExpertResponse(metadata=str(len(request.metadata)).encode())

        async def count_stream(requests: AsyncIterator[Any], _context: Any) -> AsyncIterator[Any]:
            total = 0
            async for request in requests:
                total += len(request.metadata)
            yield ExpertResponse(metadata=str(total).encode())

        self._request, self._response = ExpertRequest, ExpertResponse
        self._p2p = await P2P.create()
        await self._p2p.add_protobuf_handler("count", count, ExpertRequest)
        await self._p2p.add_protobuf_handler("count-stream", count_stream, ExpertRequest, stream_input=True, stream_output=True)
        return {"peer": self._p2p.peer_id.to_base58(), "addresses": [str(each) for each in await self._p2p.get_visible_maddrs()]}

    async def meet(self, others: Sequence[dict[str, Any]]) -> None:
        from hivemind.p2p import PeerID
        from hivemind.utils.multiaddr import Multiaddr

        other = others[1 - self._job.rank]
        self._other = PeerID.from_base58(other["peer"])
        if self._job.rank == 0:
            await self._p2p._client.connect(self._other, [Multiaddr(address.split("/p2p/")[0]) for address in other["addresses"]])

    async def measure(self, stream: bool, num_bytes: int, repeats: int, **_variant: Any) -> list[float]:
        data = os.urandom(num_bytes)
        parts = [data[start : start + HIVEMIND_PART_BYTES] for start in range(0, num_bytes, HIVEMIND_PART_BYTES)]

        async def requests() -> AsyncIterator[Any]:
            for part in parts:
                yield self._request(metadata=part)

        async def unary() -> int:
            answer = await self._p2p.call_protobuf_handler(self._other, "count", self._request(metadata=data), self._response)
            return int(answer.metadata)

        async def streamed() -> int:
            answers = await self._p2p.iterate_protobuf_handler(self._other, "count-stream", requests(), self._response)
            return int((await anext(answers)).metadata)

        return await timed(streamed if stream else unary, num_bytes, repeats)

    async def close(self) -> None:
        if self._p2p is not None:
            await self._p2p.shutdown()


class Receiver:
    """A callee's stage that receives a microbatch and does not compute it."""

    async def backpropagate(self, _caller: Any, call: Any, receive: Any, _progress: Any) -> Any:
        from peerd.wire.messages import CallResult

        num_bytes = sum(map(len, await receive()))
        return CallResult(gradient=None, downstream_s=0.0, records=(), loss=float(num_bytes))

    def absorb(self, _caller: Any, records: Any) -> None:
        return

    def cancel(self, _caller: Any, call_id: bytes) -> None:
        return


class Peerd:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._stack = contextlib.AsyncExitStack()

    async def open(self) -> dict[str, Any]:
        import grpc

        from peerd.wire.services import StageServicer
        from scripts.benchmarks._daemon import on_network

        async def count(data: bytes, _context: Any) -> bytes:
            return str(len(data)).encode()

        self._daemon = await self._stack.enter_async_context(on_network(self._job.folder, self._job.rank))
        await self._daemon.serve([StageServicer(self._daemon.door, Receiver())])
        direct = self._daemon.network.direct
        assert direct is not None
        unary = grpc.method_handlers_generic_handler("bench.Wire", {"Count": grpc.unary_unary_rpc_method_handler(count)})
        for server in (self._daemon.network.server, direct.endpoint._server):
            assert server is not None
            server.add_generic_rpc_handlers((unary,))
        return self._daemon.hello

    async def meet(self, others: Sequence[dict[str, Any]]) -> None:
        await self._daemon.meet(others)
        self._other = others[1 - self._job.rank]["peer"]

    async def measure(self, stream: bool, num_bytes: int, repeats: int, direct: bool) -> list[float]:
        from peerd.link.links import CHUNK_BYTES
        from peerd.wire.clients import StageClient
        from peerd.wire.messages import Call, TensorBytes
        from scripts.benchmarks._daemon import RUN

        self._daemon.use(direct)
        data = os.urandom(num_bytes)
        inputs = TensorBytes(
            "float32", (1, num_bytes // 4, 1), tuple(data[start : start + CHUNK_BYTES] for start in range(0, num_bytes, CHUNK_BYTES))
        )
        client, channel = StageClient(self._daemon.links, RUN), await self._daemon.links.channel_for_tensors(self._other)
        method = channel.unary_unary(COUNT, request_serializer=bytes, response_deserializer=bytes)

        async def unary() -> int:
            return int(await method(data, timeout=PATIENCE_S))

        async def streamed() -> int:
            labels = TensorBytes("int32", (1, 1), (b"1234",))
            call = Call(
                call_id=os.urandom(16), stage=1, step=0, index=0, accumulate=frozenset(), inputs=inputs, labels=labels, evaluation=True
            )
            result = await client.backpropagate(self._other, call, (), PATIENCE_S, lambda _stage, _peer: None)
            return int(result.loss or 0) - 4

        return await timed(streamed if stream else unary, num_bytes, repeats)

    async def close(self) -> None:
        await self._stack.aclose()


SIDES = {"hivemind": Hivemind, "peerd": Peerd}


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    serve(SIDES[job.side](job))


if __name__ == "__main__":
    main()
