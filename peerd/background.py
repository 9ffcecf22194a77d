"""Background tasks, and the one place where an unexpected error is logged and counted.

Every task that is not awaited is started here: an unexpected error is a bug, and a bug must show.
"""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

import structlog

from peerd.errors import system_error

LOG = structlog.get_logger()
Result = TypeVar("Result")
Expected = tuple[type[BaseException], ...]


class InternalErrors:
    """Counts the bugs that have shown in this process. Any thread may report one."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self.count = 0

    def report(self, where: str, error: BaseException, **fields: Any) -> None:
        """Log the error with its traceback, and count it once, however many tasks it passes through. A full disk is no bug."""
        if isinstance(error, BaseExceptionGroup):
            for each in error.exceptions:
                self.report(where, each, **fields)
            return
        told = system_error(error) if isinstance(error, OSError) else None
        if told is not None:
            LOG.warning("the machine refuses", where=where, error=str(told), **fields)
            return
        with self._guard:
            if getattr(error, "_is_reported", False):
                return
            error._is_reported = True  # type: ignore[attr-defined]
            self.count += 1
        LOG.error("internal error", where=where, error=repr(error), **fields, exception="".join(traceback.format_exception(error)))


INTERNAL_ERRORS = InternalErrors()


def start(work: Coroutine[Any, Any, Result], *, expects: Expected = ()) -> asyncio.Task[Result]:
    """Run `work` as a task of its own. An error that it does not expect is reported as soon as the task ends."""
    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(partial(_look_at, expects))
    return task


class Tasks:
    """The running tasks of one part."""

    def __init__(self) -> None:
        self.running: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Result], *, expects: Expected = ()) -> asyncio.Task[Result]:
        task = start(work, expects=expects)
        self.running.add(task)
        task.add_done_callback(self.running.discard)
        return task

    def cancel(self) -> None:
        for task in self.running:
            task.cancel()

    async def close(self) -> None:
        """Cancel all tasks and wait until they have ended."""
        self.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)


def _look_at(expects: Expected, task: asyncio.Task[Any]) -> None:
    if task.cancelled():
        return
    error = task.exception()
    if error is not None and not isinstance(error, expects):
        INTERNAL_ERRORS.report(task.get_coro().__qualname__, error)  # type: ignore[union-attr]
