"""The data of one round at one member: which chunks of parts and sums are here, and their arithmetic.

Members are numbered by their places in the roster. A part is added as soon as every member's part of that chunk is there, so a reducer
keeps no more than a window of chunks of each. Sums are written over this member's own part of the same elements: the reducer has that
part by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from blake3 import blake3
from torch import Tensor

from peerd.averaging.compression import Compression
from peerd.averaging.layout import RoundLayout
from peerd.averaging.slice_norms import SliceNorms
from peerd.averaging.slices import RoundSlices, Signatures
from peerd.background import start
from peerd.errors import BadMessageError, RemoteError, WrongStateError
from peerd.link.links import Bytes
from peerd.policy.round.chunks import part_limit
from peerd.policy.step.parts import chunk_text
from peerd.policy.step.roster import Roster
from peerd.stage.executor import Executor, Priority
from peerd.table.record import PeerId
from peerd.wire.messages import Frame
from peerd.wire.tensors import views_of_flat

Encoded = tuple[Bytes, ...]


class Exchange:
    """`accumulator` is this round's own copy. In the end it is the average."""

    def __init__(
        self,
        roster: Roster,
        accumulator: Tensor,
        compression: Compression,
        layout: RoundLayout,
        executor: Executor,
        signatures: Signatures,
        norms: SliceNorms | None = None,
        leave_out: Callable[[PeerId], None] = lambda _peer: None,
    ) -> None:
        """`leave_out` hears of a member whose part or sum is too large by `norms` (rule 22, size), and ends the round."""
        self.roster = roster
        self.me = roster.peers.index(signatures.me)
        self.accumulator = accumulator
        self.layout = layout
        self._compression = compression
        self._executor = executor
        self._signatures = signatures
        self.slices = RoundSlices(roster, signatures)
        self.parts_here = [0] * layout.num_members
        """By author: chunks of its part of this member's slice that have arrived."""
        self.sums_here = [0] * layout.num_members
        """By reducer: chunks of its sum that are here."""
        self.is_over = False
        """Set when nobody needs the round any more. Its tensors go then."""
        self.done = asyncio.Event()
        """Set once every sum is here."""
        self._parts: dict[int, dict[int, Tensor]] = {}
        """By chunk and author, parts of this member's slice that wait for others. Used by the thread that computes."""
        self._num_added = 0
        self._sums: list[Encoded] = []
        """The sums of this member's slice as they are sent; kept until the round is dead."""
        self._signed: dict[tuple[int, int, int], bytes] = {}
        """By slice, author and chunk, the signatures of what may be sent on: this member's chunks, and the sums of others."""
        self._received: dict[tuple[int, int], Encoded] = {}
        """By slice and chunk, the sums of others as they came, where they cannot be had from the accumulator: mates may need them."""
        self._encoded: dict[tuple[int, int], Encoded] = {}
        """By slice and chunk, parts as they are sent, until their sum is here: a chunk that is sent again is the same bytes."""
        self._leave_out = leave_out
        self.norms = norms
        self._too_large: int | None = None
        """The member whose part, or whose sum, is too large, by its place."""
        self._has_told = False
        self._written = [0] * layout.num_members
        """By reducer: chunks of its sum that stand in the accumulator. Used by the thread that computes, which is ahead of `sums_here`."""

    def forget(self) -> None:
        """Drop all tensors: the objects of a round refer to each other, and the interpreter may find that after many rounds.

        Run by the executor, after `is_over` is set and what was asked of it before.
        """
        self.accumulator = self.accumulator.new_empty(0)
        self._parts, self._sums, self._encoded, self._received = {}, [], {}, {}

    def _check_open(self) -> None:
        if self.is_over:
            raise WrongStateError("this round is closed")

    @property
    def _is_signed(self) -> bool:
        """Whether chunks are signed: a mate could carry them, or keeps some for audits."""
        return self.layout.num_members > 2 or self._signatures.parts is not None

    @property
    def summed(self) -> int:
        """Chunks of this member's slice that are summed."""
        return self.sums_here[self.me]

    @property
    def is_done(self) -> bool:
        return all(here >= self.layout.chunks_of(k) for k, here in enumerate(self.sums_here))

    def _look_whether_done(self) -> None:
        if self.is_done:
            self.done.set()

    async def begin(self) -> None:
        """Sum what takes nobody else: everything, where this member is alone."""
        if self.layout.num_members == 1:
            self.sums_here[0] = await self._executor.run(Priority.CONTROL, self._sum_alone)
        self._look_whether_done()

    def _sum_alone(self) -> int:
        compression, average_id = self._compression, self.roster.average_id
        for number in range(self.layout.num_chunks):
            where = self.layout.piece(0, number, 0)
            place = self.accumulator[where.start : where.end]
            for residual in (compression.parts,) if self._keeps_encoded else (compression.parts, compression.sums):
                whole = compression.kept(residual, average_id, where, place)
                if whole is not place:
                    place.copy_(whole)
            if self._keeps_encoded:
                self._encode_sum(number)
            else:
                self._note_slice(0, number)
        return self.layout.num_chunks

    @property
    def _keeps_encoded(self) -> bool:
        """Whether mates that were in other rounds get this sum as it was sent."""
        return self._compression.allowed.is_lossy and self.roster.num_sections > 1

    @property
    def encoded(self) -> Encoded:
        """Where the round made a section in a codec: all sums as they were sent, by slice and chunk. Once `is_done`; otherwise nothing."""
        if not (self._keeps_encoded and self.is_done):
            return ()
        places = ((k, number) for k in range(self.layout.num_members) for number in range(self.layout.chunks_of(k)))
        return tuple(piece for place in places for piece in self._sum_chunk(*place))

    def count(self, frame: Frame, direction: str) -> None:
        """Count the bytes of a chunk that was sent or received."""
        self._compression.count(self.layout.codecs[frame.author], direction, frame.num_bytes)

    # What this member sends

    async def frame(self, slice_number: int, author: int, number: int, to: int, is_carried: bool = False) -> Frame | None:
        """Return a chunk of this member's part, of its sum, or of another's sum that is here.

        None for a part whose sum stands in its place. A part for a mate is a copy: its sum may be written over it while the chunk waits to
        be sent, and the mate checks the signature. Raises WrongStateError if the round is over.
        """
        self._check_open()
        bare = Frame(slice_number, author, number, to)
        if bare.is_sum:
            signature = self.slices.signature_of(slice_number) if self._is_last(slice_number, number) else b""
            frame = replace(bare, chunks=self._sum_chunk(slice_number, number), slice_signature=signature)
            if not self._is_signed or (slice_number, author, number) in self._signed:
                return self._with_signature(frame)
            return await self._executor.run(Priority.CONTROL, lambda: self._with_signature(frame))
        if not self._is_signed and not self._compression.allowed.is_lossy:
            return replace(bare, chunks=self._part_for(slice_number, number))
        return await self._executor.run(Priority.CONTROL, lambda: self._part_frame(bare, is_carried))

    def _sum_chunk(self, slice_number: int, number: int) -> Encoded:
        if slice_number == self.me:
            return self._sums[number]
        if self._compression.allowed.is_lossy:
            return self._received[slice_number, number]
        where = self.layout.piece(slice_number, number, slice_number)
        return views_of_flat(self.accumulator[where.start : where.end])

    def _part_frame(self, bare: Frame, is_carried: bool) -> Frame | None:
        """Fill in a chunk of this member's part, as it is sent. Run by the executor, as are the writes of sums.

        None also where the round has ended meanwhile: its tensors may be gone.
        """
        if self.is_over or bare.number < self._written[bare.slice]:
            return None
        chunks = self._encoded.get((bare.slice, bare.number))
        if chunks is None:
            chunks = self._part_for(bare.slice, bare.number)
        if self._compression.allowed.is_lossy:
            self._encoded[bare.slice, bare.number] = chunks
        elif is_carried:
            chunks = tuple(bytes(chunk) for chunk in chunks)
        return self._with_signature(replace(bare, chunks=chunks))

    def _with_signature(self, frame: Frame) -> Frame:
        """Add its author's signature to a chunk, where others need it."""
        if not self._is_signed:
            return frame
        place = frame.slice, frame.author, frame.number
        if place not in self._signed:
            self._signed[place] = self._signatures.sign(self._text_of(frame))
        return replace(frame, signature=self._signed[place])

    def _text_of(self, frame: Frame) -> bytes:
        """What the author of a chunk signs."""
        hasher = blake3()
        for chunk in frame.chunks:
            hasher.update(chunk)
        return chunk_text(self.roster.average_id, (frame.slice, frame.author, frame.number), hasher.digest(), frame.slice_signature)

    async def check_signature(self, frame: Frame) -> None:
        """Raises BadMessageError if a chunk that a mate carried is not as its author signed it."""
        author = self.roster.peers[frame.author]
        if not await self._executor.run(Priority.CONTROL, lambda: self._signatures.is_of(author, self._text_of(frame), frame.signature)):
            raise BadMessageError("a chunk that its author has not signed")

    def _part_for(self, slice_number: int, number: int) -> Encoded:
        where = self.layout.piece(slice_number, number, self.me)
        values = self.accumulator[where.start : where.end]
        return self._compression.sent(self._compression.parts, self.roster.average_id, where, values)[1]

    # What arrives

    def check(self, frame: Frame) -> bool:
        """Whether a chunk for this member is the next one; False if it came before. Raises BadMessageError if it is not due."""
        if frame.is_sum:
            here = self.sums_here[frame.slice]
        elif frame.number < part_limit(self.layout.chunks_of(self.me), self.summed):
            here = self.parts_here[frame.author]
        else:
            raise BadMessageError("a chunk of a part that is not due yet")
        if frame.number > here or frame.author == self.me:
            raise BadMessageError("a chunk that leaves out the one before it, or is this member's own")
        return frame.number == here

    async def take(self, frame: Frame) -> None:
        """Add the next chunk of a member's part and sum what is complete, or write the next chunk of a sum into its place.

        What has begun is counted, also if the call that brought the chunk ends meanwhile: others may get a sum that contains it, and its
        author then sends it no more. Raises WrongStateError if the round is over.
        """
        self._check_open()
        await asyncio.shield(start(self._take(frame), expects=(RemoteError,)))

    async def _take(self, frame: Frame) -> None:
        if frame.is_sum:
            await self._take_sum(frame)
        else:
            await self.take_part(frame)
        self._look_whether_done()

    async def take_part(self, frame: Frame) -> None:
        author, number = frame.author, frame.number
        await self._keep(frame)
        summed = await self._executor.run(Priority.CONTROL, lambda: self._add(author, number, frame.chunks))
        self.parts_here[author] = max(self.parts_here[author], number + 1)
        self.sums_here[self.me] = max(self.summed, summed)
        self._leaves_out()

    def _leaves_out(self) -> bool:
        """Leave a member out whose part or sum is too large, once. Returns whether there is one."""
        if self._too_large is None:
            return False
        if not self._has_told:
            self._has_told = True
            self._leave_out(self.roster.peers[self._too_large])
        return True

    async def _keep(self, frame: Frame) -> None:
        """Keep the chunk of each mate's part that this peer's coins draw, for audits.

        Raises BadMessageError if its author has not signed it.
        """
        kept, author = self._signatures.parts, self.roster.peers[frame.author]
        if kept is None or not kept.wants(self.roster, author, frame.number):
            return
        await self.check_signature(frame)
        kept.put(self.roster, (frame.slice, frame.author, frame.number), frame.chunks, frame.signature)

    async def _take_sum(self, frame: Frame) -> None:
        reducer, number = frame.slice, frame.number
        where = self.layout.piece(reducer, number, reducer)
        place = self.accumulator[where.start : where.end]

        def write() -> None:
            if number < self._written[reducer]:
                return  # it came on two streams
            if self.norms is not None:
                self.norms.note_own(self.accumulator)
                self.norms.covers(reducer, where.start, place)
            values = self._compression.received(frame.chunks, where, into=place)
            if values.data_ptr() != place.data_ptr():
                place.copy_(values)
            if self.norms is not None and self.norms.sum_is_too_large(reducer, where.start, place, is_last=self._is_last(reducer, number)):
                self._too_large = reducer
                return
            self._note_slice(reducer, number, frame.slice_signature)
            self._written[reducer] = number + 1
            self._encoded.pop((reducer, number), None)

        await self._executor.run(Priority.CONTROL, write)
        if self._leaves_out():
            return
        if self.layout.num_members > 2:
            self._signed[reducer, reducer, number] = frame.signature
        if self._compression.allowed.is_lossy and (self.layout.num_members > 2 or self._keeps_encoded):
            self._received[reducer, number] = tuple(frame.chunks)
        self.sums_here[reducer] = max(self.sums_here[reducer], number + 1)

    def _add(self, author: int, number: int, chunks: Sequence[Bytes]) -> int:
        """Returns how many chunks are summed. One job, because each hand-over to the thread costs as much as a small chunk."""
        if self.norms is not None:
            self.norms.note_own(self.accumulator)
        if number >= self._num_added:
            where = self.layout.piece(self.me, number, author)
            self._parts.setdefault(number, {})[author] = self._compression.received(chunks, where)
        while self._too_large is None and len(self._parts.get(self._num_added, ())) == self.layout.num_members - 1:
            if self._sum(self._num_added):
                self._num_added += 1
        return self._num_added

    def _sum(self, number: int) -> bool:
        """Add the parts in the roster's order, so that the bits do not depend on the order of arrival.

        Returns whether it did: not if this is the slice's last chunk, and a member's part of it is too large.
        """
        where, average_id = self.layout.piece(self.me, number, self.me), self.roster.average_id
        place, parts = self.accumulator[where.start : where.end], self._parts.pop(number)
        parts[self.me] = self._compression.kept(self._compression.parts, average_id, where, place)
        if self.norms is not None:
            self.norms.add(where.start, parts)
            if self._is_last(self.me, number) and self._is_one_too_large(self.norms):
                return False
        total, *rest = (parts[author] for author in sorted(parts))
        for part in rest:
            total += part
        if total.data_ptr() != place.data_ptr():
            place.copy_(total)
        self._encode_sum(number)
        return True

    def _is_one_too_large(self, norms: SliceNorms) -> bool:
        """Look at all members' parts of this slice. Those that look odd are audited more often."""
        self._too_large = norms.too_large()
        if self._signatures.parts is not None:
            self._signatures.parts.note_odd(self.roster, [self.roster.peers[place] for place in norms.odd_ones()])
        return self._too_large is not None

    def _encode_sum(self, number: int) -> None:
        """Encode a chunk of this member's sum, which stands in its place, and put there what others decode."""
        where = self.layout.piece(self.me, number, self.me)
        place = self.accumulator[where.start : where.end]
        told, chunks = self._compression.sent(self._compression.sums, self.roster.average_id, where, place)
        if told is not place:
            place.copy_(told)
        self._note_slice(self.me, number)
        self._sums.append(chunks)

    def _is_last(self, slice_number: int, number: int) -> bool:
        return number == self.layout.chunks_of(slice_number) - 1

    def _note_slice(self, reducer: int, number: int, signature: bytes = b"") -> None:
        """A chunk of a sum stands in its place. Raises BadMessageError if the slice is whole and not as its reducer signed it."""
        where = self.layout.piece(reducer, number, reducer)
        self.slices.note(reducer, self.accumulator[where.start : where.end], signature, is_last=self._is_last(reducer, number))
