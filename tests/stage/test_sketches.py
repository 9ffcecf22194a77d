"""Sketches of states: they differ by about as much as the states, under any seed, and by nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from peerd.errors import BadMessageError
from peerd.stage.sketches import COLUMNS, ROWS, SUMS, sketch_of

SEED = b"s" * 32


def state(large: int = 3 * COLUMNS + 5) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(1)
    return {
        "parameters/weight": torch.randn(large, generator=drawn),
        "parameters/noise": torch.randn(8, generator=drawn) * 1e-9,
        "optimizer/weight.second": torch.rand(large, generator=drawn) * 1e-8,
        "optimizer/weight.codes": torch.randint(0, 255, (large,), generator=drawn, dtype=torch.uint8),
        "optimizer/weight.step": torch.tensor(12.0),
        "norms/7": torch.tensor(3.0),
    }


def apart(mine: dict[str, Tensor], theirs: dict[str, Tensor], seed: bytes = SEED) -> float:
    return sketch_of(mine, seed).residual(sketch_of(theirs, seed).to_bytes()).distance()


@given(st.binary(min_size=32, max_size=32), st.floats(1e-6, 1e3), st.sampled_from([1, 7, COLUMNS, 2 * COLUMNS + 1, COLUMNS * ROWS + 9]))
def test_sketches_differ_by_about_as_much_as_the_tensors(seed: bytes, share: float, size: int) -> None:
    drawn = torch.Generator().manual_seed(2)
    weight = torch.randn(size, generator=drawn).double()
    off = torch.randn(size, generator=drawn).double()
    off *= share * weight.norm() / off.norm()
    found = apart({"parameters/weight": weight}, {"parameters/weight": weight + off}, seed)
    assert share / 5 < found < 3 * share


@pytest.mark.parametrize("name", ["parameters/weight", "optimizer/weight.second", "optimizer/weight.step"])
def test_one_element_that_was_changed_shows_wherever_it_is(name: str) -> None:
    for place in (0, -1):
        changed = {**state(), name: state()[name].clone()}
        changed[name].view(-1)[place] += float(state()[name].norm())
        assert apart(state(), changed) > 0.5


def test_what_is_only_noise_is_measured_by_its_share_of_all_numbers() -> None:
    other = {**state(), "parameters/noise": -state()["parameters/noise"]}
    assert apart(state(), other) < 1e-7


def test_codes_that_are_off_by_one_now_and_then_are_rounding() -> None:
    codes = state()["optimizer/weight.codes"].clone()
    codes[::10] += 1
    assert 0.0 < apart(state(), {**state(), "optimizer/weight.codes": codes}) < 1e-4
    assert apart(state(), {**state(), "optimizer/weight.codes": codes.flip(0)}) > 1e-3


def test_two_states_are_compared_by_what_both_are_off_a_third() -> None:
    mine, one, other = state(), {**state(), "parameters/weight": 2 * state()["parameters/weight"]}, state()
    residuals = [sketch_of(mine, SEED).residual(sketch_of(each, SEED).to_bytes()) for each in (one, one, other)]
    assert residuals[0].distance(residuals[1]) == 0.0
    assert residuals[0].distance(residuals[2]) > 0.5


def test_norms_that_were_told_of_earlier_steps_do_not_count() -> None:
    assert apart(state(), {**state(), "norms/6": torch.tensor(2.0)}) == 0.0


@pytest.mark.parametrize("told", [b"", b"x" * 8, torch.full((5, SUMS), float("nan"), dtype=torch.float64).numpy().tobytes()])
def test_a_damaged_sketch_is_refused(told: bytes) -> None:
    with pytest.raises(BadMessageError):
        sketch_of(state(), SEED).residual(told)
