"""Rosters and chunks that break a rule never become part of an average."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace
from typing import Any, cast

import grpc
import pytest
import torch

from peerd.averaging.rounds import MOST_JOINING
from peerd.config.manifest import MAX_MICROBATCHES_PER_STEP
from peerd.errors import BadMessageError, WrongStateError
from peerd.generated import (
    averaging_pb2,
    averaging_pb2_grpc,
)
from peerd.link.links import CHUNK_BYTES
from peerd.link.traffic import Traffic
from peerd.policy.round.debts import Edge
from peerd.policy.step.roster import Roster, RosterEntry
from peerd.stage.executor import Priority
from peerd.table.record import AverageId, PeerId, Phase
from peerd.wire.chunks import CutFile, digest_of
from peerd.wire.clients import AveragingClient
from peerd.wire.door import Door
from peerd.wire.frames import opening_of_round
from peerd.wire.handlers import AveragingHandler, Frames, Tell
from peerd.wire.messages import Beat, Frame, Verified
from peerd.wire.rosters import roster_to
from peerd.wire.services import AveragingServicer
from tests.link.local_peers import serving
from tests.wire.callee import ALL, BAD, DOOR_PATIENCE_S, PATIENCE_S, RUN, STATE, Callee, assert_refused, drain, new_identity


async def test_a_roster_that_does_not_cover_the_step_is_not_joined(callee: Callee) -> None:
    await callee.assert_lives()  # so that it holds microbatch 1
    mine = callee.state.record
    for theirs, words in ((0b001, "cover"), (0b1101, "beyond")):
        entries = (RosterEntry(mine.peer, 1, mine.ledger_no, mine.done), RosterEntry(callee.caller.peer, 1, 1, theirs))
        roster = Roster(1, 0, 0, callee.caller.peer, tuple(sorted(entries)))
        joined, reason, *_ = await AveragingClient(callee.links(), RUN).propose(callee.caller.peer, roster, PATIENCE_S)
        assert not joined
        assert words in reason
    assert callee.state.record == mine


async def test_a_roster_proposed_by_another_than_its_leader_is_refused(callee: Callee) -> None:
    roster = roster_to(Roster(1, 0, 0, callee.me, (RosterEntry(callee.me, 1, 1, ALL),)))
    stub = await callee.served.stub(averaging_pb2_grpc.AveragingStub, callee.caller.peer)
    await assert_refused(callee, stub.Propose(averaging_pb2.Proposal(run=RUN, roster=roster)), BAD, "by its leader")


async def test_an_oversize_ledger_in_a_roster_is_refused(callee: Callee) -> None:
    longer = [bytes(MAX_MICROBATCHES_PER_STEP // 8 + 1)]
    roster = averaging_pb2.Roster(peers=[callee.me], incarnations=[1], ledger_nos=[1], holders=longer)
    stub = await callee.served.stub(averaging_pb2_grpc.AveragingStub, callee.caller.peer)
    proposal = averaging_pb2.Proposal(run=RUN, roster=roster)
    await assert_refused(callee, stub.Propose(proposal), BAD, "longer than any step")


async def test_a_member_that_knows_the_others_by_their_marks_joins_at_once_and_one_that_does_not_gets_their_names(callee: Callee) -> None:
    roster, asked = await whole_roster(callee), list[averaging_pb2.Proposal]()
    client = AveragingClient(callee.links(), RUN)
    ask = client._ask

    async def noted(peer: PeerId, method: str, question: averaging_pb2.Proposal, timeout_s: float) -> Any:
        asked.append(question)
        return await ask(peer, method, question, timeout_s)

    client._ask = noted  # type: ignore[method-assign, assignment]
    assert (await client.propose(callee.caller.peer, replace(roster, step=7), PATIENCE_S))[:1] == (False,)
    assert [len(each.roster.peers) for each in asked] == [0, 2]
    callee.host.known.update(roster.peers)
    assert (await client.propose(callee.caller.peer, roster, PATIENCE_S))[0]
    assert [len(each.roster.peers) for each in asked] == [0, 2, 0]
    assert callee.state.round == roster


async def test_a_roster_proposed_by_a_peer_that_no_record_names_as_a_mate_is_not_joined(callee: Callee) -> None:
    """Whatever the roster says: a key costs nothing, and each round takes a copy of the accumulator."""
    roster = await whole_roster(callee)
    callee.host.strangers.add(callee.caller.peer)
    client = AveragingClient(callee.links(), RUN)
    joined, reason, *_ = await client.propose(callee.caller.peer, roster, PATIENCE_S)
    assert (joined, reason) == (False, "no record here says that the proposer serves this stage")
    assert (callee.state.record.phase, callee.door.refused) == (Phase.ACCUMULATING, 0)
    callee.host.strangers.clear()
    assert (await client.propose(callee.caller.peer, roster, PATIENCE_S))[0]


async def test_of_one_leaders_proposals_few_wait_for_the_torch_thread_though_it_ends_their_calls(callee: Callee) -> None:
    """Each holds a roster of up to a message's size, and the thread may be busy for a minute."""
    roster = await whole_roster(callee)
    begun, go_on = threading.Event(), threading.Event()

    def busy() -> None:
        begun.set()
        go_on.wait(20)

    working = asyncio.ensure_future(callee.rounds._executor.run(Priority.FORWARD, busy))
    await asyncio.to_thread(begun.wait, 20)
    client = AveragingClient(callee.links(), RUN)
    for attempt in range(1, 2 * MOST_JOINING + 1):
        proposal = asyncio.ensure_future(client.propose(callee.caller.peer, replace(roster, attempt=attempt), PATIENCE_S))
        if attempt > MOST_JOINING:
            assert (await proposal)[:2] == (False, "other proposals of the same leader wait here")
            continue
        async with asyncio.timeout(20):
            while callee.rounds._joining.total < attempt:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.01)
        proposal.cancel()
    go_on.set()
    await working
    async with asyncio.timeout(20):
        while callee.rounds._joining.total:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)


