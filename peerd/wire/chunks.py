"""Coding of large messages' chunks in protobuf's own encoding, but without protobuf's copies.

A message whose only field is a chunk of bytes is encoded as a tag, the length and the bytes. Coded by hand, this takes one copy on the
way out, straight from the tensor's memory, and none on the way in; protobuf makes three and two. Each message costs as much as copying
many kilobytes, so one chunk may be built from several pieces, and the first chunk may come in the header's message.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from blake3 import blake3

from peerd.errors import BadMessageError, PeerGoneError
from peerd.generated import averaging_pb2, stage_pb2
from peerd.link.links import CHUNK_BYTES, Bytes

_LENGTH_DELIMITED = 2
_MAX_LENGTH_BYTES = 5
LARGE_STATE_BYTES = 4 << 30
"""States up to this size have chunks of 256 KB, larger ones of 1 MB."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A received message that contains only a chunk."""

    chunk: memoryview


Pieces = tuple[Bytes, ...]
"""A chunk whose bytes lie in several pieces of memory."""


@dataclass(frozen=True, slots=True)
class Headed:
    """A message that contains only a header, and the chunk that comes with it."""

    message: Any
    chunk: Bytes


def _tag_of(field: Any) -> int:
    return int(field.number) << 3 | _LENGTH_DELIMITED


class ChunkCoder:
    """Serializer and deserializer of one kind of message. Bytes, a memoryview or a tuple of pieces stand for a message of one chunk."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        fields = kind.DESCRIPTOR.fields_by_name
        self._tag = _tag_of(fields["chunk"])
        self._header_tag = _tag_of(fields["header"]) if "header" in fields else None

    def serialize(self, message: Any) -> bytes:
        match message:
            case bytes() | memoryview():
                return b"".join((bytes((self._tag,)), _varint(len(message)), message))
            case tuple():
                return b"".join((bytes((self._tag,)), _varint(sum(map(len, message))), *message))
            case Headed():
                return bytes(message.message.SerializeToString()) + self.serialize(message.chunk)
            case _:
                return bytes(message.SerializeToString())

    def deserialize(self, data: bytes) -> Any:
        """Return a `Chunk`, a `Headed`, or the parsed message if it is anything else. Raises protobuf's DecodeError for other bytes."""
        if data and data[0] == self._header_tag:
            length, start = _read_varint(data, 1)
            chunk = self._chunk_at(data, start + length) if length else None
            if chunk is not None:
                return Headed(self._kind.FromString(data[: start + length]), chunk)
        chunk = self._chunk_at(data, 0)
        return Chunk(chunk) if chunk is not None else self._kind.FromString(data)

    def _chunk_at(self, data: bytes, start: int) -> memoryview | None:
        """Return the chunk that starts at `start`, if it is one chunk and nothing follows it."""
        if len(data) <= start or data[start] != self._tag:
            return None
        length, begin = _read_varint(data, start + 1)
        return memoryview(data)[begin:] if length and begin + length == len(data) else None


def opening(message: Any, kind: Any, words: str) -> tuple[Any, Bytes]:
    """Return the header of a stream's first message and the bytes that came with it. Raises BadMessageError(words) without a header.

    Without any message it raises PeerGoneError, as `collected` does.
    """
    if message is None:
        raise PeerGoneError("the stream ended before its first message")
    chunk: Bytes = b""
    if isinstance(message, Headed):
        message, chunk = message.message, message.chunk
    if not isinstance(message, kind) or not message.HasField("header"):
        raise BadMessageError(words)
    chunk = chunk or message.chunk
    if len(chunk) > CHUNK_BYTES:
        raise BadMessageError(f"{len(chunk)} bytes in the message of a header, more than a chunk")
    return message.header, chunk


ROUNDS = ChunkCoder(averaging_pb2.ChunkMessage)
CALLS, REPLIES = ChunkCoder(stage_pb2.CallMessage), ChunkCoder(stage_pb2.ReplyMessage)


