"""A file that a peer lends, from its first chunk to the last."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

from peerd.link.links import CHUNK_BYTES
from peerd.wire.chunk_streams import Offer
from peerd.wire.chunks import state_chunk_bytes
from peerd.wire.deliveries import Lending
from peerd.wire.messages import Average, Snapshot

Header = TypeVar("Header")


class Lent(Generic[Header]):
    """A stream of lent chunks, without a wire."""

    def __init__(self, header: Header, lending: Lending) -> None:
        self.header = header
        self._lending = lending
        self._asked: list[int] = []

    def ask(self, number: int) -> None:
        self._asked.append(number)

    async def take(self, _num_bytes: int) -> bytes:
        await asyncio.sleep(0)  # others get theirs meanwhile
        return self._lending.chunk(self._asked.pop(0))

    async def end(self) -> None:
        self._lending.is_whole = True


async def whole_of(opened: Offer[Snapshot] | Offer[Average]) -> bytes:
    """All that an open file has, as a joiner gets it."""
    header, data = opened.header, b""
    size = CHUNK_BYTES if isinstance(header, Average) else state_chunk_bytes(header.num_bytes)
    for number in range(len(header.chunk_hashes)):
        opened.ask(number)
        data += await opened.take(min(size, header.num_bytes - len(data)))
    await opened.end()
    return data


def files_of(header: Snapshot, data: bytes) -> tuple[bytes, bytes]:
    """The files in a snapshot: the state, and the previous parameters; empty if there are none."""
    split = len(data) - header.previous_bytes
    return data[:split], data[split:]


def sent(header: Snapshot, lending: Lending) -> list[bytes]:
    """All chunks of a snapshot, sent to a joiner that then has enough."""
    with lending:
        chunks = [lending.chunk(number) for number in range(len(header.chunk_hashes))]
        lending.is_whole = True
    return chunks
