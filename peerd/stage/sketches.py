"""Sketches of a stage's state, by which two peers find out how far their states are apart: rule 21 (prove).

A sketch has a few sums of each tensor's elements, each element times a random sign. The signs follow from a seed. The difference of two
sketches under one seed has about the length of the difference of the tensors, whatever the seed is. Someone who does not know the seed
cannot make two unlike states with like sketches.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from blake3 import blake3
from torch import Tensor

from peerd.errors import BadMessageError
from peerd.table.record import PeerId
from peerd.wire.messages import SKETCH_SEED_BYTES

SUMS = 16
"""So many sums of each tensor: the length of a difference is known to a third."""
COLUMNS, ROWS = 4096, 256
"""A tensor is read as rows of so many elements, which share a sign; so many rows at once."""
KINDS = ("parameters", "ahead", "optimizer", "loss_scale", "tied")
"""Parts of a state that peers at one step have alike. Norms that were told of earlier steps may be fewer where a peer came later."""
PREVIOUS = ("previous",)
CODE_TIMES = 500.0
"""Moments of eight bits: where two devices round differently, some of their codes are neighbours."""


@dataclass(frozen=True, slots=True)
class Sketch:
    """The sums of each tensor, [tensors, SUMS] in float64, and by which length a difference is measured, [tensors, 1]."""

    sums: Tensor
    scales: Tensor

    def to_bytes(self) -> bytes:
        return self.sums.numpy().tobytes()

    def residual(self, told: bytes) -> StateResidual:
        """How far another state is off this one, whose sums under the same seed are told. Raises BadMessageError if they are damaged."""
        if len(told) != self.sums.numel() * 8:
            raise BadMessageError("a sketch of another number of tensors than this stage has")
        theirs = torch.frombuffer(bytearray(told), dtype=torch.float64).view(self.sums.shape)
        if not torch.isfinite(theirs).all():
            raise BadMessageError("a sketch with a sum that is not finite")
        return StateResidual((theirs - self.sums) / self.scales)


def new_seed() -> bytes:
    return os.urandom(SKETCH_SEED_BYTES)


@dataclass(frozen=True, slots=True)
class StateResidual:
    """By how much each tensor of a state is off that of another one, along SUMS random directions, as a share of its length."""

    shares: Tensor

    def distance(self, other: StateResidual | None = None) -> float:
        """Return by how much the tensor that is off most is off: the other state, or the one that both were compared with."""
        apart = self.shares if other is None else self.shares - other.shares
        return float(torch.linalg.vector_norm(apart, dim=1).max())


def distances(residuals: Mapping[PeerId, StateResidual]) -> Callable[[PeerId | None, PeerId | None], float]:
    """How far any two states are apart, by how far they are off one that None stands for, and each peer that has no residual."""

    def apart(one: PeerId | None, other: PeerId | None) -> float:
        mine, theirs = (residuals.get(peer) if peer is not None else None for peer in (one, other))
        if mine is None:
            return 0.0 if theirs is None else theirs.distance()
        return mine.distance(theirs)

    return apart


@torch.no_grad()
def sketch_of(tensors: Mapping[str, Tensor], seed: bytes, kinds: Sequence[str] = KINDS) -> Sketch:
    """The sketch of these kinds of a state's tensors. The tensors are read where they are.

    Of a tensor that has less than its share of all numbers of its kind, as its gradients are only noise, a difference is measured by that
    share.
    """
    names = [name for name in sorted(tensors) if name.partition("/")[0] in kinds]
    found = [_sums_of(tensors[name].detach().reshape(-1), blake3(seed + name.encode()).digest()) for name in names]
    squares: dict[str, tuple[float, int]] = {}
    for name, (_sums, square) in zip(names, found, strict=True):
        total, number = squares.get(_part_of(name), (0.0, 0))
        squares[_part_of(name)] = total + square, number + tensors[name].numel()
    scales = []
    for name, (_sums, square) in zip(names, found, strict=True):
        (total, number), size = squares[_part_of(name)], tensors[name].numel()
        scale = math.sqrt(max(square, total * size / max(1, number))) or 1.0
        scales.append(scale * (CODE_TIMES if tensors[name].dtype is torch.uint8 else 1.0))
    return Sketch(torch.stack([sums for sums, _square in found]), torch.tensor(scales, dtype=torch.float64).view(-1, 1))


def _part_of(name: str) -> str:
    """Numbers of one part are of one size: parameters, or one of an optimizer's moments."""
    kind, _, rest = name.partition("/")
    return f"{kind} {rest.rpartition('.')[2]}" if kind == "optimizer" else kind


def _sums_of(values: Tensor, seed: bytes) -> tuple[Tensor, float]:
    """The sums of a tensor, and that of its squares."""
    drawn = torch.Generator().manual_seed(int.from_bytes(seed[:7], "little"))
    columns = torch.zeros(COLUMNS, dtype=torch.float64)
    square, rows = 0.0, -(-values.numel() // COLUMNS)
    signs = torch.randint(0, 2, (rows,), generator=drawn).mul_(2).sub_(1)
    for first in range(0, rows, ROWS):
        piece = values[first * COLUMNS : (first + ROWS) * COLUMNS]
        piece = piece if piece.dtype is torch.float64 else piece.float()
        whole = piece.numel() // COLUMNS
        of_rows = signs[first : first + ROWS].to(piece.device, piece.dtype)
        if whole:
            columns += (of_rows[:whole] @ piece[: whole * COLUMNS].view(whole, COLUMNS)).double().cpu()
        if rest := piece.numel() % COLUMNS:
            columns[:rest] += (of_rows[whole] * piece[whole * COLUMNS :]).double().cpu()
        square += float(piece.double().square().sum()) if piece.numel() < COLUMNS else float(torch.linalg.vector_norm(piece)) ** 2
    columns *= torch.randint(0, 2, (COLUMNS,), generator=drawn).mul_(2).sub_(1)
    return columns.view(SUMS, -1).sum(1), square
