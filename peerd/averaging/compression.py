"""What slices of the accumulator travel as, and what compression leaves out, kept for the next time (error feedback).

A reducer's sum counts as what its bytes decode to, for itself too, so all members end with the same bits. The last element of the
accumulator is the sum of losses and travels exactly. Where the run allows no codec slices travel raw and nothing is kept; where it
leaves the codec to each round's leader (`auto`), what one round's left out is made up for in the next one's, whatever that is.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from peerd.averaging import lowrank
from peerd.averaging.lowrank import Block, Matrices
from peerd.config.codec import Allowed, Codec, parse_codec
from peerd.errors import BadMessageError
from peerd.link.links import Bytes
from peerd.stage.accumulator import all_finite, split_evenly
from peerd.table.record import AverageId
from peerd.wire import codecs
from peerd.wire.tensors import decode_flat, decode_into, views_of_flat


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of the accumulator: elements start to end."""

    start: int
    end: int
    is_last: bool
    """Holds the sum of losses at its end."""
    codec: Codec
    """What it travels as in this round."""
    blocks: tuple[Block, ...] = ()
    """Matrices in it that travel as PowerSGD's factors."""

    @property
    def num_compressed(self) -> int:
        return self.end - self.start - self.is_last

    @property
    def compressed_bytes(self) -> int:
        spared = sum(block.end - block.start - block.num_factors(self.codec.rank) for block in self.blocks)
        return self.codec.num_bytes(self.num_compressed - spared)


@dataclass(slots=True)
class Residual:
    """What has been left out of what was sent, element by element; a round's counts once its average is applied (Seide 2014, EF-SGD)."""

    left_out: Tensor | None = None
    bases: dict[int, Tensor] = field(default_factory=dict)
    """By parameter: where PowerSGD's next power iteration starts."""
    pending: dict[AverageId, list[tuple[Slice, Tensor, dict[int, Tensor]]]] = field(default_factory=lambda: defaultdict(list))

    def added_to(self, values: Tensor, where: Slice) -> Tensor:
        return values if self.left_out is None else values + self.left_out[where.start : where.end]

    def note(self, average_id: AverageId, where: Slice, rest: Tensor, bases: dict[int, Tensor]) -> None:
        self.pending[average_id].append((where, rest, bases))

    def applied(self, average_id: AverageId, length: int) -> None:
        for where, rest, bases in sorted(self.pending.pop(average_id, []), key=lambda noted: noted[0].start):
            if self.left_out is None:
                self.left_out = torch.zeros(length, dtype=rest.dtype)
            self.left_out[where.start : where.end] = rest
            self.bases |= bases  # of a parameter that a cut goes through, the last piece's
        self.pending.clear()  # rounds of this step that came to nothing


class Compression:
    """One stage's. All methods but the counters' are for one thread, that of the rounds' sums."""

    def __init__(self, allowed: Allowed, dtype: torch.dtype, shapes: Sequence[Sequence[int]] = ()) -> None:
        """`shapes`: of the parameters, as they lie in the accumulator."""
        self.allowed = allowed
        self._dtype = dtype
        self._matrices = Matrices(shapes)
        self.parts, self.sums = Residual(), Residual()
        self.traffic: Counter[tuple[str, str]] = Counter()
        """Bytes of parts and slices, by codec and sent or received."""

    def codec_of(self, named: str) -> Codec | None:
        """What a round travels as whose leader named this codec, or none; None where the run does not allow it."""
        if named and not self.allowed.is_auto:
            return None
        codec = parse_codec(named) if named else self.allowed.most_exact
        return codec if self.allowed.permits(codec) else None

    def slices(self, length: int, num_members: int, codec: Codec) -> list[Slice]:
        """What each member of a round reduces, by its index in the roster."""
        cuts = split_evenly(length, num_members)
        return [Slice(start, end, start < end == length, codec, self._matrices.blocks(start, end, codec.rank)) for start, end in cuts]

    def count(self, codec: Codec, size: int) -> None:
        """A part or slice went out and its like came in."""
        self.traffic.update({(str(codec), "sent"): size, (str(codec), "received"): size})

    def num_bytes(self, where: Slice) -> int:
        """As the slice travels."""
        if not self.allowed.is_lossy:
            return (where.end - where.start) * self._dtype.itemsize
        return where.compressed_bytes + where.is_last * self._dtype.itemsize

    def kept(self, residual: Residual, average_id: AverageId, where: Slice, values: Tensor) -> Tensor:
        """What stays with me needs no codec: all of it counts."""
        if not self.allowed.is_lossy:
            return values
        whole = residual.added_to(values, where)
        residual.note(average_id, where, torch.zeros_like(whole), {})
        return whole

    def sent(self, residual: Residual, average_id: AverageId, where: Slice, values: Tensor) -> tuple[Tensor, tuple[memoryview, ...]]:
        """What its receivers will have, and the bytes that tell them: where nothing is lost, those of `values` themselves."""
        if not self.allowed.is_lossy:
            return values, views_of_flat(values)
        whole = residual.added_to(values, where)
        body, bases = whole[: where.num_compressed].float(), dict[int, Tensor]()
        if where.codec.rank:
            packed, bases = lowrank.encode(where.blocks, where.codec.rank, body, residual.bases)
        else:
            packed = codecs.encode(where.codec, body)
        chunks = (*views_of_flat(packed), *views_of_flat(whole[where.num_compressed :]))
        told = self.received(chunks, where)
        rest = whole - told
        residual.note(average_id, where, rest, bases)
        return told, chunks

    def received(self, chunks: Sequence[Bytes], where: Slice, into: Tensor | None = None) -> Tensor:
        """BadMessageError where bytes make no finite values; there are as many as `num_bytes` says. `into` may be used to hold them."""
        if self.allowed.is_lossy:
            values = self._decoded(chunks, where)
        else:
            values = into if into is not None else torch.empty(where.end - where.start, dtype=self._dtype)
            decode_into(values, chunks)
        if not all_finite([values]):
            raise BadMessageError("a part or slice that is not finite")
        return values

    def _decoded(self, chunks: Sequence[Bytes], where: Slice) -> Tensor:
        data = b"".join(chunks)
        border = where.compressed_bytes
        if where.codec.rank:
            body = lowrank.decode(where.blocks, where.codec.rank, decode_flat([data[:border]], torch.float32), where.num_compressed)
        else:
            body = codecs.decode(where.codec, decode_flat([data[:border]], torch.uint8), where.num_compressed)
        return torch.cat([body.to(self._dtype), decode_flat([data[border:]], self._dtype)])

    def applied(self, average_id: AverageId, length: int) -> None:
        """An average was applied: what its round left out is to be made up for, and no other round's."""
        self.parts.applied(average_id, length)
        self.sums.applied(average_id, length)
