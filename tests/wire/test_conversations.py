"""One stream for many questions: answers in order, a fresh one after trouble, and no answer lost to a stream that ends in between."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from peerd.errors import BadMessageError, BusyError, PeerGoneError
from peerd.generated import swarm_pb2, swarm_pb2_grpc
from peerd.link.links import Links
from peerd.swarm.signed import sign_record
from peerd.table.record import PeerId, PeerRecord
from peerd.wire import open_conversations as held
from peerd.wire.conversations import Conversations
from peerd.wire.swarm_client import SwarmClient
from tests.wire.callee import BAD, RUN, Callee, assert_refused, new_identity

PEER, OTHER = PeerId("12D3KooWpeer"), PeerId("12D3KooWother")
PATIENCE_S = 5.0


class Answerer:
    """A server that says what it hears, but for words that it takes for something else."""

    def __init__(self) -> None:
        self.num_streams = 0
        self.silent = asyncio.Event()
        self.let = asyncio.Event()

    async def converse(self, questions: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        self.num_streams += 1
        async for question in questions:
            match question:
                case b"end":
                    yield b"bye"
                    return
                case b"leave":
                    return
                case b"hold":
                    continue
                case b"refuse":
                    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
                case b"wait":
                    self.silent.set()
                    await self.let.wait()
            yield question


class Ways:
    """Links that lead to that server: the tunnel, and a direct channel where there is one."""

    def __init__(self, target: str) -> None:
        self.tunnel = grpc.aio.insecure_channel(target)
        self.direct: grpc.aio.Channel | None = None

    async def channel(self, _peer: PeerId) -> grpc.aio.Channel:
        return self.tunnel

    async def quickest_channel(self, _peer: PeerId) -> grpc.aio.Channel:
        return self.direct or self.tunnel


class Group:
    def __init__(self, path: Path) -> None:
        self.answerer = Answerer()
        self.server = grpc.aio.server()
        handler: Any = grpc.stream_stream_rpc_method_handler(self.answerer.converse)
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", {"Converse": handler}),))
        self.target = f"unix:{path}/socket"
        self.server.add_insecure_port(self.target)
        self.links = Ways(self.target)
        self.conversations = Conversations(cast(Links, self.links), "/test/Converse", lambda said: said, lambda heard: heard)

    async def ask(self, question: bytes, timeout_s: float = PATIENCE_S) -> bytes:
        answer: bytes = await self.conversations.ask(PEER, question, timeout_s)
        return answer


@pytest.fixture
async def group(tmp_path: Path) -> AsyncIterator[Group]:
    made = Group(tmp_path)
    await made.server.start()
    yield made
    await made.links.tunnel.close()
    await made.server.stop(0)


async def test_many_questions_at_once_are_answered_in_order_on_one_stream(group: Group) -> None:
    questions = [str(number).encode() for number in range(50)]
    assert await asyncio.gather(*map(group.ask, questions)) == questions
    assert group.answerer.num_streams == 1


async def test_a_refusal_is_told_to_all_who_wait_and_the_next_question_begins_anew(group: Group) -> None:
    asked = [asyncio.ensure_future(group.ask(question)) for question in (b"hold", b"hold", b"refuse")]
    for each in asked:
        with pytest.raises(BusyError):
            await each
    assert await group.ask(b"three") == b"three"
    assert group.answerer.num_streams == 2


async def test_who_does_not_answer_in_time_is_asked_over_another_stream(group: Group) -> None:
    assert await group.ask(b"one") == b"one"
    with pytest.raises(PeerGoneError, match="no message for"):
        await group.ask(b"wait", timeout_s=0.5)
    await group.answerer.silent.wait()
    assert await group.ask(b"two") == b"two"
    assert group.answerer.num_streams == 2


async def test_a_question_that_meets_the_end_of_a_stream_is_asked_again(group: Group) -> None:
    assert await group.ask(b"end") == b"bye"
    assert await group.ask(b"one") == b"one"
    assert group.answerer.num_streams == 2


async def test_a_question_that_is_cut_off_by_the_end_of_a_stream_is_asked_again(group: Group) -> None:
    """It does not fit into what may be on its way, so part of it is still to be sent when the stream ends."""
    last, question = asyncio.ensure_future(group.ask(b"end")), bytes(3_000_000)
    await asyncio.sleep(0)
    assert await group.ask(question) == question
    assert await last == b"bye"
    assert group.answerer.num_streams == 2


class CutShort:
    """A channel whose first stream ends as gRPC's client tells it now and then: the callee had ended it while a question was being sent."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel, self._is_new, self._sent = channel, True, asyncio.Event()

    def stream_stream(self, method: str, **coders: Any) -> Any:
        is_first, self._is_new = self._is_new, False
        return (lambda: self) if is_first else self._channel.stream_stream(method, **coders)

    async def write(self, _question: bytes) -> None:
        self._sent.set()

    async def read(self) -> bytes:
        await self._sent.wait()
        raise grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(), "Internal error from Core")

    def cancel(self) -> None:
        return


