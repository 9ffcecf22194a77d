"""A receiver that takes nothing any more holds neither memory nor a slot of the sender; a slow one gets everything."""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any, cast

import grpc
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peerd.config.manifest import ModelConfig
from peerd.errors import BusyError
from peerd.generated import averaging_pb2, averaging_pb2_grpc, data_pb2, data_pb2_grpc, stage_pb2, stage_pb2_grpc, state_pb2, state_pb2_grpc
from peerd.link.links import CHUNK_BYTES
from peerd.link.traffic import Traffic
from peerd.policy.route.yielding import IN_FLIGHT_BYTES
from peerd.policy.step.following import Followers
from peerd.stage import snapshots
from peerd.stage.executor import Executor
from peerd.stage.snapshots import SnapshotServer
from peerd.stage.state import StageState
from peerd.table.record import AverageId, PeerId, PeerRecord
from peerd.wire import convert, deliveries
from peerd.wire.chunks import CutFile
from peerd.wire.data_service import DataServicer
from peerd.wire.deliveries import SLOWEST_BYTES_PER_S, Watch
from peerd.wire.door import Door
from peerd.wire.handlers import Receive
from peerd.wire.messages import Call, CallResult, StateRequest, TensorBytes
from peerd.wire.services import AveragingServicer, StageServicer, StateServicer
from peerd.wire.state_client import StateClient
from peerd.wire.tensors import encode
from tests.link.local_peers import serving
from tests.strategies import view_of
from tests.tiny_run import tiny_manifest
from tests.wire.callee import RUN
from tests.wire.lent import whole_of

