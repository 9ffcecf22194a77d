"""Copies between the machine's memory and the device that computes, with as few waits of the processor for the device as can be."""

from __future__ import annotations

import functools
from typing import Any

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


class QueuedCopy:
    """A tensor on its way to a device, on a stream of its own: beside what is computed there, and beside what the processor does.

    The copy reads pinned memory, which torch gives away only once the copy is done (it notes an event with every such copy).
    """

    def __init__(self, tensor: Tensor, device: torch.device) -> None:
        """Begin the copy of a tensor of the machine's memory, on any thread. It returns at once."""
        module, stream = torch.get_device_module(device), _stream_to(device)
        pinned = tensor.pin_memory()
        with module.stream(stream):
            self._tensor = pinned.to(device, non_blocking=True)
            self._copied = stream.record_event()

    def take(self) -> Tensor:
        """Return the tensor for what this thread computes from now on: that waits for the copy, and the processor does not."""
        stream: Any = torch.get_device_module(self._tensor.device).current_stream(self._tensor.device)
        stream.wait_event(self._copied)
        self._tensor.record_stream(stream)
        return self._tensor


def has_copy_streams(device: torch.device) -> bool:
    """Whether copies to this device can go beside what it computes."""
    return queues_copies(device) and hasattr(torch.get_device_module(device), "Stream")


@functools.cache
def _stream_to(device: torch.device) -> Any:
    """The stream of a device's copies from the machine's memory. It lasts as long as the process."""
    return torch.get_device_module(device).Stream(device=device)
