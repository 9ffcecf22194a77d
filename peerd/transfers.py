"""Copies between the machine's memory and the device that computes, with as few waits of the processor for the device as can be."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the machine's memory on a device."""
    return tensor.to(device, non_blocking=queues_copies(device))


def queues_copies(device: torch.device) -> bool:
    """Whether a copy to this device may go behind what it computes now, so that the processor does not wait.

    CUDA reads memory that is not pinned before the call returns, so that the memory may be used again (CUDA driver API, "API
    synchronization behavior"). Apple's driver reads it later, and is waited for.
    """
    return device.type not in ("cpu", "mps")


def to_host(*tensors: Tensor) -> list[Tensor]:
    """Return tensors of one device in the machine's memory; those of the processor as they are. The processor waits for the device once.

    They travel as one block of bytes: those of several bytes a number have to stand before those of one.
    """
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return [tensor.detach() for tensor in tensors]
    if len(tensors) == 1:
        return [tensors[0].detach().cpu()]
    bodies = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    parts = torch.split_with_sizes(torch.cat(bodies).cpu(), [body.numel() for body in bodies])
    return [part.view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
