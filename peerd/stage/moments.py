"""An optimizer's moments in 8 bits: one code for each number, and one scale for each block of numbers.

Blockwise 8-bit states are those of Dettmers et al. 2022 (arXiv 2110.02861). The codes differ: they are small floating-point numbers with
three bits of fraction, so that a number is packed by a few integer operations and no search of a table (47 ns a number), and every
device packs the same bits.

- A block is BLOCK numbers of one parameter, in memory order; the last block of a parameter may be shorter. So no block depends on how the
  model is cut into stages.
- A scale is the power of two below the block's largest magnitude. A number can be 2^15 times (signed) or 2^31 times (positive) smaller than
  it; a smaller signed one becomes zero, a smaller positive one becomes the smallest code, as a zero under a root would make an update huge.
- A number between two codes is rounded up in some steps and down in others, in the shares in which it lies between them (`dither`).
  Rounding to the nearest code would lose every change below half the distance, and a slow average changes by less in each step
  (peerd/docs/performance.md has figures). Numbers that are codes stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 2048
"""Numbers that share a scale."""
LEAST_PACKED = 2 * BLOCK
"""A parameter with fewer numbers keeps float32 moments: vectors take little memory, and packing one takes twenty times as long."""
SCALE = "_scale"
"""Ends the name of the part of a state that holds the scales of another part."""
_FRACTION_BITS = 3
_DROPPED_BITS = 23 - _FRACTION_BITS
"""Bits of a float32's fraction that a code lacks."""
_SIGN, _CODE_BITS = 0x80, 8
_BY_20, _BY_4 = torch.tensor(_DROPPED_BITS, dtype=torch.int32), torch.tensor(4, dtype=torch.int16)
_SIZE, _EXPONENT = torch.tensor(0x7FF, dtype=torch.int16), torch.tensor(0x7F8, dtype=torch.int16)
"""Operands of the tensors' own types: torch converts any other first, which takes as long as the operation."""
_LEAST_EXPONENT = 32
"""The smallest scale is 2^-95, so that every code stands for a normal number: devices treat others differently."""
_BIAS = 127
_ALONG, _STEPPED = 791547, 648055
"""Increments, modulo 2^20: along a block, and from step to step. The second is the golden ratio, whose multiples lie most evenly."""
_HALF = torch.full((BLOCK,), 1 << (_DROPPED_BITS - 1), dtype=torch.int32)
_CPU_CHUNK, _GPU_CHUNK = 15 * BLOCK, 2048 * BLOCK
"""Numbers that are unpacked at once. A processor's cache holds so many, and torch takes one thread: it splits from 32768 numbers on."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The numbers that codes stand for, as shares of the block's scale."""

    is_signed: bool

    @property
    def num_exponents(self) -> int:
        return 1 << (_CODE_BITS - self.is_signed - _FRACTION_BITS)


SIGNED, POSITIVE = Grid(is_signed=True), Grid(is_signed=False)


