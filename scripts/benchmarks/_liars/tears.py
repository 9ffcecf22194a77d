"""Joins each round, and breaks off each chunk before its last byte: nothing of it ever arrives whole."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from peerd.daemon.peer import Peer
from peerd.generated import averaging_pb2
from peerd.link.links import CHUNK_BYTES
from peerd.wire import convert
from peerd.wire.messages import Frame
from scripts.benchmarks._liars import _speech


async def lie(_peer: Peer, _arguments: Mapping[str, Any]) -> None:
    _speech.give(_torn)


async def _torn(frame: Frame) -> AsyncIterator[averaging_pb2.ChunkMessage]:
    most = b"".join(frame.chunks)[:-1]
    yield averaging_pb2.ChunkMessage(header=convert.frame_to(frame), chunk=most[:CHUNK_BYTES])
    for start in range(CHUNK_BYTES, len(most), CHUNK_BYTES):
        yield averaging_pb2.ChunkMessage(chunk=most[start : start + CHUNK_BYTES])
