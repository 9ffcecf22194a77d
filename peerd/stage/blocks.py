"""Large blocks of the machine's memory, which go back to the system in pieces and never on the thread of the event loop.

While a mapping ends, no other thread of the process gets or gives back one (`malloc.py`). So the pages go first, a few megabytes at a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading

import numpy as np
import torch
from torch import Tensor

from peerd.stage.malloc import LARGEST_ON_HEAP_BYTES, empty_pages, has_glibc


def vector(count: int, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised vector in the machine's memory. A large one goes back to the system in pieces, off the event loop."""
    num_bytes = count * dtype.itemsize
    return torch.frombuffer(_Block(num_bytes), dtype=dtype) if _is_block(num_bytes) else torch.empty(count, dtype=dtype)


def memory(num_bytes: int) -> memoryview:
    """Return uninitialised bytes, as `vector` does. Pages that nothing was written to take no memory."""
    return memoryview(_Block(num_bytes)) if _is_block(num_bytes) else memoryview(np.empty(num_bytes, np.uint8).data)


def _is_block(num_bytes: int) -> bool:
    return num_bytes > LARGEST_ON_HEAP_BYTES and has_glibc()


class _Block(mmap.mmap):
    """Memory of its own, which is empty by the time when its mapping ends."""

    def __new__(cls, num_bytes: int) -> _Block:
        try:
            return super().__new__(cls, -1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"no {num_bytes} bytes of memory") from error

    def __del__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            self._empty()
            return
        with contextlib.suppress(RuntimeError):  # the process ends, and its memory with it
            threading.Thread(target=self._empty, name="free").start()

    def _empty(self) -> None:
        anchor = ctypes.c_char.from_buffer(self)
        empty_pages(ctypes.addressof(anchor), len(self))
