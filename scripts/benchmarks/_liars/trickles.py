"""Joins each round, and sends a byte of its first chunk to each member every second."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from peerd.daemon.peer import Peer
from peerd.generated import averaging_pb2
from peerd.wire import convert
from peerd.wire.messages import Frame
from scripts.benchmarks._liars import _speech

EVERY_S = 1.0


async def lie(_peer: Peer, _arguments: Mapping[str, Any]) -> None:
    _speech.give(_trickle)


async def _trickle(frame: Frame) -> AsyncIterator[averaging_pb2.ChunkMessage]:
    whole = b"".join(frame.chunks)
    yield averaging_pb2.ChunkMessage(header=convert.frame_to(frame), chunk=whole[:1])
    for byte in whole[1:]:
        await asyncio.sleep(EVERY_S)
        yield averaging_pb2.ChunkMessage(chunk=bytes([byte]))
