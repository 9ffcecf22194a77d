"""Rosters and parts that break a rule never become part of an average."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
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
from peerd.link.traffic import Traffic
from peerd.policy.step.roster import Roster, RosterEntry
from peerd.stage.executor import Priority
from peerd.table.forms import bitmap_to
from peerd.table.record import AverageId, PeerId, Phase
from peerd.wire import convert
from peerd.wire.chunks import digest_of
from peerd.wire.clients import AveragingClient
from peerd.wire.door import Door
from peerd.wire.handlers import AveragingHandler, ReceivePart
from peerd.wire.messages import Part
from peerd.wire.services import AveragingServicer
from tests.link.local_peers import serving
from tests.wire.callee import ALL, BAD, PATIENCE_S, RUN, STATE, Callee, assert_refused, drain


async def test_a_roster_that_does_not_cover_the_step_is_not_joined(callee: Callee) -> None:
    await callee.assert_lives()  # so that it holds microbatch 1
    mine = callee.state.record
    for theirs, words in ((0b001, "cover"), (0b111, "overlaps"), (0b1101, "beyond")):
        entries = (RosterEntry(mine.peer, 1, mine.ledger_no, mine.done), RosterEntry(callee.caller.peer, 1, 1, theirs))
        roster = Roster(1, 0, 0, callee.caller.peer, tuple(sorted(entries)))
        joined, reason, _ = await AveragingClient(callee.links(), RUN).propose(callee.caller.peer, roster, PATIENCE_S)
        assert not joined
        assert words in reason
    assert callee.state.record == mine


async def test_a_roster_proposed_by_another_than_its_leader_is_refused(callee: Callee) -> None:
    roster = convert.roster_to(Roster(1, 0, 0, callee.me, (RosterEntry(callee.me, 1, 1, ALL),)))
    stub = await callee.served.stub(averaging_pb2_grpc.AveragingStub, callee.caller.peer)
    await assert_refused(callee, stub.Propose(averaging_pb2.Proposal(run=RUN, roster=roster)), BAD, "by its leader")


async def test_an_oversize_ledger_in_a_roster_is_refused(callee: Callee) -> None:
    entry = averaging_pb2.RosterEntry(peer=callee.me, done=bytes(MAX_MICROBATCHES_PER_STEP // 8 + 1))
    stub = await callee.served.stub(averaging_pb2_grpc.AveragingStub, callee.caller.peer)
    proposal = averaging_pb2.Proposal(run=RUN, roster=averaging_pb2.Roster(entries=[entry]))
    await assert_refused(callee, stub.Propose(proposal), BAD, "longer than any step")


async def test_a_roster_proposed_by_a_peer_that_no_record_names_as_a_mate_is_not_joined(callee: Callee) -> None:
    """Whatever the roster says: a key costs nothing, and each round takes a copy of the accumulator."""
    roster = await whole_roster(callee)
    callee.host.strangers.add(callee.caller.peer)
    client = AveragingClient(callee.links(), RUN)
    joined, reason, _ = await client.propose(callee.caller.peer, roster, PATIENCE_S)
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
            joined, reason, _ = await client.propose(callee.caller.peer, wrong, PATIENCE_S)
            assert not joined
            assert reason
    finally:
        go_on.set()
        await working
    assert callee.rounds._joining.total == 0
    assert (await client.propose(callee.caller.peer, roster, PATIENCE_S))[0]


COPY_S = 0.2


@pytest.mark.parametrize("end", ["deadline", "cancelled", "connection broken"])
@pytest.mark.parametrize("at", [0.25, 0.75], ids=["before the state opens it", "after"])
async def test_hole_21_whatever_ends_the_call_of_a_proposal_the_round_that_it_opens_gets_its_end(
    callee: Callee, monkeypatch: pytest.MonkeyPatch, end: str, at: float
) -> None:
    """A copy of the accumulator takes seconds at real size. The leader gives up on its proposal meanwhile and aborts the round."""
    roster, open_round = await whole_roster(callee), callee.state.open_round

    def slow(roster: Roster) -> tuple[str, torch.Tensor | None]:
        time.sleep(COPY_S / 2)
        opened = open_round(roster)
        time.sleep(COPY_S / 2)
        return opened

    monkeypatch.setattr(callee.state, "open_round", slow)
    links, proposal = callee.links(), averaging_pb2.Proposal(run=RUN, roster=convert.roster_to(roster))
    channel = await links.channel(callee.caller.peer)
    rpc = averaging_pb2_grpc.AveragingStub(channel).Propose(proposal, timeout=at * COPY_S if end == "deadline" else PATIENCE_S)
    await asyncio.wait([asyncio.ensure_future(rpc.code())], timeout=at * COPY_S)
    if end == "cancelled":
        rpc.cancel()
    elif end == "connection broken":
        await links.drop(callee.caller.peer)
    await eventually(callee, lambda: callee.rounds.open is not None)
    assert callee.state.round == roster
    assert callee.rounds.runs(roster.average_id), "it has a task that ends it"
    callee.rounds.abort(roster.leader, roster.average_id)
    await eventually(callee, lambda: callee.state.record.phase is Phase.ACCUMULATING)
    assert callee.rounds.open is None


async def eventually(callee: Callee, holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            callee.host.changed.clear()
            await callee.host.changed.wait()


async def test_a_part_of_no_round_is_refused_after_it_was_held_for_a_while(callee: Callee) -> None:
    await assert_refused(callee, await reduce(callee, part(AverageId(bytes(16)))), STATE, "no such round")


async def test_a_part_with_another_ledger_size_or_value_than_the_rosters_is_refused(callee: Callee) -> None:
    roster = await open_round(callee)
    size = callee.state.accumulator.flat.numel() // 2 * 8
    theirs = roster.entries[1 - roster.peers.index(callee.me)].done
    wrong = [part(roster.average_id, ledger=ALL, num_bytes=size), part(roster.average_id, ledger=theirs, num_bytes=8)]
    wrong.append(part(roster.average_id, ledger=theirs, slice_index=7, num_bytes=size))
    for header in wrong:
        callee.door.bans.until_s.clear()
        with pytest.raises(grpc.aio.AioRpcError, match="not what the roster says"):
            await drain(await reduce(callee, header))
    assert callee.door.refused == len(wrong)


async def test_a_part_that_is_not_finite_is_refused(callee: Callee) -> None:
    roster = await open_round(callee)
    mine = roster.peers.index(callee.me)
    length = callee.state.accumulator.flat.numel()
    size = ((length * (mine + 1)) // 2 - (length * mine) // 2) * 8
    header = part(roster.average_id, ledger=roster.entries[1 - mine].done, slice_index=mine, num_bytes=size)
    chunk = torch.full((size // 8,), math.nan, dtype=torch.float64).numpy().tobytes()
    with pytest.raises(grpc.aio.AioRpcError, match="not finite"):
        await drain(await reduce(callee, header, chunk))


async def test_gradients_of_a_tied_weight_that_nobody_holds_are_refused(callee: Callee) -> None:
    client = AveragingClient(callee.links(), RUN)
    with pytest.raises(WrongStateError, match="no such gradients of a tied weight"):
        await client.get_tied(callee.caller.peer, 0, AverageId(b"x"), 8, PATIENCE_S)


class Holder:
    """Gives two chunks of a tied weight's gradients, and says of them what it was told to."""

    def __init__(self, told: bytes) -> None:
        self.told = told
        self.asked: list[tuple[int, AverageId]] = []

    async def get_tied(self, step: int, wanted: AverageId) -> tuple[bytes, Sequence[bytes]]:
        self.asked.append((step, wanted))
        return digest_of([self.told]), CHUNKS