async def test_a_proposal_that_does_not_fit_is_refused_without_the_torch_thread(callee: Callee) -> None:
    roster = await whole_roster(callee)
    begun, go_on = threading.Event(), threading.Event()

    def busy() -> None:
        begun.set()
        go_on.wait(20)

    working = asyncio.ensure_future(callee.rounds._executor.run(Priority.FORWARD, busy))
    await asyncio.to_thread(begun.wait, 20)
    client = AveragingClient(callee.links(), RUN)
    try:
        for wrong in (replace(roster, step=7), replace(roster, entries=()), replace(roster, entries=roster.entries[:1])):
            joined, reason, *_ = await client.propose(callee.caller.peer, wrong, PATIENCE_S)
            assert not joined
            assert reason
    finally:
        go_on.set()
        await working
    assert callee.rounds._joining.total == 0
    assert (await client.propose(callee.caller.peer, roster, PATIENCE_S))[0]


DEADLINE_S = 1.0


@pytest.mark.parametrize("end", ["deadline", "cancelled", "connection broken"])
@pytest.mark.parametrize("opens_first", [False, True], ids=["before the state opens it", "after"])
async def test_hole_21_whatever_ends_the_call_of_a_proposal_the_round_that_it_opens_gets_its_end(
    callee: Callee, monkeypatch: pytest.MonkeyPatch, end: str, opens_first: bool
) -> None:
    """A copy of the accumulator takes seconds at real size. The leader gives up on its proposal meanwhile and aborts the round."""
    roster, open_round = await whole_roster(callee), callee.state.open_round
    begun, go_on = threading.Event(), threading.Event()

    def slow(roster: Roster) -> tuple[str, torch.Tensor | None]:
        opened = open_round(roster) if opens_first else None
        begun.set()
        go_on.wait(20)
        return opened or open_round(roster)

    monkeypatch.setattr(callee.state, "open_round", slow)
    links, proposal = callee.links(), averaging_pb2.Proposal(run=RUN, roster=roster_to(roster))
    channel = await links.channel(callee.caller.peer)
    rpc = averaging_pb2_grpc.AveragingStub(channel).Propose(proposal, timeout=DEADLINE_S if end == "deadline" else PATIENCE_S)
    ended = asyncio.ensure_future(rpc.code())
    assert await asyncio.to_thread(begun.wait, 20)
    if end == "cancelled":
        rpc.cancel()
    elif end == "connection broken":
        await links.drop(callee.caller.peer)
    await asyncio.wait({ended}, timeout=20)
    await asyncio.sleep(0.1)  # the callee hears of it
    go_on.set()
    await eventually(callee, lambda: callee.rounds.open is not None)
    assert callee.state.round == roster
    assert callee.rounds.runs(roster.average_id), "it has a task that ends it"
    callee.rounds.abort(roster.leader, roster.average_id, PeerId(""), "")
    await eventually(callee, lambda: callee.state.record.phase is Phase.ACCUMULATING)
    assert callee.rounds.open is None


