"""What each pretend device counts: waits, copies, and bytes of memory."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

NUM_DEVICES = 2
GB = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies in one direction."""

    count: int = 0
    num_bytes: int = 0

    def and_one_of(self, num_bytes: int) -> Copies:
        return Copies(self.count + 1, self.num_bytes + num_bytes)


@dataclass
class Meter:
    """The counts of one device. Any thread may use it."""

    total_bytes: int = 8 * GB
    others_file: str = ""
    """A file with the bytes that other processes take of the memory, and maybe those that are hidden; empty: there are none."""
    allowed_bytes: int | None = None
    """The most that this process may take; None: all there is."""
    waits: Counter[str] = field(default_factory=Counter)
    """How often the processor waited for the device, by the operation that made it wait."""
    to_device: Copies = Copies()
    to_host: Copies = Copies()
    allocated: int = 0
    """Bytes of live tensors."""
    reserved: int = 0
    """Bytes that this process has taken: those of live tensors, and those freed since the cache was emptied."""
    peak: int = 0
    """The most bytes of live tensors since `reset_peak`."""
    _live: dict[int, list[int]] = field(default_factory=dict)
    """By storage: its bytes, and the number of tensors that see it."""
    _guard: threading.RLock = field(default_factory=threading.RLock)

    @property
    def others_bytes(self) -> int:
        return self._others()[0]

    @property
    def hidden_bytes(self) -> int:
        """Memory of which the device says that it is free, and which cannot be had, such as what lies in pieces."""
        return self._others()[1]

    def _others(self) -> tuple[int, int]:
        others, _, hidden = (Path(self.others_file).read_text() if self.others_file else "").partition(" ")
        return int(others or 0), int(hidden or 0)

    def wait(self, reason: str) -> None:
        with self._guard:
            self.waits[reason] += 1

    def copied(self, num_bytes: int, *, to_device: bool) -> None:
        with self._guard:
            if to_device:
                self.to_device = self.to_device.and_one_of(num_bytes)
            else:
                self.to_host = self.to_host.and_one_of(num_bytes)

    def hold(self, storage: int, num_bytes: int, *, anyhow: bool = False) -> None:
        """Note one more tensor that sees a storage. Raises torch.OutOfMemoryError if a new one has no room, unless `anyhow`."""
        with self._guard:
            known = self._live.get(storage)
            if known is not None:
                known[1] += 1
                return
            self._take(num_bytes, anyhow=anyhow)
            self._live[storage] = [num_bytes, 1]

    def _take(self, num_bytes: int, *, anyhow: bool) -> None:
        room = self.total_bytes - self.others_bytes - self.hidden_bytes
        if self.allowed_bytes is not None:
            room = min(room, self.allowed_bytes)
        if self.allocated + num_bytes > room and not anyhow:
            held, free = self.allocated, room - self.allocated
            raise torch.OutOfMemoryError(f"pretend: {num_bytes} bytes wanted, {free} free, {held} held")
        self.allocated += num_bytes
        self.peak = max(self.peak, self.allocated)
        self.reserved = max(self.reserved, self.allocated)

    def let_go(self, storage: int) -> None:
        with self._guard:
            known = self._live[storage]
            known[1] -= 1
            if not known[1]:
                self.allocated -= known[0]
                del self._live[storage]

    def empty_cache(self) -> None:
        with self._guard:
            self.reserved = self.allocated

    def reset_peak(self) -> None:
        with self._guard:
            self.peak = self.allocated

    @property
    def num_waits(self) -> int:
        return self.waits.total()

    @contextlib.contextmanager
    def counted(self) -> Iterator[Counter[str]]:
        """Give the waits of the block, by operation, once it has ended."""
        before, found = Counter(self.waits), Counter[str]()
        yield found
        found.update(self.waits - before)


METERS = [Meter() for _ in range(NUM_DEVICES)]
