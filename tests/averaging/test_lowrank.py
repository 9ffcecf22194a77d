"""PowerSGD's codec: which matrices of a slice travel as factors, what these lose, and that their product is the same everywhere."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from peerd.averaging import lowrank
from peerd.averaging.lowrank import Matrices, decode, encode, factors
from peerd.config.codec import as_matrix

shapes_of_parameters = st.lists(st.lists(st.integers(0, 14), max_size=3).map(tuple), max_size=6)
ranks = st.integers(1, 5)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@st.composite
def slices(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], int, int]:
    """Parameters, and a part of the vector they make with one element after them."""
    shapes = draw(shapes_of_parameters)
    length = sum(map(math.prod, shapes)) + 1
    start = draw(st.integers(0, length))
    return shapes, start, draw(st.integers(start, length))


@given(slices(), ranks)
def test_blocks_are_whole_rows_of_their_parameters_that_gain_by_it(cut: tuple[list[tuple[int, ...]], int, int], rank: int) -> None:
    shapes, start, end = cut
    whole = torch.arange(sum(map(math.prod, shapes)) + 1)
    parameters = whole[:-1].split([math.prod(shape) for shape in shapes])  # type: ignore[no-untyped-call]
    position = 0
    for block in Matrices(shapes).blocks(start, end, rank):
        assert position <= block.start < block.end <= end - start
        position = block.end
        rows, columns = as_matrix(shapes[block.parameter])
        assert columns == block.columns
        found = whole[start + block.start : start + block.end].view(block.rows, columns)
        first = int((found[0, 0] - parameters[block.parameter][0]) // columns)
        assert torch.equal(found, parameters[block.parameter].view(rows, columns)[first : first + block.rows])
        assert block.num_factors(rank) < block.rows * columns
    assert Matrices(shapes).blocks(start, end, 0) == ()


@given(slices(), ranks)
def test_what_is_in_no_block_travels_exactly_and_blocks_lose_what_is_orthogonal(
    cut: tuple[list[tuple[int, ...]], int, int], rank: int
) -> None:
    shapes, start, end = cut
    blocks, values = Matrices(shapes).blocks(start, end, rank), normal(end - start)
    packed, bases = encode(blocks, rank, values, {})
    assert packed.numel() == values.numel() - sum(block.rows * block.columns - block.num_factors(rank) for block in blocks)
    found = decode(blocks, rank, packed, values.numel())
    for block in blocks:
        told, there = found[block.start : block.end], values[block.start : block.end]
        assert bases[block.parameter].shape == (block.columns, rank)
        assert float(told @ (there - told)) == pytest.approx(0, abs=1e-4 * float(there @ there))
        told.zero_()
        there.zero_()
    assert torch.equal(found, values)


def test_a_block_arrives_as_algorithm_1_has_it() -> None:
    """Against the dense formula in double precision, P P^T M with P an orthonormal basis of M Q."""
    matrix, basis = normal(30, 20), normal(20, 3, seed=1)
    (block,) = Matrices([(30, 20)]).blocks(0, 600, 3)
    packed, bases = encode((block,), 3, matrix.flatten(), {0: basis})
    columns = torch.linalg.qr(matrix.double() @ basis.double()).Q
    expected = columns @ columns.T @ matrix.double()
    assert torch.allclose(decode((block,), 3, packed, 600).view(30, 20).double(), expected, atol=1e-5)
    assert torch.allclose(bases[0].double() @ bases[0].T.double(), expected.T @ expected, atol=1e-4)


def test_cuts_between_members_take_few_values_and_leave_out_only_the_rows_that_they_cut() -> None:
    matrices = Matrices([(100, 40), (7,), (60, 10, 4)])
    whole = matrices.blocks(0, 6408, 2)
    assert [(block.parameter, block.rows, block.columns) for block in whole] == [(0, 100, 40), (2, 60, 40)]
    cut = [matrices.blocks(start, start + 2136, 2) for start in (0, 2136, 4272)]
    assert [[(block.parameter, block.rows) for block in blocks] for blocks in cut] == [[(0, 53)], [(0, 46), (2, 6)], [(2, 53)]]


def test_a_matrix_of_the_rank_sent_comes_back_and_one_of_zeros_is_exact() -> None:
    matrix = normal(30, 3) @ normal(3, 20, seed=1)
    (block,) = Matrices([(30, 20)]).blocks(0, 600, 3)
    packed, bases = encode((block,), 3, matrix.flatten(), {})
    assert torch.allclose(decode((block,), 3, packed, 600), matrix.flatten(), atol=1e-4)
    for basis in (bases, {0: torch.zeros(20, 3)}, {}):
        zeros, _ = encode((block,), 3, torch.zeros(600), basis)
        assert not bool(decode((block,), 3, zeros, 600).any())
    again, _ = encode((block,), 3, matrix.flatten(), {0: torch.zeros(20, 3)})  # a basis of nothing does not stay one
    assert bool(decode((block,), 3, again, 600).any())


def test_a_basis_that_is_kept_comes_to_the_best_approximation_and_a_new_one_each_time_does_not() -> None:
    left, right = (torch.linalg.qr(normal(size, 12, seed=size)).Q for size in (50, 40))
    matrix = left @ torch.diag(0.7 ** torch.arange(12.0)) @ right.T
    best = float(torch.linalg.svdvals(matrix)[4:].norm())
    basis = normal(40, 4, seed=1)
    errors = []
    for _ in range(12):
        columns, basis = factors(matrix, basis)
        errors.append(float((matrix - columns @ basis.T).norm()))
    assert all(after <= before + 1e-6 for before, after in pairwise(errors))
    assert errors[-1] == pytest.approx(best, rel=1e-3)
    assert errors[0] > 1.1 * best


@given(st.integers(1, 300), st.integers(1, 40), ranks, st.integers(1, 500))
def test_a_product_has_the_bits_of_its_multiplications_and_additions_one_by_one(rows: int, columns: int, rank: int, at_once: int) -> None:
    """As any machine rounds them, in whatever portions and threads."""
    left, right, product = normal(rank, rows), normal(rank, columns, seed=1), torch.empty(rows, columns)
    expected = np.multiply.outer(left[0].numpy(), right[0].numpy())
    for column, row in zip(left[1:].numpy(), right[1:].numpy(), strict=True):
        expected = expected + np.multiply.outer(column, row)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lowrank, "VALUES_AT_ONCE", at_once)
        lowrank._multiply(left, right, product)
    assert expected.dtype == np.float32
    assert np.array_equal(product.numpy(), expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 333, 599])
def test_what_is_not_finite_stays_so(bad: float, place: int) -> None:
    values = normal(600)
    values[place] = bad
    blocks = Matrices([(30, 20)]).blocks(0, 600, 2)
    packed, _ = encode(blocks, 2, values, {})
    assert not bool(decode(blocks, 2, packed, 600).isfinite().all())


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((), (1, 1)), ((7,), (7, 1)), ((3, 5), (3, 5)), ((64, 32, 3, 3), (64, 288)), ((8, 100, 40), (800, 40)), ((0, 4), (0, 4))],
)
def test_a_parameter_is_a_matrix_as_near_to_square_as_its_dimensions_allow(shape: tuple[int, ...], expected: tuple[int, int]) -> None:
    assert as_matrix(shape) == expected
