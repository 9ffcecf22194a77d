"""Compression of the accumulator's chunks, with error feedback: each round's quantization error is added to the next round's values.

A reducer uses the decoded form of its own sum, as all other members do, so all members end with the same bits. The last elements of
the accumulator are no gradients (the sum of losses, the number of overflows) and are always sent exactly. Where the run allows no
codec, chunks travel raw and no error is kept. Where each round's leader chooses the codec (`auto`), the error of one codec is made up
for with the next one, whichever that is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from peerd.averaging import lowrank
from peerd.averaging.lowrank import Block, Matrices
from peerd.config.codec import Allowed, Codec, parse_codec
from peerd.errors import BadMessageError
from peerd.link.links import Bytes
from peerd.policy.step.roster import Roster
from peerd.stage.accumulator import all_finite
from peerd.table.record import NO_AVERAGE, AverageId
from peerd.wire import codecs
from peerd.wire.tensors import decode_flat, decode_into, views_of_flat


@dataclass(frozen=True, slots=True)
class Elements:
    """A piece of the accumulator that one member sends: the elements from `start` up to `end`."""

    length: int
    """The number of elements of the whole accumulator."""
    start: int
    end: int
    num_exact: int
    """The number of elements at its end that are no gradients and lose no digit."""
    codec: Codec
    """The codec of what this member sends."""
    blocks: tuple[Block, ...] = ()
    """The matrices in the piece that travel as PowerSGD factors."""

    @property
    def num_compressed(self) -> int:
        return self.end - self.start - self.num_exact

    @property
    def compressed_bytes(self) -> int:
        spared = sum(block.end - block.start - block.num_factors(self.codec.rank) for block in self.blocks)
        return self.codec.num_bytes(self.num_compressed - spared)


@dataclass(slots=True)
class Rest:
    """The errors of one round, each at its element's place. Pages that nobody has written to take no memory."""

    flat: Tensor
    noted: list[tuple[int, int]] = field(default_factory=list)
    """Where they were written: from, to."""
    bases: dict[int, Tensor] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        return sum(end - start for start, end in self.noted) == len(self.flat)

    def over(self, before: Tensor | None, start: int, end: int) -> Tensor:
        """The errors of the elements from `start` up to `end`: this round's, or where it has noted none, what was left out `before`."""
        found = self.flat.new_zeros(end - start) if before is None else before[start:end].clone()
        for first, last in self.noted:
            if first < end and start < last:
                found[max(first - start, 0) : last - start] = self.flat[max(first, start) : min(last, end)]
        return found


@dataclass(slots=True)
class Residual:
    """The accumulated compression error of each element; that of a round counts once its average is applied (Seide 2014, EF-SGD).

    That of a group's round counts for as long as this peer holds the sum that was made in it: what the sum lacks is added in the next round
    of the same step, if this peer is in it, and in the next step otherwise.
    """

    left_out: Tensor | None = None
    bases: dict[int, Tensor] = field(default_factory=dict)
    """The basis from which PowerSGD's next power iteration starts, by parameter."""
    pending: dict[AverageId, Rest] = field(default_factory=dict)
    group: AverageId = NO_AVERAGE
    """The group whose sum this peer holds, as far as this was told."""

    @property
    def present_bases(self) -> dict[int, Tensor]:
        """Those of the next round: the ones that the group's round left, where this peer holds its sum."""
        return self.bases | self.pending[self.group].bases if self.group in self.pending else self.bases

    def added_to(self, values: Tensor, where: Elements) -> Tensor:
        if self.group in self.pending:
            missing = self.pending[self.group].over(self.left_out, where.start, where.end)
        elif self.left_out is not None:
            missing = self.left_out[where.start : where.end]
        else:
            return values
        return torch.add(values, missing, alpha=where.codec.spec.decay)

    def note(self, average_id: AverageId, where: Elements, rest: Tensor, bases: dict[int, Tensor]) -> None:
        kept = self.pending.get(average_id)
        if kept is None:
            kept = self.pending[average_id] = Rest(_zeros(where.length, rest.dtype))
        kept.flat[where.start : where.end] = rest
        kept.noted.append((where.start, where.end))
        kept.bases |= bases  # where a cut splits a parameter, the basis of one piece is kept

    def hold(self, group: AverageId) -> None:
        """Count the errors of this group's round. Those of another one's, whose sum was given up, go."""
        if group != self.group:
            self.pending.pop(self.group, None)
            self.group = group

    def applied(self, rounds: Sequence[AverageId], group: AverageId) -> None:
        self.hold(group)
        for kept in [self.pending[average_id] for average_id in (group, *rounds) if average_id in self.pending]:
            self._take(kept)
        self.group = NO_AVERAGE
        self.pending.clear()  # with those of this step's failed rounds

    def _take(self, kept: Rest) -> None:
        self.bases = self.bases | kept.bases
        if kept.is_whole:
            self.left_out = kept.flat
            return
        self.left_out = self.left_out if self.left_out is not None else _zeros(len(kept.flat), kept.flat.dtype)
        for start, end in kept.noted:
            self.left_out[start:end] = kept.flat[start:end]


def _zeros(length: int, dtype: torch.dtype) -> Tensor:
    """Zeros whose pages take memory once they are written to, unlike torch's."""
    return torch.from_numpy(np.zeros(length, torch.empty(0, dtype=dtype).numpy().dtype))


