"""Which device this daemon computes on, and how much memory it has to give."""

from __future__ import annotations

import contextlib

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
        with contextlib.suppress(ModuleNotFoundError, RuntimeError):
            return torch.cuda.utilization(device) / 100
    return None


def describe(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))[:64]
    return {"mps": "Apple GPU"}.get(device.type, "CPU")
