"""Which device this daemon computes on, and how much memory it has to give."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import psutil
import torch

from peerd.errors import UsageError


def choose_device(wanted: str) -> torch.device:
    """auto takes CUDA, then Apple's GPU, then the CPU. UsageError when the one asked for is not here."""
    if wanted == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("mps") if torch.backends.mps.is_available() else torch.device("cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise UsageError(f"--device {wanted} is not a device", "use auto, cpu, cuda, cuda:N or mps") from None
    here = {
        "cpu": True,
        "cuda": torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count(),
        "mps": torch.backends.mps.is_available(),
    }
    if not here.get(device.type, False):
        raise UsageError(f"--device {wanted} is not available on this machine", "use --device auto")
    return device


def has_own_memory(device: torch.device) -> bool:
    """Whether what lies in the machine's memory spares the device's."""
    return device.type == "cuda"


def free_memory_bytes(device: torch.device) -> int:
    """What a stage may take: free memory of the GPU, or available memory of the machine."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """A device's memory in bytes."""

    total: int
    used: int
    """By anybody; on an Apple GPU by this process, for nothing else is told."""
    held: int
    """By this process on a GPU; 0 on a CPU, where it is the process's own memory."""


def memory_of(device: torch.device) -> DeviceMemory:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(total=total, used=total - free, held=torch.cuda.memory_reserved(device))
    if device.type == "mps":
        held = torch.mps.driver_allocated_memory()
        return DeviceMemory(total=torch.mps.recommended_max_memory(), used=held, held=held)
    machine = psutil.virtual_memory()
    return DeviceMemory(total=machine.total, used=machine.total - machine.available, held=0)


def memory_for(device: torch.device, allowed_bytes: int) -> int:
    """What a stage may take here: free memory, or what the owner allows (0: all) where that is less."""
    free = free_memory_bytes(device)
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, allowed_bytes / total) if allowed_bytes else 1.0, device)
    return min(free, allowed_bytes or free)


def utilisation(device: torch.device) -> float | None:
    """The share of the time in which it is busy, with anybody's work; None where it does not tell.

    Of a CPU all cores since this was last asked; of an NVIDIA GPU as its driver says, through the extra `gpu` where that is installed.
    """
    if device.type == "cpu":
        return psutil.cpu_percent() / 100
    if device.type == "cuda":
        with contextlib.suppress(Exception):  # no driver, no library, or NVML's "not supported": then it does not tell
            return torch.cuda.utilization(device) / 100
    return None


def describe(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))[:64]
    return {"mps": "Apple GPU"}.get(device.type, "CPU")
