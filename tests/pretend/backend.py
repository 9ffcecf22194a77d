"""Adds the pretend device to torch: its name, its module `torch.pretend`, the creation of tensors, and mixed precision."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._device import _device_constructors
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.pretend import autocast, streams
from tests.pretend.meter import METERS, NUM_DEVICES
from tests.pretend.tensor import NAME, PretendTensor, copy

KEY = "PrivateUse1"
Device = torch.device | int | str | None
_kept: list[Any] = []
"""What was added to torch is taken back when its library goes."""


def _index(device: Device) -> int:
    if device is None or isinstance(device, int):
        return device or 0
    return torch.device(device).index or 0


class Module:
    """`torch.pretend`, with those functions of `torch.cuda` that peerd uses."""

    _present = 0

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        del seed

    def current_device(self) -> int:
        return self._present

    def device_count(self) -> int:
        return NUM_DEVICES

    def get_device_name(self, device: Device = None) -> str:
        return f"Pretend GPU {_index(device)}"

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        """Device 1 is an old card."""
        return including_emulation or self._present == 0

    @contextlib.contextmanager
    def device(self, device: Device) -> Iterator[None]:
        before, self._present = self._present, _index(device)
        try:
            yield
        finally:
            self._present = before

    def mem_get_info(self, device: Device = None) -> tuple[int, int]:
        meter = METERS[_index(device)]
        return meter.total_bytes - meter.others_bytes - meter.reserved, meter.total_bytes

    def memory_allocated(self, device: Device = None) -> int:
        return METERS[_index(device)].allocated

    def memory_reserved(self, device: Device = None) -> int:
        return METERS[_index(device)].reserved

    def max_memory_allocated(self, device: Device = None) -> int:
        return METERS[_index(device)].peak

    def reset_peak_memory_stats(self, device: Device = None) -> None:
        METERS[_index(device)].reset_peak()

    def set_per_process_memory_fraction(self, fraction: float, device: Device = None) -> None:
        meter = METERS[_index(device)]
        meter.allowed_bytes = int(fraction * meter.total_bytes)

    def empty_cache(self) -> None:
        for meter in METERS:
            meter.empty_cache()

    Event = staticmethod(streams.Event)
    Stream = staticmethod(streams.Stream)
    stream = staticmethod(streams.stream)
    current_stream = staticmethod(streams.current_stream)

    def synchronize(self, device: Device = None) -> None:
        METERS[_index(device)].wait("synchronize")
        streams.all_over()


class Guard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


def _empty(
    size: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None, memory_format: Any = None
) -> Tensor:
    return PretendTensor(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format), _index(device))


def _empty_strided(size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None) -> Tensor:
    return PretendTensor(torch.empty_strided(size, stride, dtype=dtype), _index(device))


def _arange(*bounds: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None) -> Tensor:
    return PretendTensor(torch.arange(*bounds, dtype=dtype), _index(device))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Where torch makes a tensor of plain numbers, its copy to the device does not come through `__torch_dispatch__`."""
    copy(target, source, non_blocking=non_blocking)
    return target


def register() -> None:
    """Add the device to torch, once in a process."""
    if _kept:
        return
    _setup_privateuseone_for_python_backend(NAME, backend_module=Module(), device_guard=Guard())
    make: Any = torch.library.Library
    library = make("aten", "IMPL")
    library.impl("empty.memory_format", _empty, KEY)
    library.impl("empty_strided", _empty_strided, KEY)
    library.impl("_copy_from", _copy_from, KEY)
    for name in ("arange", "arange.start", "arange.start_step"):
        library.impl(name, _arange, KEY)
    _device_constructors()  # `with torch.device(...)` asks once which functions it changes: the one below calls that which it knows
    torch.empty = streams.empty  # type: ignore[assignment]
    torch.Tensor.pin_memory = streams.pin  # type: ignore[method-assign, assignment]  # a build for processors alone has none
    _kept.extend([library, *autocast.register()])