async def eventually(callee: Callee, holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            callee.host.changed.clear()
            await callee.host.changed.wait()


async def test_a_chunk_of_no_round_is_refused_after_its_call_was_held_for_a_while(callee: Callee) -> None:
    await assert_refused(callee, await give(callee, AverageId(bytes(16))), STATE, "no such round")


async def test_chunks_of_a_round_that_the_caller_is_not_in_are_refused(callee: Callee) -> None:
    roster = await open_round(callee)
    for call in (give, take):
        with pytest.raises(grpc.aio.AioRpcError, match="no member of this round"):
            await drain(await call(callee, roster.average_id, caller=new_identity().peer))
    assert callee.rounds.open is not None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"author": 2}, "not in the round"),
        ({"to": 7}, "not in the round"),
        ({"slice": 7}, "not in the round"),
        ({"number": 1}, "in no slice"),
        ({"number": (1 << 32) - 1}, "in no slice"),
        ({"size": -1}, "do not add up"),
        ({"size": 1}, "do not add up"),
        ({"value": math.nan}, "not finite"),
    ],
)
async def test_a_chunk_that_is_not_due_or_not_as_large_as_the_roster_says_ends_the_round(
    callee: Callee, changes: dict[str, Any], words: str
) -> None:
    roster = await open_round(callee)
    size, value = part_bytes(callee, roster) // 8 + changes.pop("size", 0), changes.pop("value", 1.0)
    header = due_chunk(callee, roster)
    for name, number in changes.items():
        setattr(header, name, number)
    chunk = torch.full((size,), value, dtype=torch.float64).numpy().tobytes()
    sent = averaging_pb2.ChunkMessage(header=header, chunk=chunk)
    with pytest.raises(grpc.aio.AioRpcError, match=words):
        await drain(await give(callee, roster.average_id, sent, sent))
    assert callee.door.refused == 1
    await eventually(callee, lambda: callee.state.record.phase is Phase.ACCUMULATING)


async def test_a_sound_chunk_is_taken_and_verified(callee: Callee) -> None:
    roster = await open_round(callee)
    stub = await callee.served.stub(averaging_pb2_grpc.AveragingStub, callee.caller.peer)
    rpc = stub.Give()
    await rpc.write(opening_of_round(roster.average_id))
    assert (await rpc.read()).part == 0
    await rpc.write(averaging_pb2.ChunkMessage(header=due_chunk(callee, roster), chunk=bytes(part_bytes(callee, roster))))
    word = await rpc.read()
    assert (word.part, word.sum, word.summed) == (1, 0, 1)
    rpc.cancel()


async def test_gradients_of_a_tied_weight_that_nobody_holds_are_refused(callee: Callee) -> None:
    client = AveragingClient(callee.links(), RUN)
    with pytest.raises(WrongStateError, match="no such gradients of a tied weight"):
        await client.get_tied(callee.caller.peer, 0, AverageId(b"x"), 8, PATIENCE_S)


class Holder:
    """Gives two chunks of a tied weight's gradients, and says of them what it was told to."""

    def __init__(self, told: bytes) -> None:
        self.told = told
        self.asked: list[tuple[int, AverageId]] = []

    async def get_tied(self, step: int, wanted: AverageId) -> tuple[bytes, CutFile]:
        self.asked.append((step, wanted))
        return digest_of([self.told]), CutFile(CHUNKS, chunk_bytes=8)


CHUNKS = (bytes(8), b"1234" * 2)


async def test_gradients_of_a_tied_weight_come_whole_and_as_they_were_sent_or_not_at_all() -> None:
    sound, damaged = Holder(b"".join(CHUNKS)), Holder(b"another")
    for holder in (sound, damaged):
        async with serving([AveragingServicer(Door(RUN, DOOR_PATIENCE_S, Traffic()), cast(AveragingHandler, holder))]) as served:
            client = AveragingClient(served.links_of("caller"), RUN)
            if holder is damaged:
                with pytest.raises(BadMessageError, match="do not match their hash"):
                    await client.get_tied(PeerId("caller"), 3, AverageId(b"x"), 16, PATIENCE_S)
                return
            assert await client.get_tied(PeerId("caller"), 3, AverageId(b"x"), 16, PATIENCE_S) == CHUNKS
            assert holder.asked == [(3, b"x")]
            with pytest.raises(BadMessageError, match="without a header that says 24 bytes"):
                await client.get_tied(PeerId("caller"), 3, AverageId(b"x"), 24, PATIENCE_S)


