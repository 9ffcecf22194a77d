"""glibc's heap, told what a daemon is like: quick for tensors that come and go, and small over weeks. Other C libraries go on as they are.

Left alone, glibc gives large blocks back to the system at once, and every microbatch's graph and gradients are paged in anew: 5-10 %
of its time. And every thread that allocates gets an arena of its own, up to eight per core, each of which keeps the holes that
short-lived tensors leave between long-lived objects: some percent of growth an hour under churn.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

ARENAS = 2
"""The torch thread and everybody else hardly ever wait for one another here."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""mallopt(3)'s numbers."""
_LARGEST_ON_HEAP_BYTES = 32 << 20
_KEPT_FREE_BYTES = 256 << 20
_TRIM_ALL = 0


def limit_arenas() -> None:
    """Before threads are started."""
    libc = _glibc()
    if libc is not None:
        libc.mallopt(_ARENA_MAX, ARENAS)


def keep_freed_memory() -> None:
    """For the next microbatch, until `give_back_free_memory`."""
    libc = _glibc()
    if libc is not None:
        libc.mallopt(_MMAP_THRESHOLD, _LARGEST_ON_HEAP_BYTES)
        libc.mallopt(_TRIM_THRESHOLD, _KEPT_FREE_BYTES)


def give_back_free_memory() -> None:
    """Takes milliseconds, in which allocations of other threads wait."""
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(_TRIM_ALL)


@cache
def _glibc() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "malloc_trim") else None
