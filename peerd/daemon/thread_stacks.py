"""The stacks of a card's threads: memory that NVIDIA's driver keeps for a process, though no tensor lies in it.

The driver keeps as much for each thread that the card can run at once as the greediest kernel so far has needed, 270 MB in all on an H100.
It gives that back only where the limit of a stack is set (CUDA driver API, cuCtxSetLimit). Other drivers have nothing of the kind.
"""

from __future__ import annotations

import contextlib
import ctypes

import torch

_STACK_LIMIT = 0
"""CU_LIMIT_STACK_SIZE of CUDA's driver."""
_SMALLEST = 16
"""Bytes."""
_usual: dict[int, int] = {}
"""The limit of each card whose stacks were given back, in bytes."""


def give_back_stacks(device: torch.device) -> None:
    """Give back what the driver keeps for stacks. Nothing computes on the device until `take_stacks`."""
    if (driver := _driver_of(device)) is None:
        return
    usual = ctypes.c_size_t()
    if driver.cuCtxGetLimit(ctypes.byref(usual), _STACK_LIMIT) == 0 and usual.value > _SMALLEST:
        _usual[device.index] = usual.value
        driver.cuCtxSetLimit(_STACK_LIMIT, ctypes.c_size_t(_SMALLEST))


def take_stacks(device: torch.device) -> None:
    """Allow stacks of the usual size again."""
    if (usual := _usual.pop(device.index, 0)) and (driver := _driver_of(device)) is not None:
        driver.cuCtxSetLimit(_STACK_LIMIT, ctypes.c_size_t(usual))


def _driver_of(device: torch.device) -> ctypes.CDLL | None:
    """The driver's library, with the card's context as this thread's. None where the device is no NVIDIA GPU."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    torch.cuda.set_device(device)
    torch.cuda.synchronize(device)
    with contextlib.suppress(OSError):
        return ctypes.CDLL("libcuda.so.1")
    return None
