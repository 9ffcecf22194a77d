"""Chunks of large messages between memory and the wire, in protobuf's own encoding but without protobuf's copies.

A message whose only field is a chunk of bytes is one tag, the length and the bytes. Written and read by hand that costs one copy
on the way out, straight from the tensor's memory, and none on the way in; protobuf makes three and two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from peerd.wire.generated import averaging_pb2, stage_pb2

_LENGTH_DELIMITED = 2
_MAX_LENGTH_BYTES = 5


@dataclass(frozen=True, slots=True)
class Chunk:
    """What came in place of a message that holds just that."""

    chunk: memoryview


class ChunkCoder:
    """Serializer and deserializer of one kind of message: bytes, or a view of some, stand for a message of that chunk alone."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._tag = kind.DESCRIPTOR.fields_by_name["chunk"].number << 3 | _LENGTH_DELIMITED

    def serialize(self, message: Any) -> bytes:
        if not isinstance(message, bytes | memoryview):
            return bytes(message.SerializeToString())
        return b"".join((bytes((self._tag,)), _varint(len(message)), message))

    def deserialize(self, data: bytes) -> Any:
        """A Chunk, or the message, if it is anything else. Raises what protobuf raises where it is neither."""
        if data and data[0] == self._tag:
            length, start = _read_varint(data, 1)
            if length and start + length == len(data):
                return Chunk(memoryview(data)[start:])
        return self._kind.FromString(data)


PARTS, SLICES = ChunkCoder(averaging_pb2.PartMessage), ChunkCoder(averaging_pb2.SliceMessage)
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
    """The value and where it ends; 0 where there is none."""
    value = 0
    for place, byte in enumerate(data[start : start + _MAX_LENGTH_BYTES]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, start + place + 1
    return 0, start
