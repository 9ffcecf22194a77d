"""The accumulator: a sum that no order changes in float64, seen per parameter, cut evenly for the all-reduce."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peerd.stage.accumulator import Accumulator, all_finite, views_of

SHAPES = {"a": torch.Size([2, 3]), "b": torch.Size([4]), "c": torch.Size([])}
CPU = torch.device("cpu")


def gradients_of(seed: int) -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=chance) for shape in SHAPES.values()]


@given(st.permutations(range(6)))
def test_in_float64_the_sum_of_float32_gradients_is_the_same_in_any_order(order: list[int]) -> None:
    """Sums of a few float32 values of like size are exact in float64, so no order can show."""
    straight, shuffled = (Accumulator(SHAPES, torch.float64, CPU) for _ in range(2))
    for seed in range(6):
        straight.add(gradients_of(seed), loss=float(torch.tensor(0.1 * seed)))
    for seed in order:
        shuffled.add(gradients_of(seed), loss=float(torch.tensor(0.1 * seed)))
    assert torch.equal(straight.flat, shuffled.flat)


def test_parameters_lie_one_after_another_and_the_loss_last() -> None:
    accumulator = Accumulator(SHAPES, torch.float32, CPU)
    gradients = gradients_of(0)
    accumulator.add(gradients, loss=2.5)
    assert torch.equal(accumulator.flat[:-1], torch.cat([gradient.reshape(-1) for gradient in gradients]))
    assert accumulator.flat[-1] == 2.5
    accumulator.zero()
    assert not accumulator.flat.any()


def test_a_stage_that_is_not_the_last_adds_no_loss() -> None:
    accumulator = Accumulator(SHAPES, torch.float32, CPU)
    accumulator.add(gradients_of(0), loss=None)
    assert accumulator.flat[-1] == 0


def test_a_gradient_too_few_is_an_error_and_not_a_silent_shift() -> None:
    with pytest.raises(ValueError, match="shapes"):
        Accumulator(SHAPES, torch.float32, CPU).add(gradients_of(0)[:-1], loss=None)


def test_sums_are_named_and_stay_where_they_are() -> None:
    accumulator = Accumulator(SHAPES, torch.float64, CPU)
    for seed in range(4):
        accumulator.add(gradients_of(seed), loss=None)
    sums = accumulator.sums(accumulator.flat)
    assert {name: total.shape for name, total in sums.items()} == SHAPES
    assert torch.allclose(sums["b"], torch.stack([gradients_of(seed)[1].double() for seed in range(4)]).sum(0))
    assert sums["a"].data_ptr() == accumulator.flat.data_ptr()


def test_views_share_the_memory_of_the_vector() -> None:
    flat = torch.zeros(11)
    views_of(flat, SHAPES)["b"].fill_(1)
    assert flat.tolist() == [0] * 6 + [1] * 4 + [0]


@pytest.mark.parametrize(("value", "finite"), [(1.0, True), (math.nan, False), (math.inf, False), (-math.inf, False)])
def test_one_value_that_is_not_finite_is_seen_among_many(value: float, finite: bool) -> None:
    tensor = torch.zeros(1000)
    tensor[777] = value
    assert all_finite([torch.zeros(3), tensor]) is finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_values_whose_sum_overflows_are_finite_all_the_same(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    assert all_finite([torch.full((4,), most, dtype=dtype)])
    assert not all_finite([torch.tensor([most, most, math.inf, -math.inf], dtype=dtype)])
