"""Moments in 8 bits: what a code stands for, what rounding does over many steps, and updates that unpack piece by piece."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from peerd.config.manifest import Manifest, TrainConfig
from peerd.stage.moments import BLOCK, POSITIVE, SCALE, SIGNED, Grid, chunk_of, dither, pack, packed_state, unpack, unpacked_state
from peerd.stage.optimizer import Optimizer

CPU = torch.device("cpu")
grids = st.sampled_from([SIGNED, POSITIVE])


def numbers(grid: Grid, seed: int) -> Tensor:
    """Two blocks over many orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(2, BLOCK, generator=generator) * 10 ** (-12 * torch.rand(2, BLOCK, generator=generator))
    return values if grid.is_signed else values.abs()


@given(grids, st.integers(0, 1000), st.integers(0, 1 << 30))
def test_a_number_goes_to_one_of_the_two_codes_beside_it(grid: Grid, seed: int, step: int) -> None:
    values = numbers(grid, seed)
    codes, scales = pack(values.clone(), grid, dither(step, CPU))
    found, sizes = unpack(codes, scales, grid), values.abs()
    smallest = scales[:, None] * 2.0 ** (1 - grid.num_exponents)
    inside = sizes >= 1.125 * smallest
    assert bool(((found - values).abs() <= sizes / 8)[inside].all())
    below = found[sizes < smallest]
    assert not below.any() if grid.is_signed else bool((below <= 1.125 * smallest.max()).all() and (below > 0).all())
    assert bool((scales <= 2 * sizes.amax(1)).all() and (2 * scales >= sizes.amax(1)).all())


@given(grids, st.integers(0, 1000), st.integers(0, 1 << 30))
def test_numbers_that_are_codes_stay_as_they_are(grid: Grid, seed: int, step: int) -> None:
    codes, scales = pack(numbers(grid, seed), grid, dither(1, CPU))
    again, scales_again = pack(unpack(codes, scales, grid), grid, dither(step, CPU))
    assert torch.equal(codes, again)
    assert torch.equal(scales, scales_again)


