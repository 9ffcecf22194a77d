"""A table larger than a message is read page by page, and a peer that sends pages without end is left."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, field

import pytest

from peerd.errors import BadMessageError
from peerd.link.traffic import Traffic
from peerd.policy.step.contributions import StageTally
from peerd.policy.swarm.spreading import MOST_PAGES, PAGE_RECORDS, page
from peerd.table.record import PeerId, RawRecord
from peerd.wire.accounts import AccountsTold, AccountsWanted
from peerd.wire.convert import MAX_RECORDS
from peerd.wire.door import Door
from peerd.wire.messages import Description
from peerd.wire.services import SwarmServicer
from peerd.wire.swarm_client import SwarmClient
from tests.link.local_peers import Served, serving
from tests.wire.callee import DOOR_PATIENCE_S, PATIENCE_S, RUN

CALLER = PeerId("caller")
ROW: RawRecord = (bytes(1024), bytes(64))


@dataclass
class Librarian:
    """Answers as it is told."""

    rows: list[tuple[PeerId, RawRecord]] = field(default_factory=list)
    own: list[RawRecord] = field(default_factory=list)
    is_endless: bool = False
    pages: itertools.count[int] = field(default_factory=itertools.count)

    def gossip(self, caller: PeerId, records: Sequence[RawRecord]) -> Sequence[RawRecord]:
        return self.own

    def table(self, caller: PeerId, after: PeerId) -> tuple[Sequence[RawRecord], PeerId]:
        if self.is_endless:
            return [ROW], PeerId(f"{next(self.pages):09}")
        return page(self.rows, after)

    def news(self, caller: PeerId, known: Collection[bytes]) -> Sequence[RawRecord]:
        return self.own

    async def reaches(self, caller: PeerId, accused: PeerId) -> bool:
        return False

    def describe(self) -> Description:
        return Description((), "", 0.0)

    async def tallies(self) -> Sequence[StageTally]:
        return ()

    async def accounts(self, wanted: AccountsWanted) -> AccountsTold:
        return AccountsTold()


@dataclass
class Read:
    librarian: Librarian
    served: Served

    async def table(self) -> list[tuple[RawRecord, ...]]:
        client = SwarmClient(self.served.links_of(CALLER), RUN)
        return [found async for found in client.table(CALLER, PATIENCE_S)]


@pytest.fixture
async def read() -> AsyncIterator[Read]:
    librarian = Librarian()
    async with serving([SwarmServicer(Door(RUN, DOOR_PATIENCE_S, Traffic()), librarian, librarian)]) as served:
        yield Read(librarian, served)


async def test_a_table_of_many_messages_is_read_whole(read: Read) -> None:
    read.librarian.rows = [(PeerId(f"p{number:05}"), (number.to_bytes(2, "big") + ROW[0], ROW[1])) for number in range(6000)]
    pages = await read.table()
    assert [raw for each in pages for raw in each] == [raw for _peer, raw in read.librarian.rows]
    assert max(map(len, pages)) <= PAGE_RECORDS


async def test_pages_without_end_are_left(read: Read) -> None:
    read.librarian.is_endless = True
    assert len(await read.table()) == MOST_PAGES


async def test_an_answer_with_more_records_than_were_asked_for_is_refused(read: Read) -> None:
    read.librarian.own = [ROW] * (MAX_RECORDS + 1)
    client = SwarmClient(read.served.links_of(CALLER), RUN)
    for answer in (client.tell(CALLER, [], PATIENCE_S), client.gossip(CALLER, [], PATIENCE_S), client.ask_for_news(CALLER, [], PATIENCE_S)):
        with pytest.raises(BadMessageError, match="65 records"):
            await answer
