"""The PowerSGD codec: a matrix travels as two thin factors (Vogels, Karimireddy and Jaggi 2019, arXiv 1905.13727, algorithm 1).

In the paper all members multiply their gradients by one common basis, sum the products, orthogonalize the sum, multiply again and sum
again. That takes two exchanges, and all members need the same basis, which peers that joined, fetched an average or resumed from a
checkpoint do not have. Here each sender factors by itself whatever it sends, parts and sums alike, so a round needs one exchange as
before. A basis is only the start of its owner's next power iteration: without one the approximation is worse, but replicas stay equal.

Contract: decoding gives the same bits on every machine, and any floats of the right number decode. Call nothing here on the event loop.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from peerd.config.codec import as_matrix

VALUES_AT_ONCE = 1 << 16
"""Number of values of a product that are computed at once: few enough to stay in the processor's cache while each rank is added."""


@dataclass(frozen=True, slots=True)
class Block:
    """Whole rows of a parameter, seen as a matrix, that lie in one slice."""

    parameter: int
    """Index of the parameter in the stage."""
    start: int
    """Offset of the first element in the slice."""
    rows: int
    columns: int

    @property
    def end(self) -> int:
        return self.start + self.rows * self.columns

    def num_factors(self, rank: int) -> int:
        """Number of values in both factors."""
        return rank * (self.rows + self.columns)


class Matrices:
    """The layout of a stage's parameters in its accumulator, seen as matrices."""

    def __init__(self, shapes: Sequence[Sequence[int]]) -> None:
        self._sizes = [as_matrix(shape) for shape in shapes]
        self._starts = list(accumulate((rows * columns for rows, columns in self._sizes), initial=0))

    @property
    def borders(self) -> Sequence[int]:
        """Offsets in the accumulator at which a parameter ends and the next begins."""
        return self._starts[1:]

    def blocks(self, start: int, end: int, rank: int) -> tuple[Block, ...]:
        """Return the blocks between two elements whose factors have fewer values than the block. Rows that a bound cuts are in no block."""
        found = []
        for number in range(bisect_right(self._starts, start) - 1, len(self._sizes)):
            (rows, columns), begin = self._sizes[number], self._starts[number]
            if begin >= end:
                break
            if not rank or not columns:
                continue
            first, last = -(min(begin - start, 0) // columns), min((end - begin) // columns, rows)
            block = Block(number, begin + first * columns - start, last - first, columns)
            if last > first and block.num_factors(rank) < block.end - block.start:
                found.append(block)
        return tuple(found)


def encode(blocks: Sequence[Block], rank: int, values: Tensor, bases: Mapping[int, Tensor]) -> tuple[Tensor, dict[int, Tensor]]:
    """float32 [length] -> float32: the factors of each block, then the values outside blocks; and the bases for the next call.

    Bases are [columns, rank], by parameter. Where there is none yet, the iteration starts from a random one.
    """
    pieces, found = [], dict[int, Tensor]()
    for block in blocks:
        matrix = values[block.start : block.end].view(block.rows, block.columns)
        basis = bases.get(block.parameter)
        left, right = factors(matrix, _first_basis(block, rank) if basis is None else basis)
        pieces += [left.T.flatten(), right.T.flatten()]
        found[block.parameter] = right
    return torch.cat([*pieces, *(values[start:end] for start, end in _between(blocks, values.numel()))]), found


def decode(blocks: Sequence[Block], rank: int, packed: Tensor, length: int) -> Tensor:
    """The output of `encode` -> float32 [length]."""
    values, start = torch.empty(length, dtype=torch.float32), 0
    for block in blocks:
        middle, end = start + rank * block.rows, start + block.num_factors(rank)
        place = values[block.start : block.end].view(block.rows, block.columns)
        _multiply(packed[start:middle].view(rank, block.rows), packed[middle:end].view(rank, block.columns), place)
        start = end
    for first, last in _between(blocks, length):
        values[first:last] = packed[start : start + last - first]
        start += last - first
    return values


def factors(matrix: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """One power iteration: [rows, columns] and [columns, rank] -> left [rows, rank] with orthonormal columns, right [columns, rank].

    left @ right.T is the projection of the matrix on the column space of left.
    """
    left = torch.linalg.qr(matrix @ basis).Q
    return left, matrix.T @ left


def _multiply(left: Tensor, right: Tensor, product: Tensor) -> None:
    """[rank, rows], [rank, columns] -> [rows, columns], in place.

    Each multiplication and addition is rounded separately and in a fixed order, because the bits of a library's matrix product depend on
    the machine.
    """
    num_rows = max(1, VALUES_AT_ONCE // right.shape[1])
    for top in range(0, product.shape[0], num_rows):
        rows = product[top : top + num_rows]
        columns = left[:, top : top + num_rows, None]
        torch.mul(columns[0], right[0], out=rows)
        for column, row in zip(columns[1:], right[1:], strict=True):
            rows.add_(column * row)


def _first_basis(block: Block, rank: int) -> Tensor:
    return torch.randn(block.columns, rank, generator=torch.Generator().manual_seed(block.parameter))


def _between(blocks: Sequence[Block], length: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds of the values outside blocks."""
    starts, ends = [0, *(block.end for block in blocks)], [*(block.start for block in blocks), length]
    return zip(starts, ends, strict=True)
