"""Measures a device: how fast it multiplies and copies, and whether it gives its memory back."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

LONGEST_S = 1.5
"""The time for one measurement."""
COPIED_BYTES = 16 << 20
SLACK_BYTES = 64 << 20
"""What may still be held when everything is given back: torch keeps small workspaces of the device's libraries."""


def wait(device: torch.device) -> None:
    """Return when the device has done what it was given."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def rate(work: Callable[[], object], amount: float, device: torch.device, most_s: float = LONGEST_S) -> float:
    """Return how much of `amount` a second `work` does, by the best of several runs; the first one only warms up."""
    work()
    wait(device)
    best, until_s = 0.0, time.perf_counter() + most_s
    while True:
        began_s = time.perf_counter()
        work()
        wait(device)
        now_s = time.perf_counter()
        best = max(best, amount / max(now_s - began_s, 1e-9))
        if now_s > until_s:
            return best


def flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of matrix products: the size grows until one takes a hundredth of a second."""
    size, best = 256, 0.0
    while size <= 8192:
        left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
        found = rate(lambda left=left, right=right: left @ right, 2.0 * size**3, device, LONGEST_S / 4)  # type: ignore[misc]
        best = max(best, found)
        if 2.0 * size**3 / found > 0.01:
            break
        size *= 2
    return best


def copy_rates(device: torch.device) -> tuple[float, float]:
    """Bytes a second to the device and from it, of memory that is not pinned, as tensors come and go."""
    here = torch.zeros(COPIED_BYTES, dtype=torch.uint8)
    there = here.to(device)
    return rate(lambda: there.copy_(here), COPIED_BYTES, device), rate(lambda: here.copy_(there), COPIED_BYTES, device)


def memory_rate(device: torch.device) -> float:
    """Bytes a second that the device reads and writes of its own memory."""
    left: Tensor = torch.zeros(4 * COPIED_BYTES, dtype=torch.uint8, device=device)
    right = torch.empty_like(left)
    return rate(lambda: right.copy_(left), 2.0 * left.nbytes, device)
