"""Calls by the thousand, sound, scrambled and broken, while a round is open: no error of this daemon, and nothing of them stays.

They go through everything but the sockets: what a server is given as handlers, with the context and the bytes that gRPC would bring.
"""

from __future__ import annotations

import asyncio
import gc
import random
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NoReturn

import grpc
import pytest

from peerd.background import INTERNAL_ERRORS
from peerd.generated import averaging_pb2, stage_pb2, state_pb2, swarm_pb2
from peerd.policy.step.roster import Roster
from peerd.table.record import AverageId, PeerId
from peerd.wire import budgets, convert
from peerd.wire.frames import opening_of_round
from peerd.wire.grpc_server import _handlers
from peerd.wire.rosters import roster_to
from tests.wire.callee import BAD, BUSY, GONE, RUN, STATE, Callee
from tests.wire.test_averaging_service import open_round

NUM_CALLERS, AT_ONCE = 100, 250
SMALL, LARGE = 3_000, 100_000
MOST_GROWN_BYTES = 1 << 20
ODD_NUMBERS = (0, 1, 2, 7, 1 << 31, (1 << 32) - 1, (1 << 62) + 1)
Messages = Sequence[bytes]
NEVER_ANSWERED = {"/peerd.Averaging/GetAverage", "/peerd.Averaging/GetTied"}
"""The round never comes together, so there is no average."""


class Context:
    """What gRPC tells a handler of a call through the tunnel."""

    def __init__(self, caller: str) -> None:
        self._caller = caller

    def peer(self) -> str:
        return f"unix:/tmp/from-{self._caller}.0"

    async def abort(self, code: grpc.StatusCode, words: str = "", _metadata: Any = ()) -> NoReturn:
        assert code is not grpc.StatusCode.UNKNOWN, words
        raise grpc.aio.AbortError(code)


class Calls:
    """Makes the messages of one call after another."""

    def __init__(self, callee: Callee, roster: Roster, rng: random.Random) -> None:
        self._callee, self._roster, self._rng = callee, roster, rng
        self._record = callee.membership.raws[callee.me].raw
        self._kinds: list[tuple[str, Callable[[], list[Any]]]] = [
            ("/peerd.Swarm/Gossip", self._gossip),
            ("/peerd.Swarm/Converse", lambda: [message for _ in range(3) for message in self._gossip()]),
            ("/peerd.Swarm/Describe", lambda: [swarm_pb2.DescribeRequest()]),
            ("/peerd.Swarm/Contributions", lambda: [swarm_pb2.ContributionsRequest(run=RUN)]),
            ("/peerd.Swarm/Accounts", self._accounts),
            ("/peerd.Swarm/Timeline", lambda: [swarm_pb2.TimelineRequest(run=RUN, last_step=9, most=rng.choice((0, 9)))]),
            ("/peerd.Stage/Backpropagate", self._microbatch),
            ("/peerd.Stage/Cancel", lambda: [stage_pb2.CancelRequest(call_id=self._bytes(16))]),
            ("/peerd.Averaging/Propose", self._proposal),
            ("/peerd.Averaging/Give", self._chunks),
            ("/peerd.Averaging/Take", self._words),
            ("/peerd.Averaging/Beat", lambda: [averaging_pb2.RoundBeat(average_id=self._id(), parts=self._odd(), sums=self._odd())]),
            ("/peerd.Averaging/Abort", lambda: [averaging_pb2.AbortRequest(average_id=self._bytes(16))]),
            ("/peerd.Averaging/GetAverage", self._average),
            ("/peerd.Averaging/GetTied", lambda: [averaging_pb2.TiedRequest(run=RUN, id=self._bytes(16))]),
            ("/peerd.Averaging/GetMoves", lambda: [averaging_pb2.MovesRequest(run=RUN, incarnation=1, first=self._number())]),
            ("/peerd.State/GetSketch", lambda: [state_pb2.SketchRequest(run=RUN, stage=1, seed=self._bytes(32))]),
            ("/peerd.State/GetState", lambda: [state_pb2.StateRequest(run=RUN, stage=1), state_pb2.StateRequest(chunk=0)]),
        ]

    def next(self) -> tuple[str, Messages]:
        """The method and the bytes of the messages of a call. Of four, one is sound, one broken bytes, and two have odd fields."""
        method, make = self._rng.choice(self._kinds)
        messages, how = make(), self._rng.randrange(4)
        if how == 0:
            return method, [message.SerializeToString() for message in messages]
        if how == 1:
            return method, [self._bytes(self._rng.choice((0, 3, 2000))) for _ in messages]
        for message in messages:
            self._scramble(message)
        return method, [message.SerializeToString() for message in messages[: self._rng.randrange(len(messages) + 1)]]

    def _bytes(self, length: int) -> bytes:
        return self._rng.randbytes(length)

    def _gossip(self) -> list[Any]:
        known = self._bytes(7 * self._rng.randrange(3))
        return [swarm_pb2.GossipRequest(run=RUN, records=convert.records_to([self._record]), want_news=bool(known), known=known)]

    def _accounts(self) -> list[Any]:
        return [swarm_pb2.AccountsRequest(run=RUN, stage=1, since=self._number(), rows=self._rng.choice((False, True)))]

    def _microbatch(self) -> list[Any]:
        call = self._callee.call(index=self._rng.randrange(3))
        header = stage_pb2.CallMessage(header=convert.call_to(call, RUN, ()))
        return [header, *(stage_pb2.CallMessage(chunk=bytes(chunk)) for chunk in (*call.inputs.chunks, *call.labels.chunks))]

    def _proposal(self) -> list[Any]:
        roster = replace(self._roster, attempt=self._rng.randrange(1000))
        return [averaging_pb2.Proposal(run=RUN, roster=roster_to(roster))]

    def _average(self) -> list[Any]:
        return [averaging_pb2.AverageRequest(run=RUN, stage=1, step=self._rng.choice((0, 1))), averaging_pb2.AverageRequest(chunk=0)]

    def _id(self) -> AverageId:
        return self._roster.average_id if self._rng.randrange(2) else AverageId(self._bytes(16))

    def _chunks(self) -> list[Any]:
        """No chunk of the open round: a member that sends a wrong one ends it."""
        average_id = self._id()
        chunk = averaging_pb2.ChunkHeader(slice=self._rng.randrange(2), author=self._rng.randrange(2), number=self._number() & 0xFFFFFFFF)
        rest = [averaging_pb2.ChunkMessage(header=chunk, chunk=bytes(8)), averaging_pb2.ChunkMessage(chunk=bytes(100))]
        return [opening_of_round(average_id), *(rest if average_id != self._roster.average_id else ())]

    def _words(self) -> list[Any]:
        return [averaging_pb2.Verified(average_id=self._id()), averaging_pb2.Verified(summed=self._number() & 0xFFFFFFFF)]

    def _odd(self) -> list[int]:
        return [self._number() & 0xFFFFFFFF for _ in range(self._rng.randrange(4))]

    def _number(self) -> int:
        return self._rng.choice(ODD_NUMBERS)

    def _scramble(self, message: Any) -> None:
        """Give some fields values that they never have."""
        for field in message.DESCRIPTOR.fields:
            if self._rng.randrange(3) or field.is_repeated:
                continue
            if field.type == field.TYPE_MESSAGE:
                self._scramble(getattr(message, field.name))
            elif field.type == field.TYPE_BYTES:
                setattr(message, field.name, self._bytes(self._rng.choice((0, 15, 16, 900))))
            elif field.type == field.TYPE_STRING:
                setattr(message, field.name, self._rng.choice(("", "none", "x" * 900)))
            elif field.type in (field.TYPE_UINT32, field.TYPE_UINT64):
                setattr(message, field.name, self._number() & (0xFFFFFFFF if field.type == field.TYPE_UINT32 else -1))


