"""A bug in a service is reported here, while its caller hears that the call has failed; what is refused on purpose is not reported."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from peerd.averaging.kept import KeptAverages
from peerd.averaging.rounds import Rounds
from peerd.background import INTERNAL_ERRORS
from peerd.errors import WrongStateError
from peerd.generated import averaging_pb2, averaging_pb2_grpc, state_pb2, state_pb2_grpc
from tests.wire.callee import RUN, Callee


async def _call(stub: Any, streaming: bool) -> None:
    async with asyncio.timeout(10):
        if streaming:
            await anext(aiter(stub.GetTied(averaging_pb2.TiedRequest(run=RUN, step=0, id=bytes(16)))))
        else:
            await stub.Propose(averaging_pb2.Proposal(run=RUN))


@pytest.mark.parametrize(("kind", "counted"), [(TypeError, 1), (WrongStateError, 0)])
@pytest.mark.parametrize("streaming", [False, True])
async def test_an_unexpected_error_is_counted_and_the_call_fails(
    callee: Callee, monkeypatch: pytest.MonkeyPatch, kind: type[Exception], counted: int, streaming: bool
) -> None:
    async def fail(*_arguments: object) -> None:
        raise kind("it cannot")

    monkeypatch.setattr(KeptAverages, "get_tied", fail)
    monkeypatch.setattr(Rounds, "propose", fail)
    before = INTERNAL_ERRORS.count
    stub = await callee.served.stub(averaging_pb2_grpc.AveragingStub, callee.caller.peer)
    with pytest.raises(grpc.aio.AioRpcError, match="it cannot"):
        await _call(stub, streaming)
    assert INTERNAL_ERRORS.count == before + counted


async def test_a_call_that_its_caller_cancels_is_no_error(callee: Callee) -> None:
    before = INTERNAL_ERRORS.count
    stub = await callee.served.stub(state_pb2_grpc.StateStub, callee.caller.peer)
    call = stub.GetState(iter([state_pb2.StateRequest(run=RUN, stage=1)]))
    await anext(aiter(call))
    call.cancel()
    await asyncio.sleep(0.2)
    assert INTERNAL_ERRORS.count == before
