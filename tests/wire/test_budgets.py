"""One caller has its own open calls and no others', and a banned one is refused before a message of it is read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from peerd.background import INTERNAL_ERRORS
from peerd.errors import BusyError
from peerd.generated import stage_pb2_grpc, swarm_pb2, swarm_pb2_grpc
from peerd.link.links import as_remote_error
from peerd.swarm.signed import sign_record
from peerd.table.record import PeerId, PeerRecord
from peerd.wire import budgets
from peerd.wire.bans import Bans
from peerd.wire.budgets import FEW_CALLS, MOST_OF_STRANGERS, SMALL_BYTES, Allowance, OpenCalls, allowance_of, most_arriving, most_of_one
from peerd.wire.clients import StageClient
from peerd.wire.grpc_server import _handlers
from peerd.wire.swarm_client import SwarmClient
from tests.wire.callee import BAD, BUSY, GONE, MANIFEST, PATIENCE_S, RUN, Callee, new_identity

WITHIN_S = 100.0
"""Until a test fails that waits for what never comes; however many calls there are, and whatever else the machine does."""
MANY = 1100
"""More than gRPC's server took at once, of all callers together."""


async def channel_of(callee: Callee) -> Any:
    return await callee.links().channel(callee.caller.peer)


async def ending_of(rpc: Any) -> tuple[grpc.StatusCode, str]:
    async with asyncio.timeout(WITHIN_S):
        return await rpc.code(), await rpc.details()


def raw(data: bytes) -> bytes:
    return data


def ban(callee: Callee) -> None:
    callee.door.bans.add(callee.caller.peer, 600.0)


@pytest.mark.parametrize("method", ["/peerd.Swarm/Gossip", "/peerd.Averaging/Propose", "/peerd.State/GetState"])
async def test_a_banned_caller_is_refused_before_its_message_has_come(callee: Callee, method: str) -> None:
    ban(callee)
    rpc = (await channel_of(callee)).stream_stream(method)()
    code, words = await ending_of(rpc)
    assert (code, words) == (BUSY, "the caller sent a broken message; try again later")


async def test_a_banned_callers_message_is_not_even_parsed(callee: Callee, monkeypatch: pytest.MonkeyPatch) -> None:
    ban(callee)
    code, words = await ending_of((await channel_of(callee)).unary_unary("/peerd.Swarm/Gossip", raw, raw)(b"\xff" * 100))
    assert (code, words) == (BUSY, "the caller sent a broken message; try again later")
    assert callee.door.refused == 0


@pytest.mark.parametrize("method", ["/peerd.Swarm/Gossip", "/peerd.State/GetState", "/peerd.Stage/Backpropagate", "/peerd.Swarm/Converse"])
async def test_bytes_that_are_no_message_are_refused_and_are_no_error_of_this_daemon(callee: Callee, method: str) -> None:
    before = INTERNAL_ERRORS.count
    rpc = (await channel_of(callee)).stream_stream(method, raw, raw)()
    await rpc.write(b"\xff" * 100)
    assert await ending_of(rpc) == (BAD, "these bytes are no message")
    assert (callee.door.refused, INTERNAL_ERRORS.count) == (1, before)


@pytest.mark.parametrize("method", ["/peerd.Swarm/Describe", "/peerd.Stage/Cancel", "/peerd.Averaging/Abort", "/peerd.State/GetState"])
async def test_a_message_longer_than_its_kind_can_be_is_refused(callee: Callee, method: str) -> None:
    rpc = (await channel_of(callee)).stream_stream(method, raw, raw)()
    await rpc.write(bytes(SMALL_BYTES + 1))
    code, words = await ending_of(rpc)
    assert (code, words) == (BAD, f"a message of {SMALL_BYTES + 1} bytes, where {SMALL_BYTES} are the most")


async def test_a_call_whose_message_does_not_come_ends_after_the_patience(callee: Callee) -> None:
    callee.door.patience_s = 0.2
    code, words = await ending_of((await channel_of(callee)).stream_stream("/peerd.Swarm/Describe")())
    assert (code, words) == (GONE, f"no message for {0.2 + SMALL_BYTES / 16_000:.1f} s")


async def test_a_caller_with_too_many_calls_hears_when_to_come_back_and_no_other_caller_notices(callee: Callee) -> None:
    channel = await channel_of(callee)
    callee.door.patience_s = WITHIN_S
    open_now = [channel.stream_stream("/peerd.Swarm/Describe")() for _ in range(FEW_CALLS)]
    await until(callee, FEW_CALLS)
    stub, request = swarm_pb2_grpc.SwarmStub(channel), swarm_pb2.DescribeRequest()
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await stub.Describe(request)
    error = as_remote_error(refusal.value)
    assert isinstance(error, BusyError)
    assert error.retry_after_s == budgets.RETRY_S
    assert (callee.door.refused, callee.door.bans.until_s, callee.door.calls.refused) == (0, {}, 1)
    await callee.assert_lives()
    for rpc in open_now:
        rpc.cancel()
    await until(callee, 0)
    await stub.Describe(request)


async def test_the_calls_of_this_peer_are_not_one_callers_to_take(callee: Callee) -> None:
    stub = stage_pb2_grpc.StageStub(await channel_of(callee))
    open_now = [stub.Backpropagate() for _ in range(MANY)]
    most = allowance_of("Backpropagate").most_calls(MANIFEST.slots)
    await eventually(lambda: sum(rpc.done() for rpc in open_now) == MANY - most)  # gRPC itself drops a few
    assert callee.door.calls.total == most
    other = new_identity()
    await SwarmClient(callee.links(other), RUN).describe(other.peer, PATIENCE_S)
    await callee.assert_lives()
    for rpc in open_now:
        rpc.cancel()
    await until(callee, 0)