class Compression:
    """Encodes and decodes the chunks of one stage. All methods but `count` run on one thread, the one that computes the sums."""

    def __init__(self, allowed: Allowed, dtype: torch.dtype, shapes: Sequence[Sequence[int]] = (), num_exact: int = 1) -> None:
        """`shapes`: the shapes of the parameters, in the accumulator's order, which ends with `num_exact` elements that are none."""
        self.allowed = allowed
        self._num_exact = num_exact
        self._dtype = dtype
        self._matrices = Matrices(shapes)
        self.parts, self.sums = Residual(), Residual()
        self.traffic: Counter[tuple[str, str]] = Counter()
        """Bytes of parts and sums, by codec and direction (sent or received)."""

    def codecs_of(self, roster: Roster) -> list[Codec] | None:
        """Return the codec of what each member of a round sends; None where the run does not allow one of them."""
        codecs = [self.codec_of(named, roster.step) for named in roster.codecs or len(roster.entries) * ("",)]
        allowed = [codec for codec in codecs if codec is not None]
        return allowed if len(allowed) == len(codecs) else None

    def codec_of(self, named: str, step: int) -> Codec | None:
        """Return the codec of a round whose leader named `named` (empty: the run's own); None where the run does not allow it."""
        if named and not self.allowed.is_auto:
            return None
        codec = parse_codec(named) if named else self.allowed.at(step)[0]
        return codec if codec in self.allowed.at(step) else None

    def piece(self, length: int, start: int, end: int, codec: Codec) -> Elements:
        """Return these elements of an accumulator of so many."""
        border = length - self._num_exact
        return Elements(length, start, end, end - min(end, max(start, border)), codec, self._matrices.blocks(start, end, codec.rank))

    @property
    def borders(self) -> Sequence[int]:
        """Where parameters end in the accumulator."""
        return self._matrices.borders

    def count(self, codec: Codec, direction: str, num_bytes: int) -> None:
        """Count the bytes of a chunk (direction: sent or received)."""
        self.traffic[str(codec), direction] += num_bytes

    def num_bytes(self, where: Elements) -> int:
        """Return the encoded size of the piece."""
        if not self.allowed.is_lossy:
            return (where.end - where.start) * self._dtype.itemsize
        return where.compressed_bytes + where.num_exact * self._dtype.itemsize

    def kept(self, residual: Residual, average_id: AverageId, where: Elements, values: Tensor) -> Tensor:
        """Return the values, with the past error added, that stay at this peer: without a codec they have no new error."""
        if not self.allowed.is_lossy:
            return values
        whole = residual.added_to(values, where)
        residual.note(average_id, where, torch.zeros_like(whole), {})
        return whole

    def sent(self, residual: Residual, average_id: AverageId, where: Elements, values: Tensor) -> tuple[Tensor, tuple[memoryview, ...]]:
        """Return what the receivers will decode, and the encoded bytes; without compression both are `values` itself, uncopied."""
        if not self.allowed.is_lossy:
            return values, views_of_flat(values)
        whole = residual.added_to(values, where)
        body, bases = whole[: where.num_compressed].float(), dict[int, Tensor]()
        if where.codec.rank:
            packed, bases = lowrank.encode(where.blocks, where.codec.rank, body, residual.present_bases)
        else:
            packed = codecs.encode(where.codec, body)
        chunks = (*views_of_flat(packed), *views_of_flat(whole[where.num_compressed :]))
        told = self.received(chunks, where)
        rest = whole - told
        residual.note(average_id, where, rest, bases)
        return told, chunks

    def received(self, chunks: Sequence[Bytes], where: Elements, into: Tensor | None = None) -> Tensor:
        """Decode `num_bytes` bytes of a piece, into `into` where possible. Raises BadMessageError for values that are not finite."""
        if self.allowed.is_lossy:
            values = self._decoded(chunks, where)
        else:
            values = into if into is not None else torch.empty(where.end - where.start, dtype=self._dtype)
            decode_into(values, chunks)
        if not all_finite([values]):
            raise BadMessageError("a part or sum that is not finite")
        return values

    def _decoded(self, chunks: Sequence[Bytes], where: Elements) -> Tensor:
        data = b"".join(chunks)
        border = where.compressed_bytes
        if where.codec.rank:
            body = lowrank.decode(where.blocks, where.codec.rank, decode_flat([data[:border]], torch.float32), where.num_compressed)
        else:
            body = codecs.decode(where.codec, decode_flat([data[:border]], torch.uint8), where.num_compressed)
        return torch.cat([body.to(self._dtype), decode_flat([data[border:]], self._dtype)])

    def hold(self, group: AverageId) -> None:
        """Make up for the errors of this group's round from now on, as this peer holds its sum; empty: it holds none."""
        self.parts.hold(group)
        self.sums.hold(group)

    def applied(self, rounds: Sequence[AverageId], group: AverageId = NO_AVERAGE) -> None:
        """Keep the errors of the rounds whose average was applied, to be made up for; drop the errors of all other rounds.

        `group`: that whose sum this peer held, if it is in the average.
        """
        self.parts.applied(rounds, group)
        self.sums.applied(rounds, group)
