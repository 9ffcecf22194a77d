"""Reads microbatches ahead: at the start of a step all peers wait for the first ones."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from peerd.background import start
from peerd.errors import PeerdError
from peerd.train.samples import Microbatches
from peerd.wire.messages import TensorBytes
from peerd.wire.tensors import encode_microbatch

MOST_PREPARED = 16

Key = tuple[int, int]
"""Step and index of a microbatch."""
Sample = tuple[TensorBytes, TensorBytes]
"""Inputs and labels of a microbatch, encoded for the wire."""


class Prefetcher:
    def __init__(self, corpus: Microbatches) -> None:
        self._corpus = corpus
        self._held: dict[Key, Sample] = {}
        self._reading: asyncio.Task[None] | None = None

    def read_ahead(self, keys: Sequence[Key]) -> None:
        """Replace what is held by the first few of these; does nothing while a reading is under way."""
        if self._reading is None or self._reading.done():
            self._reading = start(self._read_all(keys[:MOST_PREPARED]))

    async def take(self, step: int, index: int) -> Sample:
        """The microbatch, read now unless it was read ahead."""
        held = self._held.pop((step, index), None)
        return held if held is not None else await asyncio.to_thread(self._read, (step, index))

    def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()

    async def _read_all(self, keys: Sequence[Key]) -> None:
        with contextlib.suppress(PeerdError, OSError):  # `take` reads it again and raises the error
            self._held = await asyncio.to_thread(lambda: {key: self._read(key) for key in keys})

    def _read(self, key: Key) -> Sample:
        return encode_microbatch(*self._corpus.microbatch(*key))