async def test_a_stream_that_was_cut_short_is_over_and_the_question_is_asked_again(group: Group) -> None:
    group.links.direct = cast(grpc.aio.Channel, CutShort(group.links.tunnel))
    assert await group.ask(b"one") == b"one"
    assert group.answerer.num_streams == 1


async def test_one_that_ends_every_stream_at_once_is_gone(group: Group) -> None:
    with pytest.raises(PeerGoneError):
        await group.ask(b"leave")


async def test_the_next_question_takes_the_new_way_and_what_is_under_way_is_answered(group: Group) -> None:
    asked = asyncio.ensure_future(group.ask(b"wait"))
    await group.answerer.silent.wait()
    async with grpc.aio.insecure_channel(group.target) as group.links.direct:
        assert await group.ask(b"one") == b"one"
        group.answerer.let.set()
        assert await asked == b"wait"
        assert group.answerer.num_streams == 2


async def test_a_direct_path_that_leads_nowhere_is_shunned_for_a_while(group: Group, tmp_path: Path) -> None:
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/nowhere") as group.links.direct:
        with pytest.raises(PeerGoneError):
            await group.ask(b"one")
        assert await group.ask(b"two") == b"two"


async def test_a_direct_path_that_was_closed_under_way_is_gone(group: Group) -> None:
    group.links.direct = grpc.aio.insecure_channel(group.target)
    await group.links.direct.close()
    with pytest.raises(PeerGoneError):
        await group.ask(b"one")
    assert await group.ask(b"two") == b"two"


async def test_who_waits_for_a_connection_that_is_given_up_hears_of_it_at_once(group: Group) -> None:
    silent = socket.create_server(("127.0.0.1", 0))  # takes connections and says nothing
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{silent.getsockname()[1]}")
    group.links.direct = channel
    asked = asyncio.ensure_future(group.ask(b"one", timeout_s=60.0))
    async with asyncio.timeout(PATIENCE_S):
        while channel.get_state() is grpc.ChannelConnectivity.IDLE:
            await channel.wait_for_state_change(grpc.ChannelConnectivity.IDLE)
        await channel.close()
        with pytest.raises(PeerGoneError):
            await asked
    silent.close()


async def test_a_question_that_is_called_back_takes_nobody_elses_answer(group: Group) -> None:
    assert await group.ask(b"one") == b"one"
    given_up = asyncio.ensure_future(group.ask(b"wait"))
    await group.answerer.silent.wait()
    given_up.cancel()
    await asyncio.wait({given_up})
    group.answerer.let.set()
    assert [await group.ask(question) for question in (b"two", b"three")] == [b"two", b"three"]


async def test_when_the_connection_closes_nobody_waits(group: Group) -> None:
    asked = asyncio.ensure_future(group.ask(b"wait"))
    await group.answerer.silent.wait()
    await group.links.tunnel.close()
    with pytest.raises(PeerGoneError):
        await asked
    group.answerer.let.set()


