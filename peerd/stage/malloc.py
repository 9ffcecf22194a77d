"""Settings of glibc's heap for a daemon: fast for short-lived tensors, and no growth over weeks. Other C libraries are left alone.

By default glibc returns large blocks to the system at once, so every microbatch's graph and gradients are paged in anew, which costs
5-10 % of its time. By default also each allocating thread gets an arena of its own, up to eight per core; short-lived tensors leave
holes between long-lived objects in each of them, and under churn the process grows by some percent an hour.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

ARENAS = 2
"""Enough: the torch thread and all other threads rarely wait for each other here."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""Parameter numbers of mallopt(3)."""
_LARGEST_ON_HEAP_BYTES = 32 << 20
_KEPT_FREE_BYTES = 256 << 20
_TRIM_ALL = 0


def limit_arenas() -> None:
    """Limit the number of arenas. Call this before threads are started."""
    libc = _glibc()
    if libc is not None:
        libc.mallopt(_ARENA_MAX, ARENAS)


def keep_freed_memory() -> None:
    """Keep freed memory in the process for the next microbatch, until `give_back_free_memory`."""
    libc = _glibc()
    if libc is not None:
        libc.mallopt(_MMAP_THRESHOLD, _LARGEST_ON_HEAP_BYTES)
        libc.mallopt(_TRIM_THRESHOLD, _KEPT_FREE_BYTES)


def make_room(num_bytes: int) -> None:
    """Return free memory before a block of this size is allocated, if that block will not come from the heap anyway."""
    if num_bytes > _LARGEST_ON_HEAP_BYTES:
        give_back_free_memory()


def give_back_free_memory() -> None:
    """Return free memory to the system. This takes milliseconds, during which allocations of other threads wait."""
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(_TRIM_ALL)


@cache
def _glibc() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "malloc_trim") else None
