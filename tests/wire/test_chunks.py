"""Chunks written by hand are what protobuf writes, and what protobuf reads is read alike."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.errors import BadMessageError
from peerd.generated.averaging_pb2 import ChunkHeader, ChunkMessage
from peerd.generated.stage_pb2 import CallMessage, ReplyMessage
from peerd.link.links import CHUNK_BYTES, MAX_MESSAGE_BYTES
from peerd.wire.chunks import CALLS, REPLIES, ROUNDS, Chunk, ChunkCoder, CutFile, Headed, opening, state_chunk_bytes
from peerd.wire.convert import grouped

SIZES = st.sampled_from([1, 127, 128, 300, 16383, 16384, 1 << 20])
CODERS = st.sampled_from([(ROUNDS, ChunkMessage), (CALLS, CallMessage), (REPLIES, ReplyMessage)])


@given(CODERS, SIZES, st.integers(0, 255))
def test_a_chunk_is_written_as_protobuf_writes_it_and_read_again(coder: tuple[ChunkCoder, type], size: int, value: int) -> None:
    written, kind = coder
    chunk = bytes([value]) * size
    data = written.serialize(memoryview(chunk))
    assert data == kind(chunk=chunk).SerializeToString()
    read = written.deserialize(data)
    assert isinstance(read, Chunk)
    assert read.chunk == chunk


@given(st.lists(SIZES, min_size=1, max_size=3))
@settings(max_examples=20)
def test_pieces_are_one_chunk(sizes: list[int]) -> None:
    pieces = tuple(bytes([number]) * size for number, size in enumerate(sizes))
    assert CALLS.serialize(pieces) == CallMessage(chunk=b"".join(pieces)).SerializeToString()


@given(st.sampled_from([(ROUNDS, ChunkMessage), (CALLS, CallMessage)]), st.just(0) | SIZES, st.integers(0, 3))
@settings(max_examples=40)
def test_a_header_and_the_chunk_that_comes_with_it(coder: tuple[ChunkCoder, type], size: int, number: int) -> None:
    written, kind = coder
    header, chunk = kind().header, bytes([number]) * size
    if kind is ChunkMessage:
        header.slice = number
    else:
        header.attempt = number
    data = written.serialize(Headed(kind(header=header), chunk))
    assert data == kind(header=header, chunk=chunk).SerializeToString() or not size
    read, begun = opening(written.deserialize(data), kind, "")
    assert (read, bytes(begun)) == (header, chunk)


def test_a_stream_that_begins_without_a_header_is_refused() -> None:
    of_another = CallMessage(header=CallMessage().header)
    for message in (ChunkMessage(chunk=b"x"), ChunkMessage(), of_another, ROUNDS.deserialize(b"\x12\x01x")):
        with pytest.raises(BadMessageError, match="no header"):
            opening(message, ChunkMessage, "no header")


def test_pieces_are_grouped_up_to_a_chunk() -> None:
    sizes = [CHUNK_BYTES, 5, CHUNK_BYTES - 5, 1, CHUNK_BYTES]
    groups = list(grouped(bytes(size) for size in sizes))
    assert [[len(piece) for piece in group] for group in groups] == [[CHUNK_BYTES], [5, CHUNK_BYTES - 5], [1], [CHUNK_BYTES]]


def test_other_messages_stay_messages() -> None:
    for message in (ChunkMessage(header=ChunkHeader(slice=3)), ChunkMessage(), ChunkMessage(chunk=b"")):
        assert ROUNDS.deserialize(ROUNDS.serialize(message)) == message


@given(st.binary(max_size=40), st.sampled_from([b"", b"\x12", b"\x0a\x00\x12", b"\x0a\x02\x10\x03\x12", b"\x0a"]))
def test_no_bytes_are_too_odd_to_be_read(data: bytes, tagged: bytes) -> None:
    """Whatever is no chunk, alone or after a header, is read by protobuf, or refused by it."""
    data = (tagged + data) if tagged else data
    try:
        expected = ChunkMessage.FromString(data)
    except DecodeError:
        with pytest.raises(DecodeError):
            ROUNDS.deserialize(data)
        return
    read = ROUNDS.deserialize(data)
    if isinstance(read, Headed):
        assert (read.message, bytes(read.chunk)) == (ChunkMessage(header=expected.header), expected.chunk)
    else:
        assert (bytes(read.chunk) == expected.chunk) if isinstance(read, Chunk) else (read == expected)


SIZE = state_chunk_bytes(0)
LENGTHS = st.sampled_from([0, 1, 7, SIZE // 2, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE])


@given(st.lists(LENGTHS, max_size=5))
@settings(max_examples=40)
def test_however_bytes_lie_in_pieces_their_chunks_are_those_of_the_whole(lengths: list[int]) -> None:
    pieces = [bytes([number + 1]) * length for number, length in enumerate(lengths)]
    whole, file = b"".join(pieces), CutFile(pieces)
    expected = [whole[start : start + SIZE] for start in range(0, len(whole), SIZE)]
    assert (len(file), file.num_bytes) == (len(expected), len(whole))
    for number in reversed(range(len(file))):
        assert file.chunk(number) == expected[number]
    for number in (-1, len(file), 1 << 64):
        with pytest.raises(IndexError):
            file.chunk(number)


def test_the_hashes_of_a_state_of_any_size_are_one_message() -> None:
    for num_bytes in (1 << 30, 4 << 30, (4 << 30) + 1, 96 << 30):
        assert 32 * -(-num_bytes // state_chunk_bytes(num_bytes)) < MAX_MESSAGE_BYTES
