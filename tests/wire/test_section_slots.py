"""Hole 75 (slots of sections): who asks for sections and takes none of them keeps nobody else from getting them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from peerd.errors import BusyError
from peerd.link.links import CHUNK_BYTES
from peerd.link.traffic import Traffic
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
    """Gives sections of an average to the mates of its stage."""

    def mates(self) -> list[PeerId]:
        return [LIAR, MATE]

    async def get_average(self, _stage: int, _step: int, _section: int | None) -> tuple[Average, CutFile, bool]:
        file = CutFile((DATA,), chunk_bytes=CHUNK_BYTES)
        return Average(Roster(1, 2, 0, PeerId("a"), ()), Lineage(), file.num_bytes, chunk_hashes=file.hashes()), file, True


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    giver: Any = Sections()
    async with serving([AveragingServicer(Door(RUN, PATIENCE_S, Traffic()), giver)]) as served:
        yield served


def section(served: Served, caller: PeerId, number: int = 0) -> Any:
    return AveragingClient(served.links_of(caller), RUN).open_average(caller, 1, 2, number, PATIENCE_S)


async def holds(stack: contextlib.AsyncExitStack, served: Served, caller: PeerId) -> None:
    """Ask for a section, and then for nothing of it."""
    await stack.enter_async_context(section(served, caller))


async def gets(served: Served, caller: PeerId) -> None:
    """Ask for a section until it comes."""
    while True:
        with contextlib.suppress(BusyError):
            async with section(served, caller) as opened:
                assert await whole_of(opened) == DATA
                return
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
    """Those that have just begun count, also before their first chunk is asked for."""
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(SECTIONS_AT_ONCE):
            await holds(stack, served, LIAR)
        with pytest.raises(BusyError, match="gives sections to others"):
            await holds(stack, served, MATE)
