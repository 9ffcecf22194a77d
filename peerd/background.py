"""Background tasks, and the one place where an unexpected error is logged and counted.

Every task that is not awaited is started here: an unexpected error is a bug, and a bug must show.
"""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import structlog

from peerd.errors import PeerdError, system_error

LOG = structlog.get_logger()
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 30.0
"""The pause before a part that ended by a bug runs again; it doubles while the part keeps ending so."""
LOGGED_WITHIN_S, MOST_LOGGED = 60.0, 10
"""A bug that shows again and again is logged at most so often in this time, for each place and kind."""
Result = TypeVar("Result")
Part = Callable[[], Coroutine[Any, Any, None]]
"""What runs for as long as a daemon does, or a part of that time."""
Expected = tuple[type[BaseException], ...]


class InternalErrors:
    """Counts the bugs that have shown in this process. Any thread may report one."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._logged: dict[tuple[str, type[BaseException]], tuple[float, int]] = {}
        """Since when, and how often."""
        self.count = 0

    def report(self, where: str, error: BaseException, **fields: Any) -> None:
        """Log the error with its traceback, and count it once, however many tasks it passes through. A full disk is no bug.

        What one peer says again and again must not fill the log: the same kind of error at the same place is logged a few times a minute.
        """
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
            kind, now_s = (where, type(error)), time.monotonic()
            since_s, times = self._logged.get(kind, (now_s, 0))
            if now_s - since_s > LOGGED_WITHIN_S:
                since_s, times = now_s, 0
            self._logged[kind] = since_s, times + 1
            if times >= MOST_LOGGED:
                return
        LOG.error("internal error", where=where, error=repr(error), **fields, exception="".join(traceback.format_exception(error)))


INTERNAL_ERRORS = InternalErrors()


def start(work: Coroutine[Any, Any, Result], *, expects: Expected = ()) -> asyncio.Task[Result]:
    """Run `work` as a task of its own. An error that it does not expect is reported as soon as the task ends."""
    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(partial(_look_at, expects))
    return task


async def keep(run: Part, *, passes: tuple[type[Exception], ...] = ()) -> None:
    """Run a part of the daemon until it returns. If a bug ends it, report that and run it anew after a pause.

    The bug may show in what another peer said, which must not end this daemon. PeerdError is no bug, nor are the errors in `passes`.
    """
    pause_s = FIRST_PAUSE_S
    while True:
        began_s = time.monotonic()
        try:
            return await run()
        except Exception as error:
            if _is_meant(error, (PeerdError, *passes)):
                raise
            INTERNAL_ERRORS.report(getattr(run, "__qualname__", repr(run)), error)
        if time.monotonic() - began_s > LONGEST_PAUSE_S:
            pause_s = FIRST_PAUSE_S
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _is_meant(error: Exception, meant: tuple[type[Exception], ...]) -> bool:
    return isinstance(error, meant) or (isinstance(error, ExceptionGroup) and error.subgroup(meant) is not None)


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
