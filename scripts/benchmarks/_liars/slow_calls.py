"""Opens many calls at each peer and sends a byte a second on each. Or announces more bytes than there is memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from secrets import token_bytes
from typing import Any

from peerd.daemon.peer import Peer
from peerd.errors import PeerdError
from peerd.generated import averaging_pb2, averaging_pb2_grpc, stage_pb2, stage_pb2_grpc
from peerd.link.links import remote_errors
from peerd.models.stages import input_of, labels_shape
from peerd.table.record import PeerId
from peerd.wire import convert
from peerd.wire.messages import Call, TensorBytes
from scripts.benchmarks._liars import _speech


async def lie(peer: Peer, arguments: Mapping[str, Any]) -> None:
    """`calls`: how many at each peer; `num_bytes`: what each announces, 0 for the right size; `every_s`: seconds between two bytes."""
    count, num_bytes, every_s = int(arguments["calls"]), int(arguments["num_bytes"]), float(arguments["every_s"])
    kinds = [_chunk if number % 2 else _call for number in range(count)]
    pause_s = count * _speech.PAUSE_S  # what the open calls hold is to be seen, and not what the refused ones cost
    await asyncio.gather(
        *(_on_and_on(partial(kind, peer, victim, num_bytes, every_s), pause_s) for victim in _speech.others(peer) for kind in kinds)
    )


async def _on_and_on(call: Callable[[], Awaitable[None]], pause_s: float) -> None:
    while True:
        try:
            with remote_errors():
                await call()
        except PeerdError:
            await asyncio.sleep(pause_s)


async def _call(peer: Peer, victim: PeerId, num_bytes: int, every_s: float) -> None:
    """A microbatch of the callee's step, which the callee takes if the size is right."""
    record, manifest = peer.membership.find(victim), peer.place.manifest
    if record is None:
        return
    length = manifest.sequence_length_at(record.step)
    dtype, shape = input_of(manifest, record.stage, length)
    inputs, labels = TensorBytes(dtype, shape, ()), TensorBytes("int32", labels_shape(manifest, length), ())
    stages = frozenset({record.stage})
    call = Call(stage=record.stage, step=record.step, index=0, accumulate=stages, call_id=token_bytes(16), inputs=inputs, labels=labels)
    header = convert.call_to(call, peer.membership.run, ())
    header.inputs.num_bytes = num_bytes or inputs.num_bytes
    stub = stage_pb2_grpc.StageStub(await peer.network.links.channel(victim, for_tensors=True))
    async for _reply in stub.Backpropagate(_trickle(stage_pb2.CallMessage, header, every_s)):
        pass


async def _chunk(peer: Peer, victim: PeerId, _num_bytes: int, every_s: float) -> None:
    """A chunk of a round that nobody opened."""
    header = averaging_pb2.ChunkHeader(average_id=token_bytes(16))
    stub = averaging_pb2_grpc.AveragingStub(await peer.network.links.channel(victim, for_tensors=True))
    async for _reply in stub.Give(_trickle(averaging_pb2.ChunkMessage, header, every_s)):
        pass


async def _trickle(kind: Any, header: Any, every_s: float) -> AsyncIterator[Any]:
    """A header, and then a byte at a time without end."""
    yield kind(header=header)
    while True:
        await asyncio.sleep(every_s)
        yield kind(chunk=b"x")
