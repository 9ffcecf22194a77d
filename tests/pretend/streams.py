"""Streams of the pretend device. Its work is done at once, but a tensor may be used only where a GPU would have it ready, and an event is
over only once something has waited for it: a GPU may be that slow.

What a stream makes is used on another one only once that has waited for an event after it (else a GPU computes with what is not there yet),
and once it is recorded for that stream (else its memory may be given away too early).
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from tests.pretend.meter import METERS

_HERE = threading.local()
"""Its `stream` is the one on which this thread's work goes."""
_PINNED = "pretend_pinned"


@dataclass(eq=False)
class Stream:
    """An order of work on one device."""

    device: Any = None
    done: int = 0
    """How many pieces of work were put on it."""
    given: int = 0
    """The same, and the events on it."""
    over: int = 0
    """How many of `given` the processor knows to be done, because it has waited for them."""
    seen: WeakKeyDictionary[Stream, int] = field(default_factory=WeakKeyDictionary)
    """How far it has waited for other streams that still exist, by `done`."""
    follows: WeakKeyDictionary[Stream, int] = field(default_factory=WeakKeyDictionary)
    """The same by `given`."""
    under_way: list[tuple[int, Callable[[], object]]] = field(default_factory=list)
    """Copies to the processor: each with its number and what makes it be there."""

    def __deepcopy__(self, _known: object) -> Stream:
        """A copy of a tensor was made on the same stream."""
        return self

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.seen[event.stream] = max(self.seen.get(event.stream, 0), event.done)
        self.follows[event.stream] = max(self.follows.get(event.stream, 0), event.given)


class Event:
    """A place in a stream's order of work."""

    stream: Stream
    done: int
    given: int
    at_s: float
    follows: dict[Stream, int]
    """How far other streams are once this one is here."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._is_timed = enable_timing

    def record(self, stream: Stream) -> None:
        stream.given += 1
        self.stream, self.done, self.given, self.at_s = stream, stream.done, stream.given, time.perf_counter()
        self.follows = dict(stream.follows)

    def query(self) -> bool:
        return self.given <= self.stream.over

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds."""
        if not (self._is_timed and end._is_timed):
            raise ValueError("both events need enable_timing")
        return 1000 * (end.at_s - self.at_s)

    def synchronize(self) -> None:
        """Wait until the stream's work up to here is done."""
        if self.stream.device is not None:
            METERS[self.stream.device.index].wait("synchronize")
        for stream, given in (self.follows | {self.stream: self.given}).items():
            stream.over = max(stream.over, given)
        while self.stream.under_way and self.stream.under_way[0][0] <= self.done:
            self.stream.under_way.pop(0)[1]()


@dataclass
class Made:
    """Where a tensor was made."""

    stream: Stream
    number: int
    recorded: WeakSet[Stream] | None = None

    def record(self, stream: Stream) -> None:
        self.recorded = self.recorded or WeakSet()
        self.recorded.add(stream)

    def check_use(self) -> None:
        """Raise RuntimeError if the present stream may not use the tensor."""
        here = current_stream()
        if here is self.stream:
            return
        if here.seen.get(self.stream, 0) < self.number:
            raise RuntimeError("a tensor is used on a stream that has not waited for the stream that makes it")
        if self.recorded is None or here not in self.recorded:
            raise RuntimeError("a tensor of one stream is used on another one for which it is not recorded")


_EMPTY = torch.empty
USUAL = Stream()
"""Where work goes unless a thread says otherwise."""


def current_stream(_device: object = None) -> Stream:
    return getattr(_HERE, "stream", USUAL)


def all_over() -> None:
    """Note that the processor has waited for the present stream."""
    here = current_stream()
    here.over = here.given


@contextlib.contextmanager
def stream(wanted: Stream) -> Iterator[None]:
    """Put this thread's work on a stream."""
    before, _HERE.stream = current_stream(), wanted
    try:
        yield
    finally:
        _HERE.stream = before


def noted() -> Made:
    """Note a piece of work on the present stream."""
    here = current_stream()
    here.done += 1
    here.given += 1
    return Made(here, here.done)


def _is_pinned(tensor: Tensor) -> bool:
    """Whether a tensor lies in memory that the device reads and writes by itself, or sees a part of such."""
    return any(getattr(each, _PINNED, False) for each in (tensor, tensor._base))


def pin(tensor: Tensor) -> Tensor:
    """A tensor in memory that the device reads by itself, as `Tensor.pin_memory` makes it where there is a GPU."""
    if _is_pinned(tensor):
        return tensor
    copied = tensor.clone()
    setattr(copied, _PINNED, True)
    return copied


def empty(*size: Any, pin_memory: bool = False, **how: Any) -> Tensor:
    """`torch.empty`, which can pin memory where there is a GPU."""
    made = _EMPTY(*size, **how)
    if pin_memory:
        setattr(made, _PINNED, True)
    return made


def fetch(target: Tensor, source: Tensor) -> None:
    """Copy to the processor on the present stream: what is there before an event after it is waited for is no number.

    Raises RuntimeError where a GPU would hold up the processor.
    """
    here = current_stream()
    if here is USUAL or not _is_pinned(target):
        raise RuntimeError("a copy to the processor that does not block needs pinned memory, and a stream of its own")
    here.done += 1
    here.given += 1
    found = source.clone()
    target.fill_(math.nan if target.is_floating_point() else 119)
    here.under_way.append((here.done, lambda: target.copy_(found)))


def check_source(source: Tensor, *, non_blocking: bool) -> None:
    """Raise RuntimeError for a copy to the device that would hold up the processor, on a stream that is there so that nothing does."""
    if current_stream() is not USUAL and not (non_blocking and _is_pinned(source)):
        raise RuntimeError("a copy on a stream of its own needs pinned memory, and must not block")
