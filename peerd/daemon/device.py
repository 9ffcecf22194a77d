"""The device that this daemon computes on, and its available memory."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import psutil
import torch

from peerd.errors import UsageError
from peerd.planner.memory import Room


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
    here = {
        "cpu": True,
        "cuda": torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count(),
        "mps": torch.backends.mps.is_available(),
    }
    if not here.get(device.type, False):
        raise UsageError(f"--device {wanted} is not available on this machine", "use --device auto")
    return device


def has_own_memory(device: torch.device) -> bool:
    """True if the device has memory apart from the machine's."""
    return device.type == "cuda"


def free_memory_bytes(device: torch.device) -> int:
    """Return the memory that a stage may take: free memory of the GPU, or available memory of the machine."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """A device's memory in bytes."""

    total: int
    used: int
    """By all processes; on an Apple GPU by this process only, because nothing else is reported."""
    held: int
    """By this process on a GPU; 0 on a CPU, where it is part of the process's own memory."""


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
    """Return the memory that a stage may take: free memory, or the owner's limit (0: none) if that is less."""
    free = free_memory_bytes(device)
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, allowed_bytes / total) if allowed_bytes else 1.0, device)
    return min(free, allowed_bytes or free)


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


def describe(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))[:64]
    return {"mps": "Apple GPU"}.get(device.type, "CPU")