def num_blocks(num_values: int) -> int:
    """Blocks of a parameter with so many numbers; 0 if its moments are not packed."""
    return -(-num_values // BLOCK) if num_values >= LEAST_PACKED else 0


def chunk_of(device: torch.device) -> int:
    """How many numbers to unpack at once; whole blocks."""
    return _CPU_CHUNK if device.type == "cpu" else _GPU_CHUNK


@functools.lru_cache(maxsize=8)
def dither(step: int, device: torch.device) -> Tensor:
    """int32 [BLOCK]: what is added to each number of every block before it is cut off; another in each step."""
    return (torch.arange(BLOCK, dtype=torch.int64, device=device) * _ALONG + step * _STEPPED).bitwise_and_((1 << _DROPPED_BITS) - 1).int()


def pack(values: Tensor, grid: Grid, added: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [blocks, BLOCK], which is overwritten -> uint8 [blocks, BLOCK] and scales float32 [blocks]."""
    rounded = values.view(torch.int32).add_(added).bitwise_right_shift_(_BY_20).to(torch.int16)
    sizes = rounded.bitwise_and(_SIZE) if grid.is_signed else rounded
    scales = sizes.amax(1).clamp_(min=_LEAST_EXPONENT << _FRACTION_BITS).bitwise_and_(_EXPONENT)
    codes = sizes.sub(_smallest(scales, grid)[:, None]).clamp_(min=0)
    if grid.is_signed:
        codes.bitwise_or_(rounded.bitwise_right_shift_(_BY_4).bitwise_and_(_SIGN))
    return codes.to(torch.uint8), scales.int().bitwise_left_shift_(_BY_20).view(torch.float32)


def unpack(codes: Tensor, scales: Tensor, grid: Grid) -> Tensor:
    """uint8 [blocks, BLOCK] and scales float32 [blocks] -> float32 [blocks, BLOCK]."""
    if grid.is_signed:
        shares = _shares(codes.device).index_select(0, codes.view(-1).int())
        return shares.view(-1, BLOCK).mul_(scales[:, None])
    sizes = scales.view(torch.int32).bitwise_right_shift(_BY_20).to(torch.int16).clamp_(min=_LEAST_EXPONENT << _FRACTION_BITS)
    upper_half = codes.to(torch.int16).view(-1, BLOCK).add_(_smallest(sizes, grid)[:, None]).bitwise_left_shift_(_BY_4)
    return upper_half.view(torch.bfloat16).float()


def _smallest(scales: Tensor, grid: Grid) -> Tensor:
    """int16 [blocks], the upper twelve bits of the scales -> those of what code 0 would stand for."""
    return scales.sub((grid.num_exponents - 1) << _FRACTION_BITS)


@functools.cache
def _shares(device: torch.device) -> Tensor:
    """float32 [256]: what each signed code stands for, as a share of the scale."""
    sizes = torch.arange(_SIGN, dtype=torch.int32) + ((_BIAS + 1 - SIGNED.num_exponents) << _FRACTION_BITS)
    shares = (sizes << _DROPPED_BITS).view(torch.float32)
    shares[0] = 0.0
    return torch.cat([shares, -shares]).to(device)


def forget_tables() -> None:
    """Let go of the tables that devices hold. They are made again when they are needed."""
    dither.cache_clear()
    _shares.cache_clear()


def grid_of(part: str) -> Grid:
    """The grid of a moment: only averages of squares have no sign."""
    return POSITIVE if part == "exp_avg_sq" else SIGNED


class Unpacked:
    """Numbers of one parameter from `first` on, unpacked for a change of them: float32 [count], in place."""

    def __init__(self, state: Mapping[str, Tensor], part: str, first: int, count: int) -> None:
        codes, scales = state[part], state[part + SCALE]
        self._grid = grid_of(part)
        self._codes = codes.view(-1)[first : first + count]
        self._scales = scales[first // BLOCK : -(-(first + count) // BLOCK)]
        whole = self._codes
        if count % BLOCK:
            whole = torch.zeros(len(self._scales) * BLOCK, dtype=torch.uint8, device=codes.device)
            whole[:count] = self._codes
        self._blocks = unpack(whole, self._scales, self._grid)
        self.values = self._blocks.view(-1)[:count]

    def pack(self, added: Tensor) -> None:
        """Write the changed numbers back to the state. `values` are lost."""
        codes, scales = pack(self._blocks, self._grid, added)
        self._codes.copy_(codes.view(-1)[: len(self._codes)])
        self._scales.copy_(scales)


def packed_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of an optimizer with its float32 moments packed, each number to the nearest code. Keys are `<parameter>.<part>`."""
    found = dict(state)
    for name, value in state.items():
        if name.endswith(".step"):
            continue
        blocks = torch.zeros(num_blocks(value.numel()), BLOCK)
        if not len(blocks):
            found[name + SCALE] = torch.zeros(0)
            continue
        blocks.view(-1)[: value.numel()] = value.reshape(-1)
        codes, found[name + SCALE] = pack(blocks, grid_of(name.rpartition(".")[2]), _HALF)
        found[name] = codes.view(-1)[: value.numel()].clone().view(value.shape)
    return found


def unpacked_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The reverse of `packed_state`."""
    found = dict[str, Tensor]()
    for name, value in state.items():
        parameter, _, part = name.rpartition(".")
        if part.endswith(SCALE):
            continue
        if part == "step" or not num_blocks(value.numel()):
            found[name] = value
        else:
            parts = {each: state[f"{parameter}.{each}"] for each in (part, part + SCALE)}
            found[name] = Unpacked(parts, part, 0, value.numel()).values.clone().view(value.shape)
    return found
