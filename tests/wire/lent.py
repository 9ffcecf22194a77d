"""A snapshot that a donor lends, from its first chunk to the last."""

from __future__ import annotations

from peerd.wire.chunks import state_chunk_bytes
from peerd.wire.deliveries import Lending
from peerd.wire.messages import Snapshot
from peerd.wire.state_client import OpenSnapshot


async def whole_of(opened: OpenSnapshot) -> bytes:
    """All that an open snapshot has, as a joiner gets it."""
    header, data = opened.header, b""
    size = state_chunk_bytes(header.num_bytes)
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
