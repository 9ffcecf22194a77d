"""The chunks of an average, or of a section of one, that have come so far from mates."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from blake3 import blake3

from peerd.averaging.compression import Compression
from peerd.averaging.handover import check_header, why_unproven_average
from peerd.averaging.slices import Signatures
from peerd.errors import BadMessageError
from peerd.link.links import CHUNK_BYTES
from peerd.policy.route.chunk_shares import ChunkShares
from peerd.policy.step.roster import Roster
from peerd.stage.blocks import memory
from peerd.stage.state import StageState
from peerd.table.record import AverageId
from peerd.wire.messages import Average

Believe = Callable[[Roster, AverageId], None]
"""Raises RemoteError for an average that this peer does not believe, by its header. It is called on another thread."""


def believed(_roster: Roster, _id: AverageId) -> None: ...


class PartialAverage:
    """It takes memory as the chunks come, and lies in one piece."""

    def __init__(
        self,
        state: StageState,
        signatures: Signatures,
        compression: Compression,
        step: int,
        section: int | None = None,
        believe: Believe = believed,
    ) -> None:
        """`section`: only that one of the average is wanted."""
        self._state = state
        self._signatures = signatures
        self._compression = compression
        self.step = step
        self._section = section
        self._believe = believe
        self.header: Average | None = None
        self.shares = ChunkShares(0)
        self.whole = memoryview(b"")

    @property
    def is_complete(self) -> bool:
        return self.header is not None and not self.shares.num_left

    def check(self, header: Average) -> None:
        """Raise RemoteError unless this is the header of such an average, which this peer may take. Nothing was read of it yet."""
        check_header(header, self._state, self.step, self._section, self._compression)
        if reason := why_unproven_average(header, self._section, self._state, self._signatures):
            raise BadMessageError(f"the average is refused: {reason}")
        self._believe(header.roster, header.id)

    def begin(self, header: Average) -> None:
        self.header = header
        self.whole = memory(header.num_bytes)
        self.shares = ChunkShares(len(header.chunk_hashes))

    def claim_of(self, header: Average) -> Hashable:
        return header.id, header.lineage, header.tied_sum, header.norm, header.chunk_hashes

    def newness_of(self, _header: Average) -> int:
        """All are of one step."""
        return 0

    def number_of(self, share: int) -> int:
        return share

    def size_of(self, number: int) -> int:
        return min(CHUNK_BYTES, len(self.whole) - number * CHUNK_BYTES)

    async def write(self, number: int, chunk: bytes) -> bool:
        """It takes less than a millisecond, and on a busy machine less than another thread would take to wake."""
        wanted = self.header.chunk_hashes[number] if self.header is not None else b""
        is_sound = blake3(chunk).digest() == wanted
        if is_sound:
            start = number * CHUNK_BYTES
            self.whole[start : start + len(chunk)] = chunk
        return is_sound

    def came(self, number: int, _chunk: bytes) -> None:
        self.shares.came(number)
