"""Tests the kernels that stages are made of against plain arithmetic in double precision, which uses none of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend
from torch.optim.adamw import adamw

Rows = list[list[float]]
PLAIN = "plain"
_KERNEL_NAMES = {
    SDPBackend.MATH: PLAIN,
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient",
    SDPBackend.CUDNN_ATTENTION: "cudnn",
}
TOLERANCE = 2e-5
"""Largest difference, as a share of the largest value, that rounding in float32 explains."""


def _numbers(rows: int, columns: int, salt: int) -> Rows:
    """Small numbers of both signs, the same on every machine."""
    return [[((row * 31 + column * 17 + salt * 7) % 23 - 11) / 8 for column in range(columns)] for row in range(rows)]


def _product(left: Rows, right: Rows) -> Rows:
    return [[math.fsum(a * b for a, b in zip(row, column, strict=True)) for column in zip(*right, strict=True)] for row in left]


def _soft(row: Sequence[float]) -> list[float]:
    powers = [math.exp(value - max(row)) for value in row]
    return [power / math.fsum(powers) for power in powers]


def _normed(row: Sequence[float]) -> list[float]:
    mean = math.fsum(row) / len(row)
    spread = math.fsum((value - mean) ** 2 for value in row) / len(row)
    return [(value - mean) / math.sqrt(spread + 1e-5) for value in row]


def _transposed(rows: Rows) -> Rows:
    return [list(column) for column in zip(*rows, strict=True)]


def _attention(query: Rows, key: Rows, value: Rows) -> Rows:
    """Causal."""
    scores = [[each / math.sqrt(len(query[0])) for each in row] for row in _product(query, _transposed(key))]
    shares = [_soft(row[: place + 1]) + [0.0] * (len(row) - place - 1) for place, row in enumerate(scores)]
    return _product(shares, value)


def _adamw(values: Sequence[float], gradients: Sequence[float]) -> list[float]:
    """The first update, with rate 0.01, decay 0.1, betas 0.9 and 0.95."""
    return [value * (1 - 0.01 * 0.1) - 0.01 * given / (abs(given) + 1e-8) for value, given in zip(values, gradients, strict=True)]


LEFT, RIGHT, THIRD = _numbers(9, 16, 1), _numbers(16, 11, 2), _numbers(9, 16, 3)
Made = tuple[Tensor, Rows]
"""What the device gives, and what it should give."""


def matrix_product(device: torch.device) -> Made:
    return _on(LEFT, device) @ _on(RIGHT, device), _product(LEFT, RIGHT)


def softmax(device: torch.device) -> Made:
    return functional.softmax(_on(LEFT, device), -1), [_soft(row) for row in LEFT]


def layer_norm(device: torch.device) -> Made:
    return functional.layer_norm(_on(LEFT, device), (16,)), [_normed(row) for row in LEFT]


def gelu(device: torch.device) -> Made:
    return functional.gelu(_on(LEFT, device)), [[x * 0.5 * (1 + math.erf(x / math.sqrt(2))) for x in row] for row in LEFT]


def embedding(device: torch.device) -> Made:
    places = [3, 0, 8, 3]
    return functional.embedding(torch.tensor(places, device=device), _on(LEFT, device)), [LEFT[place] for place in places]


def attention(device: torch.device) -> Made:
    query, key, value = (_on(rows, device)[None, None] for rows in (LEFT, THIRD, LEFT))
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)[0, 0], _attention(LEFT, THIRD, LEFT)


def cross_entropy(device: torch.device) -> Made:
    labels = [place % 16 for place in range(9)]
    loss = -math.fsum(math.log(_soft(row)[label]) for row, label in zip(LEFT, labels, strict=True)) / 9
    return functional.cross_entropy(_on(LEFT, device), torch.tensor(labels, device=device))[None, None], [[loss]]


def gradient(device: torch.device) -> Made:
    """The gradient of a matrix product is the other matrix, summed."""
    left = _on(LEFT, device).requires_grad_()
    (found,) = torch.autograd.grad((left @ _on(RIGHT, device)).sum(), [left])
    return found, [[math.fsum(row) for row in RIGHT]] * 9


def optimizer(device: torch.device) -> Made:
    value, given = _on(LEFT, device), _on(THIRD, device)
    moments, step = (torch.zeros_like(value), torch.zeros_like(value)), torch.zeros((), device=device)
    rates = {"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    adamw(
        [value], [given], [moments[0]], [moments[1]], [], [step],
        fused=True, foreach=False, amsgrad=False, maximize=False, **rates,  # type: ignore[arg-type]
    )  # fmt: skip
    return value, [_adamw(row, gradients) for row, gradients in zip(LEFT, THIRD, strict=True)]


def integers(device: torch.device) -> Made:
    """Masks of dropout, and packed moments, are products of 32-bit words, and shifts."""
    words = [[(place * 2654435761) & 0xFFFFFFFF for place in range(16)]]
    mixed = torch.tensor(words, dtype=torch.int64, device=device).mul_(0x21F0AAAD).bitwise_and_(0xFFFFFFFF)
    found = mixed.bitwise_xor_(mixed >> 15) & 0xFFFF
    expected = [(word * 0x21F0AAAD) & 0xFFFFFFFF for word in words[0]]
    return found.float(), [[float((word ^ (word >> 15)) & 0xFFFF) for word in expected]]


KERNELS: tuple[Callable[[torch.device], Made], ...] = (
    matrix_product, softmax, layer_norm, gelu, embedding, attention, cross_entropy, gradient, optimizer, integers,
)  # fmt: skip


def attention_kernel(device: torch.device, dtype: torch.dtype) -> str:
    """The name of the kernel that torch chooses for causal attention with heads of 64 numbers; "unknown" where there is none."""
    try:
        query = torch.zeros(1, 2, 128, 64, device=device, dtype=dtype)
        chosen = SDPBackend(torch._fused_sdp_choice(query, query, query, is_causal=True))
    except (RuntimeError, TypeError, ValueError, AttributeError):  # a device that has no such choice or dtype, or another torch
        return "unknown"
    return _KERNEL_NAMES.get(chosen, "unknown")


def fault(kernel: Callable[[torch.device], Made], device: torch.device) -> str:
    """Return what is wrong with a kernel on the device, in words; empty if nothing is."""
    found, rows = kernel(device)
    expected, here = torch.tensor(rows, dtype=torch.float64), found.detach().cpu().double()
    if here.shape != expected.shape:
        return f"its result has the shape {list(here.shape)} in place of {list(expected.shape)}"
    worst = float((here - expected).abs().amax() / expected.abs().amax().clamp_min(1e-30))
    return "" if worst <= TOLERANCE else f"a value is off by {worst:.1e} of the largest one, where rounding explains {TOLERANCE:.0e}"


CHECKS: dict[str, Callable[[torch.device], str]] = {kernel.__name__.replace("_", " "): partial(fault, kernel) for kernel in KERNELS}
"""By kernel."""


def _on(rows: Rows, device: torch.device) -> Tensor:
    return torch.tensor(rows, device=device)
