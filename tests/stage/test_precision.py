"""The loss scale: a function of which steps overflowed, which travels with the state and is never believed unseen."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from peerd.config.manifest import TrainConfig
from peerd.stage.precision import MAX_LOSS_SCALE, LossScale, loss_scale_from, norms_from
from peerd.table.record import StepNorm

TRAIN = TrainConfig(precision="float16", loss_scale=1024.0, loss_scale_growth_steps=3)


def after(*norms: float) -> LossScale:
    scale = LossScale.first(TRAIN)
    for norm in norms:
        scale = scale.after(norm, TRAIN)
    return scale


def test_an_overflow_halves_it_and_some_good_steps_double_it() -> None:
    assert after(math.inf).value == 512
    assert after(1.0, 1.0).value == 1024
    assert after(1.0, 1.0, 1.0).value == 2048
    assert after(1.0, 1.0, math.inf, 1.0, 1.0).value == 512
    assert after(1.0, 1.0, 1.0).previous == 1024, "a microbatch of the step before is scaled as it was"


@given(st.lists(st.sampled_from([1.0, math.inf]), max_size=200))
def test_it_stays_a_power_of_two_in_its_range_and_comes_back_from_its_tensors(norms: list[float]) -> None:
    scale = after(*norms)
    assert 1 <= scale.value <= MAX_LOSS_SCALE
    assert math.log2(scale.value).is_integer()
    assert loss_scale_from(scale.tensors(), TRAIN) == scale


def test_a_state_without_one_begins_anew() -> None:
    assert loss_scale_from({}, TRAIN) == LossScale.first(TRAIN)


@pytest.mark.parametrize(
    "changes",
    [
        {"value": torch.tensor(3.0)},
        {"value": torch.tensor(0.5)},
        {"previous": torch.tensor(math.inf)},
        {"good_steps": torch.tensor(-1.0)},
        {"good_steps": torch.tensor(math.nan)},
        {"value": torch.ones(2)},
        {"value": torch.tensor(1.0, dtype=torch.float64)},
        {"odd": torch.tensor(1.0)},
    ],
)
def test_a_scale_that_cannot_be_is_refused(changes: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError, match="the loss scale"):
        loss_scale_from(LossScale.first(TRAIN).tensors() | changes, TRAIN)


def test_norms_come_in_the_order_of_their_steps() -> None:
    assert norms_from({"10": torch.tensor(math.inf), "9": torch.tensor(0.5)}) == (StepNorm(9, 0.5), StepNorm(10, math.inf))


@pytest.mark.parametrize(
    "tensors",
    [
        {"x": torch.tensor(1.0)},
        {"-1": torch.tensor(1.0)},
        {"1": torch.tensor(-1.0)},
        {"1": torch.tensor(math.nan)},
        {"1": torch.ones(2)},
        {"1": torch.tensor(1)},
        {str(step): torch.tensor(1.0) for step in range(9)},
    ],
)
def test_norms_that_cannot_be_are_refused(tensors: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError, match="norm"):
        norms_from(tensors)