async def test_nobody_listens_at_all(tmp_path: Path) -> None:
    group = Group(tmp_path)
    with pytest.raises(PeerGoneError):
        await group.ask(b"one")
    await group.links.tunnel.close()


def row(callee: Callee, version: int) -> tuple[bytes, bytes]:
    return sign_record(PeerRecord(peer=callee.caller.peer, incarnation=1, version=version), callee.caller, RUN).raw


async def test_what_is_told_is_believed(callee: Callee) -> None:
    client = SwarmClient(callee.links(), RUN)
    for version in (1, 2, 3):
        await client.tell(callee.me, [row(callee, version)], PATIENCE_S)
        found = callee.membership.find(callee.caller.peer)
        assert found is not None
        assert found.version == version


async def test_who_tells_something_broken_is_not_heard_for_a_while(callee: Callee) -> None:
    client = SwarmClient(callee.links(), RUN)
    with pytest.raises(BadMessageError):
        await client.tell(callee.me, [callee.forged()], PATIENCE_S)
    assert callee.door.refused == 1
    with pytest.raises(BusyError, match="broken message"):
        await client.tell(callee.me, [row(callee, 1)], PATIENCE_S)
    other = new_identity()
    assert await SwarmClient(callee.links(other), RUN).tell(callee.me, [], PATIENCE_S) is not None


async def test_what_a_caller_holds_beyond_its_share_ends_the_one_silent_for_longest_and_nothing_is_lost(callee: Callee) -> None:
    """As when a daemon comes anew again and again, and its old streams are still there."""
    clients = [SwarmClient(callee.links(), RUN) for _ in range(held.MAX_CONVERSATIONS + 1)]
    first: asyncio.Task[None] | None = None
    for version, client in enumerate([*clients, *clients], start=1):
        await client.tell(callee.me, [row(callee, version)], PATIENCE_S)
        first = first or client._conversations._with[callee.me]._reader
    assert first is not None
    await asyncio.wait_for(first, PATIENCE_S)
    found = callee.membership.find(callee.caller.peer)
    assert found is not None
    assert found.version == 2 * len(clients)


async def test_who_was_heard_last_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "MAX_CONVERSATIONS", 2)
    holding, line = held.Held(), asyncio.Queue[bytes]()

    async def heard() -> AsyncIterator[bytes]:
        while True:
            yield await line.get()

    async def silence() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    with holding.by(PEER, heard()) as first, holding.by(PEER, silence()) as second, holding.by(OTHER, silence()) as others:
        line.put_nowait(b"I am still here")
        assert await first.question() == b"I am still here"
        waiting, of_another = asyncio.ensure_future(second.question()), asyncio.ensure_future(others.question())
        await asyncio.sleep(0)
        with holding.by(PEER, silence()) as third:
            assert await waiting is None
            assert await second.question() is None, "it is over for good"
            line.put_nowait(b"and here")
            assert await first.question() == b"and here"
            with holding.by(PEER, silence()):
                assert await third.question() is None, "it had said nothing yet"
        assert not of_another.done()
        of_another.cancel()
        await asyncio.wait({of_another})
    assert not holding._of


async def test_after_a_long_silence_the_callee_ends_a_conversation_and_nothing_is_lost(
    callee: Callee, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held, "LONGEST_SILENCE_S", 0.02)
    client = SwarmClient(callee.links(), RUN)
    for version in (1, 2, 3):
        await client.tell(callee.me, [row(callee, version)], PATIENCE_S)
        await asyncio.sleep(0.1)  # the silence
    found = callee.membership.find(callee.caller.peer)
    assert found is not None
    assert found.version == 3


async def test_what_is_no_push_is_refused_in_a_conversation(callee: Callee) -> None:
    stub = await callee.served.stub(swarm_pb2_grpc.SwarmStub, callee.caller.peer)
    await assert_refused(callee, stub.Converse(iter([swarm_pb2.GossipRequest(run=RUN, want_all=True)])), BAD, "for pushed records only")