async def until(callee: Callee, num_open: int) -> None:
    await eventually(lambda: callee.door.calls.total == num_open)


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not holds():  # noqa: ASYNC110 - nobody tells it
            await asyncio.sleep(0.01)


def test_a_caller_may_have_a_call_for_each_microbatch_that_this_peer_holds_and_each_gradient_on_its_way() -> None:
    allowance = allowance_of("Backpropagate")
    for slots in (1, MANIFEST.slots, 4096):
        assert allowance.most_calls(slots) > 2 * slots
    assert Allowance(3).most_calls(4096) == 3


def test_where_too_many_calls_are_open_those_with_few_get_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "MOST_OPEN", 20)
    calls, many, few, hundred = OpenCalls(), PeerId("many"), PeerId("few"), Allowance(100)
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(calls.by(many, "Gossip", hundred, 1))
        for _ in range(10):
            stack.enter_context(calls.by(few, "Gossip", hundred, 1))
        for caller in (many, few):
            with pytest.raises(BusyError, match="too many calls are open here"), calls.by(caller, "Gossip", hundred, 1):
                raise AssertionError
        for number in range(100):
            stack.enter_context(calls.by(PeerId(f"another{number}"), "Gossip", hundred, 1))
    assert (calls.total, calls._all.num_callers) == (0, 0)


async def test_one_caller_has_no_more_calls_for_taking_some_of_each_method(callee: Callee) -> None:
    """gRPC holds some megabytes of each call, whether they are read or not."""
    channel, most = await channel_of(callee), most_of_one(MANIFEST.slots)
    callee.door.patience_s = WITHIN_S  # none of them ends before the last one is refused
    methods = [f"/{service}/{name}" for generic in _handlers(callee.servicers) for service, name in names_of(generic)]
    open_now = [channel.stream_stream(method)() for method in methods for _ in range(most)]
    await eventually(lambda: sum(rpc.done() for rpc in open_now) == len(open_now) - most)
    assert callee.door.calls.total == most
    for rpc in open_now:
        rpc.cancel()
    await until(callee, 0)


def names_of(generic: Any) -> list[tuple[str, str]]:
    found = [name.strip("/").split("/") for name in generic._method_handlers]
    return [(service, name) for service, name in found]


FRESH_KEYS = 50


@pytest.mark.parametrize(
    ("method", "most"),
    [("/peerd.Stage/Backpropagate", most_arriving(MANIFEST.slots)), ("/peerd.Swarm/Gossip", MOST_OF_STRANGERS)],
    ids=["microbatches", "messages"],
)
async def test_fifty_fresh_keys_take_together_what_one_caller_may(callee: Callee, method: str, most: int) -> None:
    """Each opens as many calls as one caller may, and a member finds room beside them."""
    callee.door.is_known = callee.membership.is_known
    channels = [await callee.links(new_identity()).channel(callee.me) for _ in range(FRESH_KEYS)]
    open_now = [channel.stream_stream(method)() for channel in channels for _ in range(FEW_CALLS)]
    await eventually(lambda: sum(rpc.done() for rpc in open_now) == len(open_now) - most)
    assert callee.door.calls.total == most
    assert {await rpc.code() for rpc in open_now if rpc.done()} == {BUSY}
    assert callee.door.calls.refused == len(open_now) - most
    member = new_identity()
    callee.membership.absorb([sign_record(PeerRecord(peer=member.peer, incarnation=1, version=1), member, RUN).raw])
    result = await StageClient(callee.links(member), RUN).backpropagate(
        callee.me, callee.call(), (), PATIENCE_S, lambda _stage, _peer: None
    )
    assert result.gradient is not None
    for rpc in open_now:
        rpc.cancel()
    await until(callee, 0)


async def test_a_caller_is_a_stranger_until_its_record_has_come(callee: Callee) -> None:
    """Calls that it opened before that count as its own from then on."""
    callee.door.is_known = callee.membership.is_known
    one, other = new_identity(), new_identity()
    gossip = "/peerd.Swarm/Gossip"
    most = allowance_of("Gossip").calls
    first = [(await callee.links(one).channel(callee.me)).stream_stream(gossip)() for _ in range(most)]
    second = [(await callee.links(other).channel(callee.me)).stream_stream(gossip)() for _ in range(MOST_OF_STRANGERS - most)]
    await until(callee, MOST_OF_STRANGERS)
    newcomer = SwarmClient(callee.links(), RUN)
    with pytest.raises(BusyError, match="too many calls are open here"):
        await newcomer.describe(callee.me, budgets.RETRY_S / 2)
    asking = asyncio.ensure_future(newcomer.describe(callee.me, WITHIN_S))
    await eventually(lambda: callee.door.calls.refused > 1)
    callee.membership.absorb([sign_record(PeerRecord(peer=one.peer, incarnation=1, version=1), one, RUN).raw])
    await asking
    for rpc in (*first, *second):
        rpc.cancel()
    await until(callee, 0)


def test_bans_that_are_over_are_forgotten() -> None:
    now_s, lasts_s = 0.0, 2.0
    bans = Bans(lambda: now_s)
    for number in range(1000):
        now_s = 0.1 * number
        bans.add(PeerId(f"liar{number % 100}"), lasts_s)
    assert len(bans.until_s) <= lasts_s / 0.1 + 1
    assert list(bans.until_s.values()) == sorted(bans.until_s.values())
    now_s += lasts_s / 2
    assert 0 < len(bans.left()) < len(bans.until_s)
    assert all(0.0 < left_s == bans.left_s(peer) <= lasts_s / 2 for peer, left_s in bans.left().items())
