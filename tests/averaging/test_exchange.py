"""What a member of a round sends is what it has signed, although the sums of others are written over its own part meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import torch

from peerd.averaging.compression import Compression
from peerd.averaging.exchange import Exchange
from peerd.averaging.layout import RoundLayout
from peerd.averaging.slices import Signatures
from peerd.config.codec import parse_averaged
from peerd.errors import BadMessageError, WrongStateError
from peerd.policy.step.roster import Roster, RosterEntry
from peerd.stage.executor import Executor, Priority
from peerd.stage.kept_parts import KeptParts, is_as_signed
from peerd.table.record import PeerId, RunId
from peerd.wire.messages import Frame

PEERS = tuple(PeerId(f"p{number}") for number in range(3))
LENGTH, NUM_CHUNKS = 60, 4


def exchange_of(me: int, codec: str, executor: Executor, kept: KeptParts | None = None) -> Exchange:
    """A round of three. What a peer signs is the text with its name."""
    allowed = parse_averaged(codec)
    compression = Compression(allowed, torch.float64, [(LENGTH - 1,)])
    roster = Roster(0, 0, 0, PEERS[0], tuple(RosterEntry(peer, 0, 0, 0) for peer in PEERS), (), (), NUM_CHUNKS)
    layout = RoundLayout(roster, LENGTH, compression, 3 * [allowed.most_exact])
    own = torch.randn(LENGTH, generator=torch.Generator().manual_seed(me), dtype=torch.float64)
    signatures = Signatures(
        PEERS[me], lambda text: PEERS[me].encode() + text, lambda peer, text, given: given == peer.encode() + text, None, kept
    )
    return Exchange(roster, own, compression, layout, executor, signatures)


async def sum_of(reducer: int, number: int, codec: str, executor: Executor) -> Frame:
    """A chunk of another member's sum, as it arrives."""
    other = exchange_of(reducer, codec, executor)
    for author in range(3):
        for before in range(number + 1 if author != reducer else 0):
            part = await exchange_of(author, codec, executor).frame(reducer, author, before, reducer)
            assert part is not None
            await other.take(part)
    found = await other.frame(reducer, reducer, number, 0)
    assert found is not None
    return found


@pytest.fixture
async def executor() -> AsyncIterator[Executor]:
    executor = Executor("sums")
    yield executor
    executor.close()
    await executor.ended()


@pytest.mark.parametrize("codec", ["none", "int8"])
async def test_a_part_for_a_mate_stays_as_it_was_signed_while_its_sum_is_written_over_it(executor: Executor, codec: str) -> None:
    exchange = exchange_of(0, codec, executor)
    carried = await exchange.frame(1, 0, 0, 1, is_carried=True)
    assert carried is not None
    await exchange.take(await sum_of(1, 0, codec, executor))
    await exchange_of(2, codec, executor).check_signature(carried)


async def test_a_reducer_keeps_the_chunk_of_each_mates_part_that_its_secret_draws_if_its_author_has_signed_it(executor: Executor) -> None:
    kept = KeptParts(RunId("run"), lambda _step: b"secret")
    reducer = exchange_of(0, "none", executor, kept)
    for number in range(NUM_CHUNKS):
        for author in (1, 2):
            frame = await exchange_of(author, "none", executor).frame(0, author, number, 0)
            assert frame is not None
            if not kept.wants(reducer.roster, PEERS[author], number):
                await reducer.take(replace(frame, signature=b"no"))  # nobody looks at it
                continue
            with pytest.raises(BadMessageError, match="not signed"):
                await reducer.take(replace(frame, signature=b"no"))
            await reducer.take(frame)
    parts = kept.of(reducer.roster.average_id)
    assert sorted(part.author for part in parts) == [*PEERS[1:]]
    for part in parts:
        value = kept.find(part.signed(RunId("run")))
        assert is_as_signed(part, value)
        assert not is_as_signed(part, value.with_chunks((b"other",)))
        assert part.why_unsigned(RunId("run"), lambda peer, text, given: given == peer.encode() + text) == ""
    with pytest.raises(WrongStateError, match="not kept"):
        kept.find(b"other")


@pytest.mark.parametrize("codec", ["none", "int8"])
async def test_a_part_is_not_sent_once_its_sum_is_written_although_nobody_has_been_told_yet(executor: Executor, codec: str) -> None:
    """The executor writes the sum between the choice of the chunk and its encoding; the event loop hears of that later."""
    exchange, told = exchange_of(0, codec, executor), await sum_of(1, 0, codec, executor)
    writing = asyncio.ensure_future(exchange.take(told))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert exchange.sums_here[1] == 0
    assert await exchange.frame(1, 0, 0, 1, is_carried=True) is None
    await writing
    assert exchange.sums_here[1] == 1
    later = await exchange.frame(1, 0, 1, 1, is_carried=True)
    assert later is not None
    await exchange_of(2, codec, executor).check_signature(later)


@pytest.mark.parametrize("codec", ["none", "int8"])
async def test_a_part_that_is_encoded_when_its_round_has_ended_is_none(executor: Executor, codec: str) -> None:
    exchange, goes_on = exchange_of(0, codec, executor), threading.Event()
    before = asyncio.ensure_future(executor.run(Priority.CONTROL, goes_on.wait))
    await asyncio.sleep(0)
    asking = asyncio.ensure_future(exchange.frame(1, 0, 0, 1))
    await asyncio.sleep(0)
    exchange.is_over = True
    goes_on.set()
    await before
    assert await asking is None


@pytest.mark.parametrize("codec", ["none", "int8"])
async def test_a_chunk_counts_although_the_call_that_brought_it_ends_while_it_is_added(executor: Executor, codec: str) -> None:
    """Its author hears from the sum that it was added, and sends it no more."""
    exchange, goes_on = exchange_of(0, codec, executor), threading.Event()
    parts = [await exchange_of(author, codec, executor).frame(0, author, 0, 0) for author in (1, 2)]
    before = asyncio.ensure_future(executor.run(Priority.CONTROL, goes_on.wait))
    await asyncio.sleep(0)
    for part in parts:
        assert part is not None
        taking = asyncio.ensure_future(exchange.take(part))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
    goes_on.set()
    await before
    await executor.run(Priority.CONTROL, lambda: None)
    assert exchange.parts_here == [0, 1, 1]
    assert exchange.summed == 1
