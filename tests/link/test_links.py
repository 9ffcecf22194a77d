"""What ends a call, as its caller sees it."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from peerd.errors import PeerGoneError, RemoteError
from peerd.link.links import remote_errors


def cancelled_by_grpc() -> grpc.aio.AioRpcError:
    metadata = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.CANCELLED, metadata, metadata, details="Locally cancelled by application!")


@pytest.mark.parametrize("as_grpc_tells", [True, False])
async def test_a_task_that_is_cancelled_within_a_call_ends_whatever_grpc_makes_of_it(as_grpc_tells: bool) -> None:
    calling = asyncio.Event()

    async def call() -> None:
        while True:
            try:
                with remote_errors():
                    calling.set()
                    try:
                        await asyncio.sleep(600)
                    except asyncio.CancelledError:
                        if as_grpc_tells:
                            raise cancelled_by_grpc() from None
                        raise
            except RemoteError:
                continue  # as a dispatcher does: it asks the next peer

    task = asyncio.ensure_future(call())
    await calling.wait()
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=5)
    assert task in done
    assert task.cancelled()


async def test_a_call_that_grpc_ends_by_itself_is_a_peer_that_is_gone() -> None:
    for error in (cancelled_by_grpc(), asyncio.CancelledError()):
        with pytest.raises(PeerGoneError), remote_errors():
            raise error