def test_every_code_is_a_finite_number_with_the_scale_of_any_finite_block() -> None:
    """A donor may send any codes: its scales alone are checked."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(BLOCK // 256).view(1, BLOCK)
    for grid in (SIGNED, POSITIVE):
        found = unpack(codes, torch.tensor([2.0**127]), grid)
        assert bool(found.isfinite().all())
        assert len(set(found.flatten().tolist())) == 255 + (grid is POSITIVE), "one zero"


@pytest.mark.parametrize("beta", [0.95, 0.999])
def test_an_average_over_many_steps_is_kept_though_each_step_changes_it_by_less_than_a_code(beta: float) -> None:
    """Rounding to the nearest code would be off by a factor of two to four."""
    generator = torch.Generator().manual_seed(0)
    sizes = 10 ** (-3 * torch.rand(1, BLOCK, generator=generator))
    exact, packed, nearest = torch.zeros(1, BLOCK), torch.zeros(1, BLOCK), torch.zeros(1, BLOCK)
    half = torch.full((BLOCK,), 1 << 19, dtype=torch.int32)
    for step in range(2000):
        squares = (1 - beta) * (torch.randn(1, BLOCK, generator=generator) * sizes).square()
        exact.mul_(beta).add_(squares)
        packed = unpack(*pack(packed.mul_(beta).add_(squares), POSITIVE, dither(step, CPU)), POSITIVE)
        nearest = unpack(*pack(nearest.mul_(beta).add_(squares), POSITIVE, half), POSITIVE)
    off, off_if_nearest = (packed / exact).log(), (nearest / exact).log()
    assert abs(float(off.mean())) < 0.05
    assert float(off.std()) < 0.2
    assert abs(float(off_if_nearest.mean())) > 0.5


# Updates


def packed_run(**train: Any) -> Manifest:
    return Manifest(train=TrainConfig(optimizer_bits=8, **train))


def gradient_of(value: Tensor, step: int) -> Tensor:
    return torch.randn(value.shape, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_an_update_in_pieces_is_that_of_the_whole_tensor_between_unpacking_and_packing(kind: Any) -> None:
    shape = (3, chunk_of(CPU) - 5)
    start = torch.randn(shape, generator=torch.Generator().manual_seed(9))
    packed, whole = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    mine, plain = Optimizer(packed_run(optimizer=kind), {"w": packed}), Optimizer(Manifest(train=TrainConfig(optimizer=kind)), {"w": whole})
    before = mine.tensors()
    for step in range(3):
        plain.load(unpacked_state(before) | {"w.step": torch.tensor(float(step))})
        for optimizer in (mine, plain):
            optimizer.update(step, {"w": gradient_of(start, step)})
        assert torch.allclose(packed, whole, rtol=1e-6, atol=1e-7)
        whole.data.copy_(packed.data)
        before = mine.tensors()
        for part in {name.removesuffix(SCALE) for name in before} - {"w.step"}:
            value = plain.tensors()[part]
            apart = (unpacked_state(before)[part] - value).abs()
            assert bool((apart <= value.abs() / 8 + value.abs().max() * 2.0**-14).all())
    assert float(before["w.step"]) == 3


def test_a_state_that_is_unpacked_and_packed_again_is_the_same() -> None:
    value = nn.Parameter(torch.randn(70, 70, generator=torch.Generator().manual_seed(3)))
    optimizer = Optimizer(packed_run(), {"w": value})
    for step in range(2):
        optimizer.update(step, {"w": gradient_of(value, step)})
    state = optimizer.tensors()
    again = packed_state(unpacked_state(state))
    assert again.keys() == state.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("bits", [32, 8])
def test_a_parameter_that_lies_otherwise_in_memory_is_updated_all_the_same(bits: Any) -> None:
    start = torch.randn(80, 60, generator=torch.Generator().manual_seed(3))
    usual, turned, again = nn.Parameter(start.clone()), *(nn.Parameter(start.T.contiguous().T) for _ in range(2))
    assert not turned.is_contiguous()
    gradient = gradient_of(start, 0)
    for value, given_gradient in ((usual, gradient), (turned, gradient), (again, gradient.T.contiguous().T)):
        Optimizer(Manifest(train=TrainConfig(optimizer_bits=bits)), {"w": value}).update(0, {"w": given_gradient})
    assert torch.equal(usual, turned)
    assert torch.equal(usual, again)
    assert not torch.equal(usual, start)


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The largest tensor of new memory that operations return, in bytes."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known, self.num_bytes = known, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and found.untyped_storage().data_ptr() not in self.known:
            self.num_bytes = max(self.num_bytes, found.untyped_storage().nbytes())
        return found


def test_an_update_never_holds_the_moments_of_a_whole_tensor_in_float32() -> None:
    value = nn.Parameter(torch.randn(20 * chunk_of(CPU)))
    optimizer, gradient = Optimizer(packed_run(), {"w": value}), torch.ones_like(value)
    lasting = {tensor.untyped_storage().data_ptr() for tensor in (value, gradient, *optimizer.tensors().values())}
    with Largest(lasting) as largest:
        optimizer.update(0, {"w": gradient})
    assert 0 < largest.num_bytes <= 4 * chunk_of(CPU)


def test_a_state_of_other_bits_is_refused_and_changes_nothing() -> None:
    value = nn.Parameter(torch.randn(64, 64))
    optimizer = Optimizer(packed_run(), {"w": value})
    optimizer.update(0, {"w": torch.ones_like(value)})
    before = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    with pytest.raises(ValueError, match=r"w\.exp_avg is of torch\.float32; it must be of torch\.uint8"):
        optimizer.load(before | {"w.exp_avg": torch.zeros(64, 64)})
    with pytest.raises(ValueError, match=r"w\.exp_avg_scale is missing"):
        optimizer.load(unpacked_state(before))
    assert all(torch.equal(tensor, before[name]) for name, tensor in optimizer.tensors().items())


@pytest.mark.parametrize("train", [{"optimizer": "lamb"}, {"optimizer": "muon"}, {"optimizer": "sgd", "momentum": 0.0}], ids=str)
def test_optimizers_without_moments_that_can_be_packed_are_refused_in_one_sentence(train: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r'optimizer_bits = 8 goes with train\.optimizer "adamw", and with "sgd" where it has momentum'):
        packed_run(**train)