CHUNKS = (bytes(8), b"1234" * 2)


async def test_gradients_of_a_tied_weight_come_whole_and_as_they_were_sent_or_not_at_all() -> None:
    sound, damaged = Holder(b"".join(CHUNKS)), Holder(b"another")
    for holder in (sound, damaged):
        async with serving([AveragingServicer(Door(RUN, PATIENCE_S, Traffic()), cast(AveragingHandler, holder))]) as served:
            client = AveragingClient(served.links_of("caller"), RUN)
            if holder is damaged:
                with pytest.raises(BadMessageError, match="do not match their hash"):
                    await client.get_tied(PeerId("caller"), 3, AverageId(b"x"), 16, PATIENCE_S)
                return
            assert await client.get_tied(PeerId("caller"), 3, AverageId(b"x"), 16, PATIENCE_S) == CHUNKS
            assert holder.asked == [(3, b"x")]
            with pytest.raises(BadMessageError, match="without a header that says 24 bytes"):
                await client.get_tied(PeerId("caller"), 3, AverageId(b"x"), 24, PATIENCE_S)


class SlowReducer:
    """The parts of the others take longer to arrive than anybody waits for a message."""

    def __init__(self) -> None:
        self.calls = 0

    async def reduce(self, _caller: PeerId, _part: Part, receive: ReceivePart) -> Sequence[memoryview]:
        chunks = await receive(lambda _num_bytes: None, 1)
        await asyncio.sleep(4 * SHORT_S)
        return [memoryview(chunk) for chunk in chunks]

    def arrived(self, _average_id: AverageId) -> int:
        self.calls += 1
        return 8 * self.calls