PATIENCE_S, LONGER_S = 0.1, 1.5
NUM_CHUNKS = 24
"""More than gRPC takes ahead of its reader."""


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver may take nothing for a quarter of a second beyond the patience."""
    monkeypatch.setattr(deliveries, "IN_FLIGHT_BYTES", 2 * CHUNK_BYTES)
    monkeypatch.setattr(deliveries, "SLOWEST_BYTES_PER_S", 12.0 * CHUNK_BYTES)


def nothing() -> None: ...


def watch(patience_s: float = 15.0) -> Watch:
    return Watch(patience_s, nothing)


@given(rate=st.floats(1_000.0, 1e9), lump=st.integers(1, IN_FLIGHT_BYTES))
def test_a_receiver_that_makes_progress_is_never_given_up_even_if_buffers_go_on_in_large_steps(rate: float, lump: int) -> None:
    """At a megabit a second or more from the beginning; a slower one is measured by its own rate."""
    for sent in (0, IN_FLIGHT_BYTES, 20 * IN_FLIGHT_BYTES):
        under_way = watch()
        under_way.sent_bytes = sent
        under_way._began_s -= max(0, sent - IN_FLIGHT_BYTES) / rate  # the rest is in buffers
        is_known = sent > IN_FLIGHT_BYTES
        if is_known or rate >= SLOWEST_BYTES_PER_S:
            assert under_way.allowed_s(CHUNK_BYTES) >= max(lump, CHUNK_BYTES) / rate


def test_a_receiver_that_takes_nothing_is_given_up_within_minutes() -> None:
    under_way = watch()
    under_way.sent_bytes = 1 << 40
    under_way._began_s -= 3600.0
    assert under_way.allowed_s(CHUNK_BYTES) < 180.0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - memory that is freed sets no event
            await asyncio.sleep(0.02)


async def read_all(rpc: Any) -> None:
    async with asyncio.timeout(20):
        while await rpc.read() is not grpc.aio.EOF:
            continue


class Holder:
    """Gives averages of NUM_CHUNKS chunks, and tells whether one is still in memory."""

    def __init__(self) -> None:
        self.held: weakref.ReferenceType[CutFile]

    async def get_tied(self, step: int, wanted: AverageId) -> tuple[bytes, CutFile]:
        memory = CutFile([bytes(CHUNK_BYTES) for _ in range(NUM_CHUNKS)], chunk_bytes=CHUNK_BYTES)
        self.held = weakref.ref(memory)
        return b"", memory


@pytest.mark.usefixtures("short")
async def test_what_a_stalled_receiver_does_not_take_is_freed_and_its_call_refused() -> None:
    holder: Any = Holder()
    async with serving([AveragingServicer(Door(RUN, PATIENCE_S, Traffic()), holder)]) as served:
        stub = await served.stub(averaging_pb2_grpc.AveragingStub, "caller")
        rpc = stub.GetTied(averaging_pb2.TiedRequest(run=RUN))
        await rpc.read()
        assert holder.held() is not None
        await until(lambda: holder.held() is None)
        with pytest.raises(grpc.aio.AioRpcError, match="took nothing of the answer for too long"):
            await read_all(rpc)


@pytest.mark.usefixtures("short")
async def test_a_slow_receiver_gets_everything() -> None:
    """It takes longer for the whole than a receiver may take nothing."""
    async with serving([AveragingServicer(Door(RUN, LONGER_S, Traffic()), Holder())]) as served:  # type: ignore[arg-type]
        stub = await served.stub(averaging_pb2_grpc.AveragingStub, "caller")
        rpc = stub.GetTied(averaging_pb2.TiedRequest(run=RUN))
        for _ in range(1 + NUM_CHUNKS):
            assert await rpc.read() is not grpc.aio.EOF
            await asyncio.sleep(0.1)
        assert await rpc.read() is grpc.aio.EOF


class Giver:
    """Gives an endless file, to one caller at a time."""

    callers = 0

    async def give(self, digest: str, first_chunk: int) -> tuple[int, list[bytes], AsyncGenerator[bytes]]:
        return NUM_CHUNKS * CHUNK_BYTES, [bytes(32)], self._read()

    async def _read(self) -> AsyncGenerator[bytes]:
        self.callers += 1
        try:
            for _ in itertools.repeat(None):
                yield bytes(CHUNK_BYTES)
        finally:
            self.callers -= 1


@pytest.mark.usefixtures("short")
async def test_a_receiver_of_data_that_stalls_gives_its_slot_back() -> None:
    giver = Giver()
    async with serving([DataServicer(Door(RUN, PATIENCE_S, Traffic()), giver)]) as served:
        stub = await served.stub(data_pb2_grpc.DataStub, "caller")
        rpc = stub.GetData(data_pb2.DataRequest(run=RUN))
        await rpc.read()
        await until(lambda: giver.callers == 1)
        await until(lambda: giver.callers == 0)
        with pytest.raises(grpc.aio.AioRpcError, match="took nothing"):
            await read_all(rpc)


@pytest.mark.parametrize("asked", [0, 40])
@pytest.mark.usefixtures("short")
async def test_a_joiner_that_stalls_does_not_keep_the_state_from_others(monkeypatch: pytest.MonkeyPatch, asked: int) -> None:
    """It takes nothing of what it asked for, or asks for nothing. While it may still go on, another joiner hears when to ask again."""
    monkeypatch.setattr(snapshots, "MOST_COPIES", 1)
    manifest, record = tiny_manifest(), PeerRecord(peer=PeerId("me"))
    manifest = replace(manifest, model=ModelConfig(num_layers=1, d_model=512, num_heads=2, d_ff=2048))
    executor, state = Executor(), StageState(manifest, record, torch.device("cpu"), lambda: view_of(record))
    state.serve()
    server = SnapshotServer(state, executor, Followers(), LONGER_S)
    async with serving([StateServicer(Door(RUN, PATIENCE_S, Traffic()), server)]) as served:
        stub = await served.stub(state_pb2_grpc.StateStub, "stalls")
        rpc = stub.GetState()
        await rpc.write(state_pb2.StateRequest(run=RUN))
        await rpc.read()
        for number in range(asked):
            await rpc.write(state_pb2.StateRequest(chunk=number))
        for _ in range(snapshots.SHARED_STEPS + 1):
            state.skip_step()
        client = StateClient(served.links_of("joiner"), RUN)
        with pytest.raises(BusyError) as busy:
            async with client.open(PeerId("joiner"), StateRequest(stage=0), 10.0):
                raise AssertionError("it was opened")
        assert busy.value.retry_after_s > 0
        await until(lambda: not server._alive())
        async with client.open(PeerId("joiner"), StateRequest(stage=0), 10.0) as opened:
            assert opened.header.step == snapshots.SHARED_STEPS + 1
            assert len(await whole_of(opened)) == opened.header.num_bytes
    executor.close()


class Buffer(bytearray):
    """Bytes that can be referred to weakly."""


class Large:
    """Answers a microbatch with a gradient of NUM_CHUNKS chunks."""

    def __init__(self) -> None:
        self._held: list[weakref.ReferenceType[Buffer]] = []

    @property
    def held(self) -> int:
        """How many of these are in memory."""
        return sum(each() is not None for each in self._held)

    def _chunks(self) -> tuple[memoryview, ...]:
        buffer = Buffer(NUM_CHUNKS * CHUNK_BYTES)
        self._held.append(weakref.ref(buffer))
        return tuple(memoryview(buffer)[start : start + CHUNK_BYTES] for start in range(0, len(buffer), CHUNK_BYTES))

    async def backpropagate(self, _caller: PeerId, _call: Call, receive: Receive, _progress: object) -> CallResult:
        await receive()
        gradient = TensorBytes("float32", (NUM_CHUNKS * CHUNK_BYTES // 4,), self._chunks())
        return CallResult(gradient=gradient, downstream_s=0.0, records=())

    def absorb(self, *_: object) -> None: ...


def microbatch() -> stage_pb2.CallMessage:
    tokens = encode(torch.zeros(1, dtype=torch.int32))
    call = Call(call_id=bytes(16), stage=1, step=0, index=0, accumulate=frozenset({0}), inputs=tokens, labels=tokens)
    return stage_pb2.CallMessage(header=convert.call_to(call, RUN, ()))


@pytest.mark.usefixtures("short")
async def test_a_caller_that_takes_no_gradient_keeps_it_not_in_memory() -> None:
    """Nor do its next gradients wait behind that one. The call still counts as open: until it ends, it may open fewer others."""
    door, handler = Door(RUN, PATIENCE_S, Traffic()), Large()
    async with serving([StageServicer(door, cast(Any, handler))]) as served:
        gradient = (await served.stub(stage_pb2_grpc.StageStub, "caller")).Backpropagate()
        await gradient.write(microbatch())
        await gradient.write(stage_pb2.CallMessage(chunk=bytes(8)))
        await gradient.read()
        await until(lambda: handler.held == 1)
        await until(lambda: handler.held == 0)
        assert door.calls.total == 1
        with pytest.raises(grpc.aio.AioRpcError, match="took nothing of the answer for too long"):
            await read_all(gradient)
    assert door.calls.total == 0
