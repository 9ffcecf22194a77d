"""The chunks of one snapshot that have come so far. Chunks of two snapshots are never mixed (hole 10)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from blake3 import blake3

from peerd.errors import BadMessageError
from peerd.policy.route.chunk_shares import ChunkShares
from peerd.stage.history import history_from
from peerd.stage.snapshots import Downloaded, identity_of
from peerd.stage.spool import Landing, Spools
from peerd.table.record import Lineage
from peerd.wire.chunks import state_chunk_bytes
from peerd.wire.messages import Snapshot, StateRequest

_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, RuntimeError, OverflowError, RecursionError)


@dataclass(slots=True)
class PartialState:
    stage: int
    most_bytes: int
    tied_only: bool = False
    of_previous: bool = False
    """Only the previous parameters are downloaded; otherwise all but these."""
    begun: Callable[[Snapshot], object] | None = None
    """Is told the header of the snapshot that is downloaded, as soon as it is chosen."""
    header: Snapshot | None = None
    """Of the snapshot that is downloaded; None while the donors' offers are compared."""
    spools: Spools = field(default_factory=Spools)
    landing: Landing = field(default_factory=lambda: Landing(0, Spools()))
    """The bytes that are downloaded; their chunks come in any order."""
    shares: ChunkShares = field(default_factory=lambda: ChunkShares(0))
    bytes_done: int = 0
    _first: int = 0
    """The number of the first chunk that has any of these bytes."""
    _start: int = 0
    """Where in the snapshot they begin."""
    _num_bytes: int = 0
    """Of the whole snapshot, and of each chunk but its last."""
    _chunk_bytes: int = 1

    @property
    def request(self) -> StateRequest:
        if self.header is None:
            return StateRequest(stage=self.stage, tied_only=self.tied_only)
        named = identity_of(self.header.chunk_hashes)
        return StateRequest(stage=self.stage, snapshot=named, step=self.header.step, tied_only=self.tied_only)

    @property
    def is_complete(self) -> bool:
        return self.header is not None and not self.shares.num_left

    def claim_of(self, header: Snapshot) -> tuple[tuple[bytes, ...], int, int, Lineage]:
        """What donors of one snapshot say alike of it."""
        return header.chunk_hashes, header.previous_bytes, header.step, header.lineage

    def newness_of(self, header: Snapshot) -> int:
        return header.step

    def check(self, header: Snapshot) -> None:
        """Raise BadMessageError if this cannot be the header of such a state. A long history takes a while: call it off the event loop."""
        chunks = len(header.chunk_hashes)
        if header.num_bytes > self.most_bytes or chunks != -(-header.num_bytes // state_chunk_bytes(header.num_bytes)):
            raise BadMessageError(f"a state of {header.num_bytes} bytes in {chunks} chunks; at most {self.most_bytes} bytes are allowed")
        if header.previous_bytes > header.num_bytes:
            raise BadMessageError("a state with more bytes of previous parameters than it has")
        try:
            history = history_from(header.metadata)
        except _UNREADABLE as error:
            raise BadMessageError(f"the state's history is not readable: {error}") from None
        if not all(math.isfinite(entry.loss) for entry in history):
            raise BadMessageError("the state's history has a loss that is not finite")

    def begin(self, header: Snapshot) -> None:
        """Download this snapshot, whose header was checked."""
        self.header = header
        split = header.num_bytes - header.previous_bytes
        self._start, end = (split, header.num_bytes) if self.of_previous else (0, split)
        self.landing = Landing(end - self._start, self.spools)
        self._num_bytes, self._chunk_bytes = header.num_bytes, (size := state_chunk_bytes(header.num_bytes))
        self._first = self._start // size
        self.shares = ChunkShares(-(-end // size) - self._first if self.landing.num_bytes else 0)
        self.bytes_done = 0
        if self.begun is not None:
            self.begun(header)

    def start_over(self) -> None:
        """Nothing of this snapshot is kept."""
        self.header = None
        self.landing = Landing(0, self.spools)
        self.shares = ChunkShares(0)
        self.bytes_done = 0

    def number_of(self, share: int) -> int:
        """The number in the snapshot of a chunk of the shares."""
        return self._first + share

    def size_of(self, number: int) -> int:
        """Bytes of a chunk, by its number in the snapshot."""
        return min(self._chunk_bytes, self._num_bytes - number * self._chunk_bytes)

    async def write(self, number: int, chunk: bytes) -> bool:
        """Check a chunk of this snapshot and write it, on another thread. Returns whether it was sound. Raises OSError.

        Chunks at the ends may have bytes that are not downloaded.
        """
        wanted = self.header.chunk_hashes[number] if self.header is not None else b""
        landing, (ours, start) = self.landing, self._ours(number, chunk)

        def write() -> bool:
            is_sound = blake3(chunk).digest() == wanted
            if is_sound:
                landing.write(start, ours)
            return is_sound

        return await asyncio.to_thread(write)

    def _ours(self, number: int, chunk: bytes) -> tuple[memoryview, int]:
        """Those bytes of a chunk that are downloaded, and where they belong."""
        start = number * self._chunk_bytes - self._start
        return memoryview(chunk)[max(0, -start) : self.landing.num_bytes - start], max(0, start)

    def came(self, number: int, chunk: bytes) -> None:
        """A sound chunk of this snapshot is written. One that came before is ignored."""
        if self.shares.is_due(number - self._first):
            self.bytes_done += len(self._ours(number, chunk)[0])
            self.shares.came(number - self._first)

    def whole(self, header: Snapshot) -> Downloaded:
        """The complete state of this header. Raises BadMessageError if it is invalid. safetensors holds data only: nothing is executed."""
        try:
            tensors = self.landing.tensors() if self.landing.num_bytes else {}
        except (OSError, *_UNREADABLE) as error:
            raise BadMessageError(f"the state is not readable: {error}") from None
        return Downloaded(header.step, header.lineage, tensors, history_from(header.metadata))
