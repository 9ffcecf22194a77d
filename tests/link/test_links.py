"""What ends a call, as its caller sees it."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from peerd.errors import PeerGoneError, RemoteError
from peerd.link import links
from peerd.link.links import remote_errors
from peerd.link.streams import Stream
from peerd.table.record import PeerId
from tests.few_files import no_file_left
from tests.link.direct_peers import WITHIN_S, caller_through, endpoint
from tests.wire.callee import new_identity


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


async def test_a_connection_for_tensors_that_nothing_uses_is_closed_until_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "TENSORS_IDLE_MS", 1000)  # gRPC's least
    async with endpoint() as there:
        caller = new_identity()
        ways, _ = there.paths_of(caller)
        for_tensors = await ways.channel(there.peer, for_tensors=True)
        for channel in (await ways.channel(there.peer), for_tensors):
            assert await caller_through(channel) == caller.peer
        connections = set(ways._tunnel._streams.running)
        assert len(connections) == 2
        closed, _ = await asyncio.wait(connections, timeout=WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
        assert len(closed) == 1
        assert await caller_through(for_tensors) == caller.peer


async def test_a_dial_over_a_full_line_is_waited_for_and_not_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with endpoint() as there:
        caller = new_identity()
        ways, _ = there.paths_of(caller)
        dial, dials = ways._tunnel._dial, 0

        async def slow_dial(peer: PeerId) -> Stream:
            nonlocal dials
            dials += 1
            await asyncio.sleep(4)  # a second and a half of queue each way, and some round trips
            return await dial(peer)

        monkeypatch.setattr(ways._tunnel, "_dial", slow_dial)
        assert await caller_through(await ways.channel(there.peer)) == caller.peer
        assert dials == 1


async def test_the_tunnels_connections_to_a_peer_that_nothing_uses_are_closed_with_all_their_files() -> None:
    """A daemon kept four files for each peer that it had ever called, until that was gone for good."""
    async with endpoint() as there:
        caller = new_identity()
        ways, _ = there.paths_of(caller)
        assert await caller_through(await ways.channel(there.peer)) == caller.peer
        (connection,) = ways._tunnel._streams.running
        await ways.close_unused(WITHIN_S)
        assert ways._tunnel._servers
        await ways.close_unused(0.0)
        assert not ways._tunnel._servers
        await asyncio.wait_for(asyncio.wait({connection}), WITHIN_S)
        assert await caller_through(await ways.channel(there.peer)) == caller.peer, "the next call dials anew"


async def test_where_no_socket_can_be_opened_a_peer_is_out_of_reach_for_a_while_and_nothing_ends() -> None:
    async with endpoint() as there:
        caller = new_identity()
        ways, _ = there.paths_of(caller)
        with no_file_left(), pytest.raises(PeerGoneError, match="Too many open files"):
            await ways.channel(there.peer)
        assert await caller_through(await ways.channel(there.peer)) == caller.peer
