"""Shows what a daemon that seems stuck is doing: `kill -USR1 PID` writes the stacks of all threads and tasks to standard error.

The threads' stacks come from faulthandler, which needs neither the event loop nor the interpreter's lock. Those of tasks need a running
loop.
"""

from __future__ import annotations

import asyncio
import faulthandler
import signal
from collections.abc import Iterator
from typing import Any

import structlog

LOG = structlog.get_logger()
MOST_FRAMES = 30


def tell_on_signal(loop: asyncio.AbstractEventLoop) -> None:
    """Install the signal's handlers, if the platform has the signal."""
    if hasattr(signal, "SIGUSR1"):
        loop.add_signal_handler(signal.SIGUSR1, _tell, loop)
        faulthandler.register(signal.SIGUSR1, all_threads=True, chain=True)


def _tell(loop: asyncio.AbstractEventLoop) -> None:
    for task in asyncio.all_tasks(loop):
        told = [f"{name} {file}:{line}" for name, file, line in _waits_in(task.get_coro())]
        LOG.warning("a task", name=task.get_name(), cancelled=task.cancelling(), waits_in=told)


def _waits_in(awaited: Any) -> Iterator[tuple[str, str, int]]:
    """Follow the chain of awaits from the outermost coroutine."""
    for _ in range(MOST_FRAMES):
        frame = next((found for kind in ("cr", "gi", "ag") if (found := getattr(awaited, f"{kind}_frame", None)) is not None), None)
        if frame is None:
            return
        yield awaited.__qualname__, frame.f_code.co_filename.rpartition("/")[2], frame.f_lineno
        awaited = next((getattr(awaited, name) for name in ("cr_await", "gi_yieldfrom", "ag_await") if hasattr(awaited, name)), None)
