"""Copies between the machine's memory and the device that computes, with as few waits of the processor for the device as can be."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SAID = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")
"""What errors say that are of no class of their own: of Apple's GPUs, of processors, of memory to pin, and of NVIDIA's libraries."""


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(each in str(error) for each in SAID)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the machine's memory on a device."""
    return tensor.to(device, non_blocking=queues_copies(device))


def has_own_memory(device: torch.device) -> bool:
    """Whether the device has memory apart from the machine's."""
    return device.type not in ("cpu", "mps")


def queues_copies(device: torch.device) -> bool:
    """Whether a copy to this device may go behind what it computes now, so that the processor does not wait.

    CUDA reads memory that is not pinned before the call returns, so that the memory may be used again (CUDA driver API, "API
    synchronization behavior"). Apple's driver reads it later, and is waited for.
    """
    return has_own_memory(device)


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


PIECE_BYTES = 32 << 20
"""Of pinned memory, in which a large vector comes to the machine's memory piece by piece."""


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


class QueuedFetch:
    """A tensor on its way from a device, on a stream of its own: beside what is computed there next, and beside what the processor does."""

    def __init__(self, tensor: Tensor) -> None:
        """Begin the copy of what this thread's computing makes, as soon as it is made. It returns at once."""
        module, stream = torch.get_device_module(tensor.device), _stream_from(tensor.device)
        self._pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        stream.wait_event(module.current_stream(tensor.device).record_event())
        tensor.record_stream(stream)
        with module.stream(stream):
            self._pinned.copy_(tensor, non_blocking=True)
            self._copied = stream.record_event()

    def take(self) -> Tensor:
        """Wait for the copy, on any thread, and return the tensor in memory of its own: pinned memory is scarce, and is used again."""
        self._copied.synchronize()
        return self._pinned.clone()


def fetch_later(tensor: Tensor) -> Callable[[], Tensor]:
    """Begin to copy a tensor to the machine's memory. The function that is returned waits for it and gives it, on any thread, once.

    On a device without copy streams, or without memory to pin, that function makes the copy.
    """
    if has_copy_streams(tensor.device):
        try:
            return QueuedFetch(tensor).take
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
    return lambda: to_host(tensor)[0]


def fetch_into(target: Tensor, source: Tensor) -> None:
    """Copy a vector [n] of a device into one of the machine's memory. The processor waits.

    A device with copy streams copies a piece into pinned memory while the processor takes the one before it from there: into new memory
    that is ten times as fast as one copy (NVIDIA's driver then waits for each page of it to be made). Without memory to pin it is one copy.
    """
    buffers = _piece_buffers(target) if has_copy_streams(source.device) and len(target) else []
    if not buffers:
        target.copy_(source)
        return
    module, stream = torch.get_device_module(source.device), _stream_from(source.device)
    pieces = [*zip(*(torch.split(each, PIECE_BYTES // each.itemsize) for each in (target, source)), strict=True)]
    stream.wait_event(module.current_stream(source.device).record_event())
    under_way: Any = None
    for number, (into, of) in enumerate(pieces):
        buffer = buffers[number % 2][: len(into)]
        of.record_stream(stream)
        with module.stream(stream):
            buffer.copy_(of, non_blocking=True)
            copied = stream.record_event()
        if under_way is not None:
            _take(*under_way)
        under_way = into, buffer, copied
    _take(*under_way)


def _piece_buffers(target: Tensor) -> list[Tensor]:
    """Pinned memory for two pieces of a vector; none if there is not that much to pin."""
    length = min(len(target), PIECE_BYTES // target.itemsize)
    try:
        return [torch.empty(length, dtype=target.dtype, pin_memory=True) for _ in range(2)]
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return []


def _take(into: Tensor, buffer: Tensor, copied: Any) -> None:
    copied.synchronize()
    into.copy_(buffer)


class DeviceTime:
    """The time that a device takes for what one thread gives it between two moments, however late it begins with that.

    On a device without streams the thread waits for its work, so the time is the clock's.
    """

    def __init__(self, device: torch.device) -> None:
        """Begin with what this thread computes from now on."""
        self.began_s = time.monotonic()
        """When this thread began to give it work."""
        self._took_s, self._has_ended = 0.0, False
        self._module: Any = torch.get_device_module(device) if has_copy_streams(device) else None
        self._device = device
        self._began: Any = self._mark()
        self._ended: Any = None

    def _mark(self) -> Any:
        if self._module is None:
            return None
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        return event

    def end(self) -> None:
        """End with what it has been given so far, or where this was called before."""
        if not self._has_ended:
            self._has_ended, self._ended, self._took_s = True, self._mark(), time.monotonic() - self.began_s

    @property
    def is_over(self) -> bool:
        """Whether the device has done it."""
        return self._ended is None or self._ended.query()

    def seconds(self) -> float:
        """Return the time, once it has ended. Waits until the device has done it."""
        if self._ended is None:
            return self._took_s
        self._ended.synchronize()
        return float(self._began.elapsed_time(self._ended)) / 1000


def has_copy_streams(device: torch.device) -> bool:
    """Whether copies to and from this device can go beside what it computes."""
    return queues_copies(device) and hasattr(torch.get_device_module(device), "Stream")


@functools.cache
def _stream_to(device: torch.device) -> Any:
    """The stream of a device's copies from the machine's memory. It lasts as long as the process."""
    return torch.get_device_module(device).Stream(device=device)


@functools.cache
def _stream_from(device: torch.device) -> Any:
    """The same for copies to the machine's memory: a device copies both ways at once."""
    return torch.get_device_module(device).Stream(device=device)
