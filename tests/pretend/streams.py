"""Streams of the pretend device. Its work is done at once, but a tensor may be used only where a GPU would have it ready.

What a stream makes is used on another one only once that has waited for an event after it (else a GPU computes with what is not there yet),
and once it is recorded for that stream (else its memory may be given away too early).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor

_HERE = threading.local()
"""Its `stream` is the one on which this thread's work goes."""
_PINNED = "pretend_pinned"


@dataclass(eq=False)
class Stream:
    """An order of work on one device."""

    device: Any = None
    done: int = 0
    """How many pieces of work were put on it."""
    seen: WeakKeyDictionary[Stream, int] = field(default_factory=WeakKeyDictionary)
    """How far it has waited for other streams that still exist."""

    def record_event(self) -> Event:
        return Event(self, self.done)

    def wait_event(self, event: Event) -> None:
        self.seen[event.stream] = max(self.seen.get(event.stream, 0), event.done)


@dataclass(frozen=True)
class Event:
    stream: Stream
    done: int


@dataclass
class Made:
    """Where a tensor was made, on another stream than the usual one."""

    stream: Stream
    number: int
    recorded: WeakSet[Stream] = field(default_factory=WeakSet)

    def check_use(self) -> None:
        """Raise RuntimeError if the present stream may not use the tensor."""
        here = current_stream()
        if here is self.stream:
            return
        if here.seen.get(self.stream, 0) < self.number:
            raise RuntimeError("a tensor is used on a stream that has not waited for the stream that makes it")
        if here not in self.recorded:
            raise RuntimeError("a tensor of one stream is used on another one for which it is not recorded")


USUAL = Stream()
"""Where work goes unless a thread says otherwise."""


def current_stream(_device: object = None) -> Stream:
    return getattr(_HERE, "stream", USUAL)


@contextlib.contextmanager
def stream(wanted: Stream) -> Iterator[None]:
    """Put this thread's work on a stream."""
    before, _HERE.stream = current_stream(), wanted
    try:
        yield
    finally:
        _HERE.stream = before


def noted() -> Made | None:
    """Note a piece of work on the present stream, where that is not the usual one."""
    here = current_stream()
    if here is USUAL:
        return None
    here.done += 1
    return Made(here, here.done)


def pin(tensor: Tensor) -> Tensor:
    """A copy in memory that the device reads by itself, as `Tensor.pin_memory` makes it where there is a GPU."""
    copied = tensor.clone()
    setattr(copied, _PINNED, True)
    return copied


def check_source(source: Tensor, *, non_blocking: bool) -> None:
    """Raise RuntimeError for a copy to the device that would hold up the processor, on a stream that is there so that nothing does."""
    if current_stream() is not USUAL and not (non_blocking and getattr(source, _PINNED, False)):
        raise RuntimeError("a copy on a stream of its own needs pinned memory, and must not block")
