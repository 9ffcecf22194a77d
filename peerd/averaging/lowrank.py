"""PowerSGD's codec: a matrix travels as two thin factors (Vogels, Karimireddy and Jaggi 2019, arXiv 1905.13727, algorithm 1).

The paper's members multiply their gradients by one common basis, add up the products, make them orthogonal, multiply again and add up
again. That takes two exchanges, and a basis that all share as they share parameters: joiners, mates that fetched an average and those
who came back from a checkpoint do not have it. Here every sender factors what it sends by itself, parts as well as sums, so a round is
what it was, and a basis is no more than where its owner's next power iteration starts: none at all costs quality, never equality.

Contract: decoding gives the same bits on every machine; any floats of the right number decode. Never on the event loop.
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
"""Of a product: so many stay in the processor's cache while one factor's column after another is added."""


@dataclass(frozen=True, slots=True)
class Block:
    """Whole rows of a parameter, seen as a matrix, that lie in one slice."""

    parameter: int
    """Its place among the stage's."""
    start: int
    """Of its first element, in the slice."""
    rows: int
    columns: int

    @property
    def end(self) -> int:
        return self.start + self.rows * self.columns

    def num_factors(self, rank: int) -> int:
        """Values of both factors."""
        return rank * (self.rows + self.columns)


class Matrices:
    """A stage's parameters as they lie in its accumulator, one after another."""

    def __init__(self, shapes: Sequence[Sequence[int]]) -> None:
        self._sizes = [as_matrix(shape) for shape in shapes]
        self._starts = list(accumulate((rows * columns for rows, columns in self._sizes), initial=0))

    def blocks(self, start: int, end: int, rank: int) -> tuple[Block, ...]:
        """Those between two elements for which factors take fewer values. Rows that are cut apart are in none."""
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
    """float32 [length] -> float32: each block's factors, then the values in no block; and the bases for the next time.

    Bases are [columns, rank], by parameter; where there is none yet the iteration starts from a random one.
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
    """What `encode` packed -> float32 [length]."""
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
    """[rows, columns] and [columns, rank] -> [rows, rank] of orthonormal columns, and [columns, rank]: one power iteration.

    Their product is the nearest to the matrix of all whose columns the first one spans.
    """
    left = torch.linalg.qr(matrix @ basis).Q
    return left, matrix.T @ left


def _multiply(left: Tensor, right: Tensor, product: Tensor) -> None:
    """[rank, rows], [rank, columns] -> [rows, columns], in place.

    Each multiplication and addition is rounded by itself and in order: a matrix product's bits depend on the machine that makes it.
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
    """Bounds of the values in no block."""
    starts, ends = [0, *(block.end for block in blocks)], [*(block.start for block in blocks), length]
    return zip(starts, ends, strict=True)
