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


BESIDE = """
import ctypes, mmap, threading, time
import torch
from peerd.stage.blocks import vector
from peerd.stage.malloc import give_back_free_memory, keep_freed_memory
libc = ctypes.CDLL(None)
libc.mallopt(-8, 1)  # one arena, as where the event loop shares that of the torch thread
keep_freed_memory()
libc.mallopt(-1, 1 << 30)  # nothing goes back by itself
held, ready, go, began = {{}}, threading.Event(), threading.Event(), threading.Event()
def other():
    {setup}
    ready.set()
    go.wait()
    began.set()
    {work}
thread = threading.Thread(target=other)
thread.start()
ready.wait()
go.set()
began.wait()
times = 0
while thread.is_alive():
    {tick}
    times += 1
    time.sleep(0.0001)
print(times)
"""
MAPPING = "mmap.mmap(-1, 1 << 20).close()"
HEAP = "bytearray(200_000)"
NUM_VALUES = 100_000_000


def is_free_beside(setup: str, work: str, tick: str) -> bool:
    """Whether the main thread does something small many times while another thread works; on a busy machine, in one of a few tries."""
    return any(int(run(BESIDE.format(setup=setup, work=work, tick=tick))) > 20 for _ in range(5))


def test_other_threads_get_memory_while_that_of_a_large_vector_goes_back() -> None:
    """Python's own objects lie in mappings of a megabyte, and the event loop must not wait until all of an average is unmapped.

    With `torch.empty` in place of `vector` the main thread gets one to eight.
    """
    assert is_free_beside(f"held[0] = vector({NUM_VALUES}, torch.float32).fill_(1.0)", "held.clear()", MAPPING)


def test_other_threads_get_memory_while_that_of_freed_blocks_goes_back() -> None:
    """With `malloc_trim` alone the main thread gets two or three."""
    freed = f"blocks = [torch.ones(7 << 20) for _ in range({NUM_VALUES} >> 22)]; held[0] = torch.ones(1 << 20); blocks.clear()"
    assert is_free_beside(freed, "give_back_free_memory()", HEAP)


LET_GO_ON_THE_MAIN_THREAD = """
import threading, psutil, torch
from peerd.stage import blocks
threads = []
empty = blocks.empty_pages
def noted(*arguments):
    threads.append(threading.current_thread())
    empty(*arguments)
blocks.empty_pages = noted
vector = blocks.vector(50_000_000, torch.float32).fill_(2.0)
part = vector[10_000_000:20_000_000]
before = psutil.Process().memory_info().rss
del vector
assert part.sum() == 20_000_000 and not threads
del part
while not threads: pass
threads[0].join()
assert threads[0] is not threading.main_thread()
print(before - psutil.Process().memory_info().rss)
"""


def test_a_vector_lasts_as_long_as_a_part_of_it_is_in_use_and_does_not_go_back_on_the_event_loops_thread() -> None:
    assert int(run(LET_GO_ON_THE_MAIN_THREAD)) > 190_000_000