async def answered(handler: Any, caller: str, messages: Messages) -> grpc.StatusCode:
    """Return the status of a call."""

    async def raw() -> AsyncIterator[bytes]:
        for message in messages:
            yield message

    try:
        if handler.response_streaming:
            async for reply in handler.stream_stream(raw(), Context(caller)):
                handler.response_serializer(reply)
        else:
            handler.response_serializer(await handler.stream_unary(raw(), Context(caller)))
    except grpc.aio.AbortError as refusal:
        return refusal.args[0]  # type: ignore[no-any-return]
    return grpc.StatusCode.OK


@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_calls", [SMALL, pytest.param(LARGE, marks=pytest.mark.slow)])
async def test_nothing_stays_of_any_call_and_none_is_an_error_of_this_daemon(
    callee: Callee, monkeypatch: pytest.MonkeyPatch, num_calls: int
) -> None:
    monkeypatch.setattr(budgets, "MOST_DELAY_S", 0.0)
    roster, errors = await open_round(callee), INTERNAL_ERRORS.count
    rng = random.Random(num_calls)
    calls = Calls(callee, roster, rng)
    callers = [PeerId(f"caller{number}") for number in range(NUM_CALLERS)] + NUM_CALLERS // 3 * [roster.leader]
    by_method: dict[str, Any] = {}
    seen: Counter[tuple[str, grpc.StatusCode]] = Counter()
    for generic in _handlers(callee.servicers):
        for method, _ in calls._kinds:
            by_method[method] = generic.service(SimpleNamespace(method=method, invocation_metadata=())) or by_method.get(method)

    async def called(method: str, messages: Messages) -> grpc.StatusCode:
        caller = rng.choice(callers)
        if caller == roster.leader:  # nearly always banned, otherwise
            callee.door.bans.until_s.pop(caller, None)
        return await answered(by_method[method], caller, messages)

    async def make(number: int) -> None:
        for _ in range(0, number, AT_ONCE):
            if rng.randrange(4):
                callee.door.bans.until_s.clear()
            chosen = [calls.next() for _ in range(AT_ONCE)]
            async with asyncio.timeout(60):
                ended = await asyncio.gather(*(called(method, messages) for method, messages in chosen))
            seen.update(zip((method for method, _ in chosen), ended, strict=True))

    await make(num_calls // 3)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    await make(2 * num_calls // 3)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < MOST_GROWN_BYTES
    assert INTERNAL_ERRORS.count == errors
    assert {status for _, status in seen} >= {grpc.StatusCode.OK, BAD, STATE, BUSY, GONE}
    assert {method for method, status in seen if status is grpc.StatusCode.OK} >= {method for method, _ in calls._kinds} - NEVER_ANSWERED
    assert (callee.door.calls.total, callee.service.queue) == (0, 0)
    shares = (callee.door.calls._all, callee.servicers[1]._arriving, callee.rounds._early._waiting, callee.rounds._joining)
    assert [each.num_callers for each in (*shares, callee.door.put_off)] == [0, 0, 0, 0, 0]
    assert callee.rounds.open is not None, "the round is still there"
    await callee.rounds.close_present("the test is over")
    callee.door.bans.until_s.clear()