class Takes:
    """Takes chunks of a round and gives the same back, each once the caller has verified the one before."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.came: list[Frame] = []
        self.told: list[Verified] = []

    async def give(self, _caller: PeerId, average_id: AverageId, frames: Frames, tell: Tell) -> None:
        assert average_id == ROUND
        async for frame in frames(lambda _frame: self._size):
            self.came.append(frame)
            tell(Verified(part=len(self.came)))

    async def take(self, _caller: PeerId, average_id: AverageId, words: AsyncGenerator[Verified]) -> AsyncGenerator[Frame]:
        assert average_id == ROUND
        async for held in words:
            self.told.append(held)
            if held.part == len(self.came):
                return
            yield self.came[held.part]

    def beat(self, _caller: PeerId, beat: Beat) -> Beat:
        return replace(beat, still_s=2.5)


ROUND = AverageId(bytes(range(16)))


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
async def test_chunks_of_a_round_and_words_about_them_travel_whichever_end_calls(size: int) -> None:
    handler, frames = Takes(size), [Frame(1, 0, number, 1, chunks=(bytes([number]) * size,)) for number in range(5)]
    heard, taken, words = list[Verified](), list[Frame](), asyncio.Queue[Verified]()
    door = Door(RUN, DOOR_PATIENCE_S, Traffic())
    async with serving([AveragingServicer(door, cast(AveragingHandler, handler))]) as served:
        links, peer = served.links_of("caller"), PeerId("caller")
        client = AveragingClient(links, RUN)

        async def sent() -> AsyncGenerator[Frame]:
            for frame in frames:
                yield frame

        async def verified() -> AsyncGenerator[Verified]:
            yield Verified()
            while True:
                yield await words.get()

        async def takes(frame: Frame) -> None:
            taken.append(frame)
            words.put_nowait(Verified(part=len(taken)))

        await client.give(peer, ROUND, sent(), heard.append)
        await client.take(peer, ROUND, verified(), lambda _frame: size, takes)
        beat = Beat(ROUND, (1, 2), (3,), 0.25, (4,), (5,), {Edge(0, 1): 2}, {Edge(0, 1): 7})
        assert await client.beat(peer, beat, PATIENCE_S) == replace(beat, still_s=2.5)
    for came in (handler.came, taken):
        assert [(replace(frame, chunks=()), whole(frame)) for frame in came] == [(replace(f, chunks=()), whole(f)) for f in frames]
    assert heard[-1] == Verified(part=5)
    assert handler.told[-1] == Verified(part=5)
    counted = {("parts", "stage_peer", way): 5 * size for way in ("sent", "received") if size}
    for traffic in (door.traffic, links.traffic):
        assert {(kind, role, way): size for (kind, _, role, way), size in traffic.tensors.items() if size} == counted


def whole(frame: Frame) -> bytes:
    return b"".join(map(bytes, frame.chunks))


def due_chunk(callee: Callee, roster: Roster) -> averaging_pb2.ChunkHeader:
    """The first chunk of the caller's part of the callee's slice."""
    mine = roster.peers.index(callee.me)
    return averaging_pb2.ChunkHeader(slice=mine, author=1 - mine, number=0, to=mine)


def part_bytes(callee: Callee, roster: Roster) -> int:
    """The size of that chunk."""
    mine, length = roster.peers.index(callee.me), callee.state.accumulator.flat.numel()
    return ((length * (mine + 1)) // 2 - (length * mine) // 2) * 8


async def give(callee: Callee, average_id: AverageId, *chunks: averaging_pb2.ChunkMessage, caller: str = "") -> Any:
    stub = await callee.served.stub(averaging_pb2_grpc.AveragingStub, caller or callee.caller.peer)

    async def sent() -> AsyncIterator[averaging_pb2.ChunkMessage]:
        yield opening_of_round(average_id)
        for chunk in chunks:
            yield chunk

    return stub.Give(sent())


async def take(callee: Callee, average_id: AverageId, *, caller: str) -> Any:
    stub = await callee.served.stub(averaging_pb2_grpc.AveragingStub, caller)

    async def sent() -> AsyncIterator[averaging_pb2.Verified]:
        yield averaging_pb2.Verified(average_id=average_id)

    return stub.Take(sent())


async def open_round(callee: Callee) -> Roster:
    """The callee joins; nobody ever answers its own calls."""
    roster = await whole_roster(callee)
    client = AveragingClient(callee.links(), RUN)
    while (answer := await client.propose(callee.caller.peer, roster, PATIENCE_S)).preparing:
        pass  # as leaders do
    assert answer.joined, answer.reason
    return roster


async def whole_roster(callee: Callee) -> Roster:
    """The caller leads, and brings what the callee does not hold."""
    await callee.assert_lives()
    mine = callee.state.record
    entries = (RosterEntry(mine.peer, 1, mine.ledger_no, mine.done), RosterEntry(callee.caller.peer, 1, 1, ALL & ~mine.done))
    return Roster(1, 0, 0, callee.caller.peer, tuple(sorted(entries)))
