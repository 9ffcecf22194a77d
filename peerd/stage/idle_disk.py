"""Lets the disk serve other programs first while a checkpoint is flushed to it."""

from __future__ import annotations

import contextlib
import ctypes
import platform
import sys
from collections.abc import Iterator

_SET = {"x86_64": 251, "aarch64": 30, "riscv64": 30}
"""Number of the system call ioprio_set, by machine; `_SET` + 1 is ioprio_get."""
_THIS_THREAD = (1, 0)
"""IOPRIO_WHO_PROCESS, which names a thread, and the caller's."""
_IDLE = 3 << 13
"""IOPRIO_CLASS_IDLE."""


def priority() -> int | None:
    """Class and level with which this thread asks the disk; None where the system does not tell."""
    return _call(1)


@contextlib.contextmanager
def idle_disk() -> Iterator[None]:
    """Within this block the calling thread gets the disk when no other program wants it; other threads keep their priority, and ones
    that begin within it take its.

    Linux only, and only with an I/O scheduler that knows priorities. Elsewhere it does nothing.
    """
    before = priority()
    changed = before is not None and _call(0, _IDLE) is not None
    try:
        yield
    finally:
        if changed and before is not None:
            _call(0, before)


def _call(get: int, *value: int) -> int | None:
    number = _SET.get(platform.machine()) if sys.platform == "linux" and ctypes.sizeof(ctypes.c_void_p) == 8 else None
    if number is None:
        return None
    found = int(ctypes.CDLL(None, use_errno=True).syscall(number + get, *_THIS_THREAD, *value))
    return found if found >= 0 else None
