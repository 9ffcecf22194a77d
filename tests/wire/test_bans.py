"""A peer is banned for what only a liar sends: never because it gave up, was cut off or cancelled, asks again, or has a wrong clock."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import grpc
import pytest

from peerd.errors import WrongStateError
from peerd.generated import averaging_pb2, averaging_pb2_grpc, direct_pb2, direct_pb2_grpc, stage_pb2, stage_pb2_grpc
from peerd.link.certificate import make_certificate
from peerd.link.direct import Showing
from peerd.link.links import Links, answer_of
from peerd.link.pins import Pins
from peerd.link.throttle import Throttles
from peerd.link.traffic import Traffic, Way
from peerd.stage.microbatches import forward_backward
from peerd.stage.results import BackwardResult, HeldMicrobatch
from peerd.stage.state import StageState
from peerd.table.record import PeerId, RawRecord
from peerd.table.view import LiveView
from peerd.wire import convert
from peerd.wire.clients import StageClient
from peerd.wire.direct_service import DirectServicer
from peerd.wire.dispatch import Dispatcher
from peerd.wire.door import Door
from peerd.wire.frames import opening_of_round
from peerd.wire.messages import Call
from tests.link.local_peers import serving
from tests.strategies import member, view_of
from tests.wire.callee import DOOR_PATIENCE_S, RUN, Callee, new_identity
from tests.wire.test_averaging_service import due_chunk, open_round, part_bytes

PIECES = 4


async def cancels(rpc: Any, _links: Links) -> None:
    rpc.cancel()


async def ends_its_stream(rpc: Any, _links: Links) -> None:
    await rpc.done_writing()


async def loses_its_connection(_rpc: Any, links: Links) -> None:
    await links.close()


def giving_up(test: Any) -> Any:
    """Each way to give a call up, before and between its chunks."""
    return pytest.mark.parametrize("sent", range(PIECES))(
        pytest.mark.parametrize("give_up", [cancels, ends_its_stream, loses_its_connection])(test)
    )


async def assert_not_banned(callee: Callee, rpc: Any) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
        async with asyncio.timeout(20):
            while await rpc.read() is not grpc.aio.EOF:
                continue
    async with asyncio.timeout(20):
        while callee.service.queue:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)
    stub = await callee.served.stub(stage_pb2_grpc.StageStub, callee.caller.peer)
    await answer_of(stub.Cancel(stage_pb2.CancelRequest()))  # raises BusyError under a ban
    assert callee.door.refused == 0


@giving_up
async def test_a_caller_that_gives_a_microbatch_up_is_not_banned(callee: Callee, give_up: Callable[..., Any], sent: int) -> None:
    call, caller, links = callee.call(), callee.caller.peer, callee.links()
    inputs = b"".join(map(bytes, call.inputs.chunks))
    piece = len(inputs) // PIECES
    rpc = stage_pb2_grpc.StageStub(await links.channel(caller)).Backpropagate()
    await rpc.write(stage_pb2.CallMessage(header=convert.call_to(call, RUN, ())))
    assert (await rpc.read()).WhichOneof("kind") == "accepted"
    for number in range(sent):
        await rpc.write(stage_pb2.CallMessage(chunk=inputs[number * piece : (number + 1) * piece]))
    await give_up(rpc, links)
    await assert_not_banned(callee, rpc)
    await callee.assert_lives()


@giving_up
async def test_a_member_that_gives_a_round_up_is_not_banned(callee: Callee, give_up: Callable[..., Any], sent: int) -> None:
    roster = await open_round(callee)
    links = callee.links()
    rpc = averaging_pb2_grpc.AveragingStub(await links.channel(callee.caller.peer)).Give()
    await rpc.write(opening_of_round(roster.average_id))
    piece = bytes(part_bytes(callee, roster) // PIECES)
    for number in range(sent):
        header = None if number else due_chunk(callee, roster)
        await rpc.write(averaging_pb2.ChunkMessage(header=header, chunk=piece))
    await give_up(rpc, links)
    await assert_not_banned(callee, rpc)
    assert callee.rounds.open is not None, "the member may call again, and goes on"


@pytest.mark.parametrize("give_up", [cancels, ends_its_stream, loses_its_connection])
async def test_a_member_that_takes_no_more_of_a_round_is_not_banned_and_leaves_no_call_behind(
    callee: Callee, give_up: Callable[..., Any]
) -> None:
    roster = await open_round(callee)
    links = callee.links()
    rpc = averaging_pb2_grpc.AveragingStub(await links.channel(callee.caller.peer)).Take()
    await rpc.write(averaging_pb2.Verified(average_id=roster.average_id))
    assert (await rpc.read()).header.author == roster.peers.index(callee.me)
    await give_up(rpc, links)
    await assert_not_banned(callee, rpc)
    async with asyncio.timeout(20):
        while callee.door.calls.total:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)
    assert callee.rounds.open is not None


@pytest.mark.parametrize("give_up", [cancels, ends_its_stream, loses_its_connection])
async def test_a_caller_that_gives_up_before_it_has_said_anything_is_not_banned(callee: Callee, give_up: Callable[..., Any]) -> None:
    for stub, method in (
        (stage_pb2_grpc.StageStub, "Backpropagate"),
        (averaging_pb2_grpc.AveragingStub, "Give"),
        (averaging_pb2_grpc.AveragingStub, "Take"),
    ):
        links = callee.links()
        rpc = getattr(stub(await links.channel(callee.caller.peer)), method)()
        await rpc.wait_for_connection() if give_up is not cancels else None
        await give_up(rpc, links)
        await assert_not_banned(callee, rpc)


class Lines:
    """The links of a caller to one peer, over one line after another."""

    def __init__(self, callee: Callee) -> None:
        self._callee = callee
        self._throttles = Throttles()
        self._present = callee.served.links_of(callee.caller.peer, self._throttles)
        self.traffic = Traffic()

    async def way_for_tensors(self, peer: PeerId) -> tuple[Any, Way]:
        return await self._present.way_for_tensors(peer)

    async def channel_for_tensors(self, peer: PeerId) -> Any:
        return await self._present.channel_for_tensors(peer)

    def die(self) -> None:
        """Nothing passes the present line any more, and neither end hears that. New calls take a new line."""
        self._throttles.upload.rate = self._throttles.download.rate = 1e-6
        self._present = self._callee.served.links_of(self._callee.caller.peer)


class Announcing:
    """The table of a caller whose callee announces itself anew all the time, so that no ban of the caller's lasts."""

    def __init__(self, callee: Callee) -> None:
        self._callee, self._versions = callee, itertools.count()
        self.failures: list[PeerId] = []

    def live(self) -> LiveView:
        theirs = replace(self._callee.state.record, version=next(self._versions))
        return view_of(member(self._callee.caller.peer, stage=0), theirs)

    def absorb(self, raws: Sequence[RawRecord], sender: PeerId) -> Sequence[RawRecord]:
        return raws

    async def changed(self, timeout_s: float) -> bool:
        return True

    def report_failure(self, peer: PeerId) -> None:
        self.failures.append(peer)

    async def adapt(self, call: Call, _peer: PeerId) -> Call:
        return call


