"""Opens many calls at each peer and sends a byte a second on each. Or announces more bytes than there is memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from secrets import token_bytes
from typing import Any

from peerd.daemon.peer import Peer
from peerd.errors import PeerdError
from peerd.generated import averaging_pb2, averaging_pb2_grpc, stage_pb2, stage_pb2_grpc
from peerd.link.links import remote_errors
from peerd.table.record import PeerId
from scripts.benchmarks._liars import _speech


async def lie(peer: Peer, arguments: Mapping[str, Any]) -> None:
    """`calls`: how many at each peer; `num_bytes`: what each announces; `every_s`: seconds between two bytes."""
    calls = [
        _on_and_on(peer, victim, int(arguments["num_bytes"]), float(arguments["every_s"]), bool(number % 2))
        for victim in _speech.others(peer)
        for number in range(int(arguments["calls"]))
    ]
    await asyncio.gather(*calls)


async def _on_and_on(peer: Peer, victim: PeerId, num_bytes: int, every_s: float, is_part: bool) -> None:
    while True:
        try:
            with remote_errors():
                await (_part if is_part else _call)(peer, victim, num_bytes, every_s)
        except PeerdError:
            await asyncio.sleep(_speech.PAUSE_S)


async def _call(peer: Peer, victim: PeerId, num_bytes: int, every_s: float) -> None:
    """A microbatch of the callee's step."""
    record, train = peer.membership.find(victim), peer.place.manifest.train
    if record is None:
        return
    shape = (train.microbatch_size, train.sequence_length, *([peer.place.manifest.model.d_model] if record.stage else []))
    header = stage_pb2.CallHeader(
        call_id=token_bytes(16),
        run=peer.membership.run,
        stage=record.stage,
        step=record.step,
        microbatch=0,
        accumulate=[record.stage],
        inputs=stage_pb2.TensorHeader(shape=shape, dtype="float32" if record.stage else "int32", num_bytes=num_bytes),
        labels=stage_pb2.TensorHeader(shape=shape[:2], dtype="int32", num_bytes=8 * shape[0] * shape[1]),
    )

    async def messages() -> AsyncIterator[stage_pb2.CallMessage]:
        yield stage_pb2.CallMessage(header=header)
        while True:
            await asyncio.sleep(every_s)
            yield stage_pb2.CallMessage(chunk=b"x")

    stub = stage_pb2_grpc.StageStub(await peer.network.links.channel(victim, for_tensors=True))
    async for _reply in stub.Backpropagate(messages()):
        pass


async def _part(peer: Peer, victim: PeerId, num_bytes: int, every_s: float) -> None:
    """A part of a round that nobody opened."""
    header = averaging_pb2.PartHeader(run=peer.membership.run, average_id=token_bytes(16), slice_index=0, ledger=0, num_bytes=num_bytes)

    async def messages() -> AsyncIterator[averaging_pb2.PartMessage]:
        yield averaging_pb2.PartMessage(header=header)
        while True:
            await asyncio.sleep(every_s)
            yield averaging_pb2.PartMessage(chunk=b"x")

    stub = averaging_pb2_grpc.AveragingStub(await peer.network.links.channel(victim, for_tensors=True))
    async for _reply in stub.Reduce(messages()):
        pass
