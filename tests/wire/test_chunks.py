"""Chunks written by hand are what protobuf writes, and what protobuf reads is read alike."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.wire.chunks import CALLS, PARTS, REPLIES, SLICES, Chunk, ChunkCoder
from peerd.wire.generated.averaging_pb2 import PartHeader, PartMessage, SliceMessage
from peerd.wire.generated.stage_pb2 import CallMessage, ReplyMessage
from peerd.wire.links import chunks_of
from peerd.wire.values import CHUNK_BYTES

SIZES = st.sampled_from([1, 127, 128, 300, 16383, 16384, 1 << 20])
CODERS = st.sampled_from([(PARTS, PartMessage), (SLICES, SliceMessage), (CALLS, CallMessage), (REPLIES, ReplyMessage)])


@given(CODERS, SIZES, st.integers(0, 255))
def test_a_chunk_is_written_as_protobuf_writes_it_and_read_again(coder: tuple[ChunkCoder, type], size: int, value: int) -> None:
    written, kind = coder
    chunk = bytes([value]) * size
    data = written.serialize(memoryview(chunk))
    assert data == kind(chunk=chunk).SerializeToString()
    read = written.deserialize(data)
    assert isinstance(read, Chunk)
    assert read.chunk == chunk


def test_other_messages_stay_messages() -> None:
    for message in (PartMessage(header=PartHeader(slice=3)), PartMessage(), PartMessage(chunk=b"")):
        assert PARTS.deserialize(PARTS.serialize(message)) == message


@given(st.binary(max_size=40), st.booleans())
def test_no_bytes_are_too_odd_to_be_read(data: bytes, tagged: bool) -> None:
    """Whatever is no chunk alone is read by protobuf, or refused by it."""
    data = (b"\x12" if tagged else b"") + data
    try:
        expected = PartMessage.FromString(data)
    except DecodeError:
        with pytest.raises(DecodeError):
            PARTS.deserialize(data)
        return
    read = PARTS.deserialize(data)
    assert (bytes(read.chunk) == expected.chunk) if isinstance(read, Chunk) else (read == expected)


LENGTHS = st.sampled_from([0, 1, 7, CHUNK_BYTES // 2, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES])


@given(st.lists(LENGTHS, max_size=5), st.integers(0, 4) | st.just((1 << 64) - 1))
@settings(max_examples=40)
def test_however_bytes_lie_in_pieces_their_chunks_are_those_of_the_whole(lengths: list[int], first: int) -> None:
    pieces = [bytes([number + 1]) * length for number, length in enumerate(lengths)]
    whole = b"".join(pieces)
    expected = [whole[start : start + CHUNK_BYTES] for start in range(0, len(whole), CHUNK_BYTES)][first:]
    assert list(chunks_of(pieces, first)) == expected