SHORT_S = 0.3


async def test_a_sender_waits_as_long_as_the_reducer_says_that_parts_arrive() -> None:
    reducer, told = SlowReducer(), list[int]()
    async with serving([AveragingServicer(Door(RUN, SHORT_S, Traffic()), cast(AveragingHandler, reducer))]) as served:
        client = AveragingClient(served.links_of("caller"), RUN)
        header = Part(AverageId(bytes(16)), 0, 0, 8)
        chunks = await client.reduce(PeerId("caller"), header, [memoryview(b"gradient")], SHORT_S, told.append)
    assert b"".join(chunks) == b"gradient"
    assert reducer.calls >= 4
    assert told == [8 * (number + 1) for number in range(reducer.calls)] + [8 * reducer.calls + 8]


def part(average_id: AverageId, ledger: int = 0, slice_index: int = 0, num_bytes: int = 8) -> averaging_pb2.PartHeader:
    return averaging_pb2.PartHeader(average_id=average_id, slice=slice_index, ledger=bitmap_to(ledger), num_bytes=num_bytes)


async def reduce(callee: Callee, header: averaging_pb2.PartHeader, *chunks: bytes) -> Any:
    stub = await callee.served.stub(averaging_pb2_grpc.AveragingStub, callee.caller.peer)

    async def sent() -> AsyncIterator[averaging_pb2.PartMessage]:
        yield averaging_pb2.PartMessage(header=header)
        for chunk in chunks:
            yield averaging_pb2.PartMessage(chunk=chunk)

    return stub.Reduce(sent())


async def open_round(callee: Callee) -> Roster:
    """The callee joins; nobody ever answers its own parts."""
    roster = await whole_roster(callee)
    joined, reason, _ = await AveragingClient(callee.links(), RUN).propose(callee.caller.peer, roster, PATIENCE_S)
    assert joined, reason
    return roster


async def whole_roster(callee: Callee) -> Roster:
    """The caller leads, and brings what the callee does not hold."""
    await callee.assert_lives()
    mine = callee.state.record
    entries = (RosterEntry(mine.peer, 1, mine.ledger_no, mine.done), RosterEntry(callee.caller.peer, 1, 1, ALL & ~mine.done))
    return Roster(1, 0, 0, callee.caller.peer, tuple(sorted(entries)))
