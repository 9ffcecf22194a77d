"""Hole 75 (slots of sections): who asks for sections and takes none of them keeps nobody else from getting them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from peerd.errors import BusyError, WrongStateError
from peerd.link.links import CHUNK_BYTES
from peerd.link.traffic import Traffic
from peerd.link.uplink import Uplink
from peerd.policy.step.roster import Roster
from peerd.policy.step.sections import SECTIONS_AT_ONCE
from peerd.table.record import Lineage, PeerId
from peerd.wire import deliveries
from peerd.wire.chunks import CutFile
from peerd.wire.clients import AveragingClient
from peerd.wire.door import Door
from peerd.wire.messages import Average
from peerd.wire.services import AveragingServicer
from tests.link.local_peers import Served, serving
from tests.wire.callee import PATIENCE_S, RUN
from tests.wire.lent import whole_of

LIAR, STRANGER, MATE = (PeerId(name) for name in ("liar", "stranger", "mate"))
DATA = bytes(3 * CHUNK_BYTES + 7)


class Sections:
    """Gives sections of an average to the mates of its stage, while it has any."""

    def __init__(self) -> None:
        self.finds = asyncio.Event()
        """Set while it finds at once what is asked for."""
        self.finds.set()
        self.num_asked, self.has_any, self.is_urgent = 0, True, True

    def mates(self) -> list[PeerId]:
        return [LIAR, MATE]

    async def get_average(self, _stage: int, _step: int, _section: int | None) -> tuple[Average, CutFile, bool]:
        self.num_asked += 1
        await self.finds.wait()
        if not self.has_any:
            raise WrongStateError("this peer holds no such section")
        file = CutFile((DATA,), chunk_bytes=CHUNK_BYTES)
        return Average(Roster(1, 2, 0, PeerId("a"), ()), Lineage(), file.num_bytes, chunk_hashes=file.hashes()), file, self.is_urgent


@pytest.fixture
def giver() -> Sections:
    return Sections()


@pytest.fixture
async def served(giver: Any) -> AsyncIterator[Served]:
    async with serving([AveragingServicer(Door(RUN, PATIENCE_S, Traffic()), giver)]) as served:
        yield served


def section(served: Served, caller: PeerId, number: int = 0) -> Any:
    return AveragingClient(served.links_of(caller), RUN).open_average(caller, 1, 2, number, PATIENCE_S)


async def holds(stack: contextlib.AsyncExitStack, served: Served, caller: PeerId) -> None:
    """Ask for a section, and then for nothing of it."""
    await stack.enter_async_context(section(served, caller))


async def gets_at_once(served: Served, caller: PeerId) -> None:
    async with section(served, caller) as opened:
        assert await whole_of(opened) == DATA


async def gets(served: Served, caller: PeerId) -> None:
    """Ask for a section until it comes."""
    while True:
        with contextlib.suppress(BusyError):
            return await gets_at_once(served, caller)
        await asyncio.sleep(0)


async def test_hole_75_sections_that_a_mate_does_not_take_keep_no_other_from_getting_them(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliveries, "LEAST_WAIT_S", 0.05)
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(SECTIONS_AT_ONCE):
            await holds(stack, served, LIAR)
        async with asyncio.timeout(PATIENCE_S / 2):
            await gets(served, MATE)
        with pytest.raises(BusyError, match="gives sections to others"):  # it has as many as a mate may have
            await holds(stack, served, LIAR)


async def test_hole_75_peers_of_other_stages_have_one_section_all_together(served: Served) -> None:
    async with contextlib.AsyncExitStack() as stack:
        await holds(stack, served, STRANGER)
        with pytest.raises(BusyError, match="gives sections to others"):
            await holds(stack, served, PeerId("another"))
        await gets(served, MATE)


async def test_while_the_line_is_in_use_few_sections_are_given(served: Served) -> None:
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(SECTIONS_AT_ONCE):
            await holds(stack, served, LIAR)
        with pytest.raises(BusyError, match="gives sections to others"):
            await holds(stack, served, MATE)


async def test_sections_that_are_still_looked_for_count(giver: Sections, served: Served) -> None:
    giver.finds.clear()
    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(PATIENCE_S / 2):
        begun = [asyncio.ensure_future(holds(stack, served, LIAR)) for _ in range(SECTIONS_AT_ONCE)]
        while giver.num_asked < SECTIONS_AT_ONCE:  # noqa: ASYNC110 - a call that has come sets no event
            await asyncio.sleep(0.01)
        with pytest.raises(BusyError, match="gives sections to others"):
            await holds(stack, served, MATE)
        giver.finds.set()
        await asyncio.gather(*begun)


async def test_a_slot_is_free_again_once_its_section_is_given_or_was_not_found(giver: Sections, served: Served) -> None:
    for _ in range(SECTIONS_AT_ONCE + 1):
        await gets_at_once(served, MATE)
    giver.has_any = False
    for _ in range(SECTIONS_AT_ONCE + 1):
        with pytest.raises(WrongStateError):
            await gets_at_once(served, MATE)
    giver.has_any = True
    await gets_at_once(served, MATE)


async def test_sections_that_a_slow_line_carries_keep_their_slots_though_their_receivers_ask_for_nothing_meanwhile(
    giver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A receiver asks for a chunk when an earlier one has come, and buffers take a few before they leave this machine."""
    monkeypatch.setattr(deliveries, "LEAST_WAIT_S", 0.05)
    traffic = Traffic()
    traffic.uplink = Uplink(lambda: CHUNK_BYTES / 20.0)
    async with serving([AveragingServicer(Door(RUN, PATIENCE_S, traffic), giver)]) as served, contextlib.AsyncExitStack() as stack:
        for giver.is_urgent in (False, True):
            opened = await stack.enter_async_context(section(served, LIAR))
            opened.ask(0)
            await opened.take(CHUNK_BYTES)
        await asyncio.sleep(0.3)
        with pytest.raises(BusyError, match="gives sections to others"):
            await holds(stack, served, MATE)


async def test_hole_75_a_section_whose_chunks_have_left_gives_its_slot_back(giver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deliveries, "LEAST_WAIT_S", 0.05)
    traffic = Traffic()
    traffic.uplink = Uplink(lambda: CHUNK_BYTES * 5.0)
    async with serving([AveragingServicer(Door(RUN, PATIENCE_S, traffic), giver)]) as served, contextlib.AsyncExitStack() as stack:
        for _ in range(SECTIONS_AT_ONCE):
            opened = await stack.enter_async_context(section(served, LIAR))
            opened.ask(0)
            await opened.take(CHUNK_BYTES)
        async with asyncio.timeout(PATIENCE_S / 2):
            await gets(served, MATE)
