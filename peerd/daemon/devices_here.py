"""`python -m peerd.child peerd.daemon.devices_here {}`: the devices of this machine for which a daemon each is worth it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from peerd.daemon.device import lacks_kernels


@dataclass(frozen=True, slots=True)
class Request:
    """Nothing has to be said."""


def run(request: Request) -> dict[str, Any]:
    """Return every accelerator; the processor only where there is none."""
    del request
    return {"devices": accelerators() or ["cpu"]}


def accelerators() -> list[str]:
    """The names of the GPUs that torch can use: NVIDIA's and AMD's are `cuda:N`, Apple's one is `mps`."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return []
    if found.type == "mps":
        return ["mps"]
    names = [f"{found.type}:{number}" for number in range(torch.accelerator.device_count())]
    return [name for name in names if not lacks_kernels(torch.device(name))]
