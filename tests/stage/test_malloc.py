"""The heap stays small: measured in a fresh process, for this one's has long been shaped by other tests."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")

ALLOCATE_IN_THREADS = """
import ctypes, os, threading
from peerd.stage.malloc import limit_arenas
{first}
together = threading.Barrier(12)
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
def work():
    for _ in range(100):
        together.wait()
        libc.malloc(1000)
threads = [threading.Thread(target=work) for _ in range(12)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
libc.fopen.restype = ctypes.c_void_p
out = ctypes.c_void_p(libc.fopen(b"/dev/stdout", b"w"))
libc.malloc_info(0, out)
libc.fflush(out)
"""

FREE_ALL_BUT_THE_LAST = """
import ctypes, psutil
from peerd.stage.malloc import give_back_free_memory
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
blocks = [libc.malloc(50_000) for _ in range(2_000)]
[ctypes.memset(block, 1, 50_000) for block in blocks]
[libc.free(block) for block in blocks[:-1]]
before = psutil.Process().memory_info().rss
give_back_free_memory()
print(before - psutil.Process().memory_info().rss)
"""


def run(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60).stdout


def arenas(first: str) -> int:
    return run(ALLOCATE_IN_THREADS.format(first=first)).count("<heap nr=")


def test_threads_share_two_arenas() -> None:
    assert arenas("") > 2, "this C library makes no arenas by itself: the test shows nothing"
    assert arenas("limit_arenas()") <= 2


def test_pages_that_nobody_uses_go_back_to_the_system() -> None:
    assert int(run(FREE_ALL_BUT_THE_LAST)) > 80_000_000
