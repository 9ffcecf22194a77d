"""Settings of glibc's heap for a daemon: fast for short-lived tensors, and no growth over weeks. Other C libraries are left alone.

By default glibc returns large blocks to the system at once, so every microbatch's graph and gradients are paged in anew, which costs
5-10 % of its time. By default also each allocating thread gets an arena of its own, up to eight per core; short-lived tensors leave
holes between long-lived objects in each of them, and under churn the process grows by some percent an hour.

Memory goes back to the system in pieces. While the pages of a block are given back, no other thread of the process gets or ends a mapping,
or a block of that heap: for a gigabyte that takes 0.1 s of processor time, several times as long where the thread waits for a core. The
event loop, whose objects lie in mappings of a megabyte, would stand still meanwhile.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache
from typing import Any

ARENAS = 2
"""Enough: the torch thread and all other threads rarely wait for each other here."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""Parameter numbers of mallopt(3)."""
LARGEST_ON_HEAP_BYTES = 32 << 20
_KEPT_FREE_BYTES = 256 << 20
_TRIM_ALL = 0
_PIECE_BYTES = 8 << 20
"""Returned to the system at once. This takes a millisecond of processor time."""


def limit_arenas() -> None:
    """Limit the number of arenas. Call this before threads are started."""
    libc = _glibc()
    if libc is not None:
        libc.mallopt(_ARENA_MAX, ARENAS)


def keep_freed_memory() -> None:
    """Keep freed memory in the process for the next microbatch, until `give_back_free_memory`."""
    libc = _glibc()
    if libc is not None:
        libc.mallopt(_MMAP_THRESHOLD, LARGEST_ON_HEAP_BYTES)
        libc.mallopt(_TRIM_THRESHOLD, _KEPT_FREE_BYTES)


def make_room(num_bytes: int) -> None:
    """Return free memory before a block of this size is allocated, if that block will not come from the heap anyway."""
    if num_bytes > LARGEST_ON_HEAP_BYTES:
        give_back_free_memory()


def has_glibc() -> bool:
    return _glibc() is not None


def give_back_free_memory() -> None:
    """Return free memory to the system, piece by piece: allocations of other threads wait for a piece at most."""
    libc = _glibc()
    if libc is not None:
        _empty_free_blocks(libc)
        libc.malloc_trim(_TRIM_ALL)


def _empty_free_blocks(libc: Any) -> None:
    """Take what is free on the heap piece by piece, and return its pages. The heap is locked only while a piece is taken or freed."""
    if not hasattr(libc, "mallinfo2"):
        return
    pieces = [libc.malloc(_PIECE_BYTES) for _ in range(libc.mallinfo2().free_bytes // _PIECE_BYTES)]
    for address in pieces:
        if address:
            empty_pages(address, _PIECE_BYTES)
    for address in pieces:
        libc.free(address)


def empty_pages(start: int, num_bytes: int) -> None:
    """Return the whole pages of a block to the system, piece by piece. What they held is lost."""
    libc, end = _glibc(), (start + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    at = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    while at < end:
        libc.madvise(at, min(_PIECE_BYTES, end - at), mmap.MADV_DONTNEED)
        at += _PIECE_BYTES


class _HeapFacts(ctypes.Structure):
    """What mallinfo2(3) returns, of which the ninth number counts."""

    _fields_ = (("others", ctypes.c_size_t * 8), ("free_bytes", ctypes.c_size_t), ("last", ctypes.c_size_t))


@cache
def _glibc() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        return None
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if hasattr(libc, "mallinfo2"):
        libc.mallinfo2.restype = _HeapFacts
    return libc
