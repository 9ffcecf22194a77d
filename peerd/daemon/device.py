"""The device that this daemon computes on: which one it is, its memory, and what is given back of that.

Every kind of device is asked through its module of torch, such as torch.cuda.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from peerd.errors import UsageError
from peerd.planner.memory import Room
from peerd.stage.shortage import empty_cache
from peerd.transfers import has_own_memory

OTHER_BUILD = "use --device cpu, or install a build of torch that has kernels for this card: older releases know older cards"


def choose_device(wanted: str) -> torch.device:
    """Return the device; auto tries CUDA, then Apple's GPU, then the CPU.

    Raises UsageError if the requested device is not here, or torch has no kernels for it; auto passes over a GPU without kernels.
    """
    if wanted == "auto":
        return next((card for card in _cards() if not lacks_kernels(card)), _without_card())
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise UsageError(f"--device {wanted} is not a device", "use auto, cpu, cuda, cuda:N or mps") from None
    if device.type == "cpu":
        return torch.device("cpu")  # its number only tells daemons on one processor apart
    if not _is_here(device):
        raise UsageError(f"--device {wanted} is not available on this machine", "use --device auto")
    if has_own_memory(device) and str(device) == device.type:
        device = torch.device(device.type, _module(device).current_device())  # a tensor's device has a number: the two must compare equal
    if lack := lacks_kernels(device):
        raise UsageError(f"--device {wanted}: {lack}", OTHER_BUILD)
    return device


def _cards() -> list[torch.device]:
    """The GPUs that torch calls CUDA's, which are NVIDIA's or AMD's, the present one first."""
    if not torch.cuda.is_available():
        return []
    present = torch.cuda.current_device()
    numbers = sorted(range(torch.cuda.device_count()), key=lambda number: number != present)
    return [torch.device("cuda", number) for number in numbers]


def _without_card() -> torch.device:
    return torch.device("mps") if torch.backends.mps.is_available() else torch.device("cpu")


def left_out() -> list[str]:
    """What each GPU lacks that auto passes over, in words."""
    return [lack for card in _cards() if (lack := lacks_kernels(card))]


def lacks_kernels(device: torch.device) -> str:
    """Return why torch cannot compute on a GPU that is there, in words; empty if it can, as far as is known."""
    module: Any = _module(device) if has_own_memory(device) else None
    if not hasattr(module, "get_arch_list") or not hasattr(module, "get_device_capability"):
        return ""
    if torch.version.hip:
        kind = module.get_device_properties(device).gcnArchName.partition(":")[0]
    else:
        kind = "sm_{}{}".format(*module.get_device_capability(device))
    built_for = module.get_arch_list()
    if has_kernels(built_for, kind):
        return ""
    return f"{describe(device)} is of the kind {kind}, and this torch {torch.__version__} has kernels for {', '.join(built_for)} only"


def has_kernels(built_for: Sequence[str], kind: str) -> bool:
    """Whether a build of torch with kernels for such kinds, as `torch.cuda.get_arch_list` names them, computes on a GPU of this kind.

    NVIDIA's kernels run on later cards of the same major number (sm_80 on sm_86), and what is kept as text (compute_80) on all later ones;
    those of one card alone (sm_90a) and AMD's (gfx1030) run on their own kind. A build that names none is not judged.
    """
    if not built_for or kind in built_for:
        return True
    of_card = _number_of(kind)
    for built in built_for:
        number = _number_of(built)
        is_of_line = built.startswith("compute_") or (built.startswith("sm_") and number // 10 == of_card // 10)
        if kind.startswith("sm_") and is_of_line and built[-1].isdigit() and number <= of_card:
            return True
    return False


def _number_of(kind: str) -> int:
    """86 of sm_86, and of sm_86a."""
    return int("".join(filter(str.isdigit, kind.partition("_")[2])) or 0)


def _is_here(device: torch.device) -> bool:
    if device.type == "mps":
        return torch.backends.mps.is_available()
    module: Any = getattr(torch, device.type, None)
    return hasattr(module, "device_count") and bool(module.is_available()) and (device.index or 0) < module.device_count()


def _module(device: torch.device) -> Any:
    """The module of torch for this kind of device."""
    return torch.get_device_module(device)


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

    Cards before NVIDIA's Ampere imitate bfloat16, which is slow and needs as much memory. Apple's have it from macOS 14 on.
    """
    if device.type == "mps" and precision == "bfloat16":
        is_new = getattr(torch.backends.mps, "is_macos_or_newer", lambda *_version: True)(14, 0)
        return "" if is_new else "Apple's GPUs compute no bfloat16 before macOS 14"
    if precision != "bfloat16" or not has_own_memory(device) or not hasattr(_module(device), "is_bf16_supported"):
        return ""
    with _module(device).device(device):  # torch asks the present device
        is_able = bool(_module(device).is_bf16_supported(including_emulation=False))
    return "" if is_able else f"{describe(device)} computes no bfloat16 by itself: torch imitates it, slowly"


def describe(device: torch.device) -> str:
    if has_own_memory(device):
        return str(_module(device).get_device_name(device))[:64]
    return {"mps": "Apple GPU"}.get(device.type, "CPU")
