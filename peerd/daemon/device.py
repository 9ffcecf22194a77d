"""The device that this daemon computes on: which one it is, its memory, and what is given back of that.

Every kind of device is asked through its module of torch, such as torch.cuda.
"""

from __future__ import annotations

import contextlib
import gc
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from peerd.errors import UsageError
from peerd.planner.memory import Room
from peerd.stage.shortage import empty_cache


def choose_device(wanted: str) -> torch.device:
    """Return the device; auto tries CUDA, then Apple's GPU, then the CPU. Raises UsageError if the requested device is not here."""
    if wanted == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("mps") if torch.backends.mps.is_available() else torch.device("cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise UsageError(f"--device {wanted} is not a device", "use auto, cpu, cuda, cuda:N or mps") from None
    if device.type == "cpu":
        return device
    if not _is_here(device):
        raise UsageError(f"--device {wanted} is not available on this machine", "use --device auto")
    if has_own_memory(device) and str(device) == device.type:
        return torch.device(device.type, _module(device).current_device())  # a tensor's device has a number: the two must compare equal
    return device


def _is_here(device: torch.device) -> bool:
    if device.type == "mps":
        return torch.backends.mps.is_available()
    module: Any = getattr(torch, device.type, None)
    return hasattr(module, "device_count") and bool(module.is_available()) and (device.index or 0) < module.device_count()


def _module(device: torch.device) -> Any:
    """The module of torch for this kind of device."""
    return torch.get_device_module(device)


def has_own_memory(device: torch.device) -> bool:
    """True if the device has memory apart from the machine's."""
    return device.type not in ("cpu", "mps")


def free_memory_bytes(device: torch.device) -> int:
    """Return the memory that a stage may take: free memory of the GPU, or available memory of the machine.

    What this process has freed and torch keeps for it is free, too.
    """
    if has_own_memory(device):
        module = _module(device)
        return int(module.mem_get_info(device)[0] + module.memory_reserved(device) - module.memory_allocated(device))
    cached = torch.mps.driver_allocated_memory() - torch.mps.current_allocated_memory() if device.type == "mps" else 0
    return int(psutil.virtual_memory().available) + cached


def give_back_memory(device: torch.device) -> int:
    """Give back what torch keeps of the device's memory for this process, though no tensor lies in it. Returns the bytes still held."""
    gc.collect()  # tensors that only cycles refer to
    empty_cache(device)
    return memory_of(device).held


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """A device's memory in bytes."""

    total: int
    used: int
    """By all processes; on an Apple GPU by this process only, because nothing else is reported."""
    held: int
    """By this process on a GPU; 0 on a CPU, where it is part of the process's own memory."""


def memory_of(device: torch.device) -> DeviceMemory:
    if has_own_memory(device):
        free, total = _module(device).mem_get_info(device)
        return DeviceMemory(total=total, used=total - free, held=_module(device).memory_reserved(device))
    if device.type == "mps":
        held = torch.mps.driver_allocated_memory()
        return DeviceMemory(total=torch.mps.recommended_max_memory(), used=held, held=held)
    machine = psutil.virtual_memory()
    return DeviceMemory(total=machine.total, used=machine.total - machine.available, held=0)


def memory_for(device: torch.device, allowed_bytes: int) -> int:
    """Return the memory that a stage may take: free memory, or what is left of the owner's limit (0: none) if that is less."""
    free, left = free_memory_bytes(device), allowed_bytes
    if has_own_memory(device):
        module = _module(device)
        total = module.mem_get_info(device)[1]
        module.set_per_process_memory_fraction(min(1.0, allowed_bytes / total) if allowed_bytes else 1.0, device)
        left -= module.memory_allocated(device)
    return max(0, min(free, left)) if allowed_bytes else free


def room_on(device: torch.device, allowed_bytes: int) -> Room:
    """The memory that a stage may take; `allowed_bytes` is the owner's limit for the device (0: none)."""
    host = int(psutil.virtual_memory().available) if has_own_memory(device) else None
    return Room(memory_for(device, allowed_bytes), host)


def utilisation(device: torch.device) -> float | None:
    """Return the share of time that the device is busy, for all processes; None if that is unknown.

    For a CPU: all cores, since the last call. For an NVIDIA GPU: as its driver reports, if the extra `gpu` is installed.
    """
    if device.type == "cpu":
        return psutil.cpu_percent() / 100
    if device.type == "cuda":
        with contextlib.suppress(Exception):  # no driver, no library, or NVML's "not supported": unknown
            return torch.cuda.utilization(device) / 100
    return None


def lacks(device: torch.device, precision: str) -> str:
    """Return what the device lacks for a run's `train.precision`, in words; empty if nothing is known to lack.

    Cards before NVIDIA's Ampere imitate bfloat16, which is slow and needs as much memory.
    """
    if precision != "bfloat16" or not has_own_memory(device) or not hasattr(_module(device), "is_bf16_supported"):
        return ""
    with _module(device).device(device):  # torch asks the present device
        is_able = bool(_module(device).is_bf16_supported(including_emulation=False))
    return "" if is_able else f"{describe(device)} computes no bfloat16 by itself: torch imitates it, slowly"


def describe(device: torch.device) -> str:
    if has_own_memory(device):
        return str(_module(device).get_device_name(device))[:64]
    return {"mps": "Apple GPU"}.get(device.type, "CPU")
