"""A child process of a large process: started without a copy of its page tables, told, heard and ended."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import sys
import time

from peerd.link.small_child import SmallChild, start_small_child

ECHO = "import sys; print('ready', flush=True); print(sys.stdin.buffer.read(1), flush=True); sys.stdin.buffer.read(1)"
LARGE_BYTES = 1 << 29
PATIENCE_S = 20.0


async def started(code: str = ECHO) -> SmallChild:
    return await start_small_child((sys.executable, "-I", "-S", "-c", code), dict(os.environ))


async def test_it_is_told_and_heard_and_ends_when_its_input_ends() -> None:
    child = await started()
    async with asyncio.timeout(PATIENCE_S):
        assert await child.output.readline() == b"ready\n"
        child.tell(b"x")
        assert await child.output.readline() == b"b'x'\n"
        child.close_input()
        await child.wait()
        assert await child.output.read() == b""
    child.tell(b"x")
    child.kill()


async def test_one_that_is_killed_has_ended() -> None:
    child = await started()
    child.kill()
    async with asyncio.timeout(PATIENCE_S):
        await child.wait()
    child.tell(b"x")


async def test_it_gives_way_with_its_parent_and_hears_no_key_of_a_terminal() -> None:
    """The scheduler shares cores between sessions: a child in a session of its own competes as an equal, whatever its niceness."""
    child = await started("import os; print(os.getsid(0), os.getpgrp() == os.getpid())")
    async with asyncio.timeout(PATIENCE_S):
        assert (await child.output.readline()).split() == [str(os.getsid(0)).encode(), b"True"]
        await child.wait()


async def test_a_large_process_starts_one_as_a_small_one_does() -> None:
    """Copying the page tables of half a gigabyte takes some 10 ms of processor time."""
    with mmap.mmap(-1, LARGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 1, LARGE_BYTES)
        taken_s = []
        for _ in range(3):
            began_s = time.thread_time()
            child = await started("")
            taken_s.append(time.thread_time() - began_s)
            async with asyncio.timeout(PATIENCE_S):
                await child.wait()
    assert min(taken_s) < 0.005