def _varint(value: int) -> bytes:
    """https://protobuf.dev/programming-guides/encoding/#varints"""
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)


def _read_varint(data: bytes, start: int) -> tuple[int, int]:
    """Return the value and the offset after it; (0, start) where there is no valid one."""
    value = 0
    for place, byte in enumerate(data[start : start + _MAX_LENGTH_BYTES]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, start + place + 1
    return 0, start


def digest_of(chunks: Iterable[Bytes]) -> bytes:
    """Return the BLAKE3 hash of the joined chunks."""
    hasher = blake3()
    for chunk in chunks:
        hasher.update(chunk)
    return hasher.digest()


async def collected(read: Callable[[int], Awaitable[Any]], num_bytes: int, begun: Bytes = b"") -> tuple[Any, ...]:
    """Read chunks of exactly `num_bytes` together, including `begun`. Raises BadMessageError if they do not add up.

    `read` gets the number of bytes that are missing.
    Raises PeerGoneError if the stream ends too early: its sender gave up or was cut off, and no rule is broken.
    """
    chunks: list[Any] = []
    missing = num_bytes
    while missing > 0:
        if begun:
            chunk, begun = begun, b""
        else:
            message = await read(missing)
            if message is None:
                raise PeerGoneError(f"the stream ended {missing} bytes early")
            chunk = message.chunk
        missing -= len(chunk)
        if missing < 0 or not chunk:
            raise BadMessageError("the chunks do not add up to the size in the header")
        chunks.append(chunk)
    return tuple(chunks)


def state_chunk_bytes(num_bytes: int) -> int:
    """The size of the chunks of a stage's state, but for the last: small, so that what is urgent waits for few bytes on a donor's uplink.

    Hashes of all chunks are in one message: 32 bytes each.
    """
    return CHUNK_BYTES // 4 if num_bytes <= LARGE_STATE_BYTES else CHUNK_BYTES


class CutFile:
    """A file in pieces of memory, cut into chunks of which each can be asked for. It can be referred to weakly."""

    is_stored = False
    """Whether its chunks are read from a disk, which takes a while."""

    def __init__(self, pieces: Iterable[Bytes], num_bytes: int | None = None, chunk_bytes: int | None = None) -> None:
        """`num_bytes`: of a file that lies elsewhere (see `_read`). `chunk_bytes`: by default those of a state."""
        self.pieces = tuple(memoryview(piece) for piece in pieces if len(piece))
        self._ends = list(accumulate(map(len, self.pieces)))
        self.num_bytes = num_bytes if num_bytes is not None else self._ends[-1] if self._ends else 0
        self.chunk_bytes = chunk_bytes or state_chunk_bytes(self.num_bytes)

    def __len__(self) -> int:
        """The number of chunks."""
        return -(-self.num_bytes // self.chunk_bytes)

    def chunk(self, number: int) -> bytes:
        """A copy of one chunk (gRPC takes only `bytes`). Raises IndexError if there is no such chunk."""
        if not 0 <= number < len(self):
            raise IndexError(number)
        start = number * self.chunk_bytes
        return self._read(start, min(self.chunk_bytes, self.num_bytes - start))

    def chunks(self) -> Iterator[bytes]:
        """All chunks, each when it is asked for. Raises PeerGoneError if the file can be read no more."""
        for number in range(len(self)):
            try:
                yield self.chunk(number)
            except OSError as error:
                raise PeerGoneError(str(error)) from None

    def _read(self, start: int, num_bytes: int) -> bytes:
        held, missing, place = list[memoryview](), num_bytes, bisect_right(self._ends, start)
        offset = start - (self._ends[place] - len(self.pieces[place]))
        while missing > 0:
            held.append(self.pieces[place][offset : offset + missing])
            missing -= len(held[-1])
            place, offset = place + 1, 0
        return b"".join(held)

    def hashes(self) -> tuple[bytes, ...]:
        """The BLAKE3 hash of each chunk."""
        return tuple(blake3(self.chunk(number)).digest() for number in range(len(self)))