async def test_a_caller_that_asks_again_after_its_line_died_is_not_banned(callee: Callee, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slowly(state: StageState, batch: HeldMicrobatch, *let_through: Any) -> BackwardResult:
        begun.set()
        go_on.wait(20)
        return forward_backward(state, batch, *let_through)

    monkeypatch.setattr("peerd.stage.jobs.forward_backward", slowly)
    lines, table = Lines(callee), Announcing(callee)
    dispatcher = Dispatcher(StageClient(cast(Links, lines), RUN), table, table, table, 2, 3, DOOR_PATIENCE_S, lambda: 20)
    sending = asyncio.ensure_future(dispatcher.send(callee.call(), lambda _stage, _peer: None))
    assert await asyncio.to_thread(begun.wait, 20)
    lines.die()
    async with asyncio.timeout(20):
        while callee.service.queue < 2 and not callee.door.refused:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)
    assert table.failures == [callee.me]
    go_on.set()
    assert (await sending).gradient is not None
    assert callee.door.refused == 0
    assert callee.state.record.done == 0b1, "the call that failed was called off, and not the one after it"


async def test_a_peer_with_a_wrong_clock_is_not_banned() -> None:
    caller, mine, now = new_identity(), new_identity(), datetime.now(UTC)
    door = Door(RUN, DOOR_PATIENCE_S, Traffic())
    showing = Showing(make_certificate(mine.peer, mine.sign), port=1)
    ahead = make_certificate(caller.peer, caller.sign, now=now + timedelta(days=400))
    async with serving([DirectServicer(door, Pins(), showing)]) as served:
        stub = await served.stub(direct_pb2_grpc.DirectStub, caller.peer)
        with pytest.raises(WrongStateError, match="a clock may be wrong"):
            await answer_of(stub.Show(direct_pb2.ShowRequest(certificate=ahead.der)))
        sound = make_certificate(caller.peer, caller.sign)
        assert (await answer_of(stub.Show(direct_pb2.ShowRequest(certificate=sound.der)))).port == 1
    assert door.refused == 0
