"""An event loop whose clock does not depend on the machine: it stands still while anything computes, and leaps to the next timer else.

So no test can fail because the processors are taken, and none takes the time that it waits for. It is for tests within one process, whose
threads are those of pools: nothing outside is waited for.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

LOOK_S = 0.02
"""While jobs run, the loop looks this often whether the last one is done. The end of a job that is awaited wakes it at once."""

TICK_S = 1e-6
"""Each look at the clock takes so long: no two things happen at once."""

BEGAN_S = 1000.0
"""What the clock shows at first, so that a test may set a time that is long over."""


class PoolJobs:
    """Counts the jobs that one test gives to thread pools and that are not finished."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._unfinished = Counter[ThreadPoolExecutor]()
        self.blocked = set[ThreadPoolExecutor]()
        """Pools whose threads the test lets wait until the loop goes on: the clock does not wait for these."""

    @property
    def any_to_wait_for(self) -> bool:
        with self._guard:
            return any(number for pool, number in self._unfinished.items() if pool not in self.blocked)

    def begin(self) -> None:
        """A test begins: what another one has left running is none of its jobs."""
        with self._guard:
            self._unfinished = Counter()
            self.blocked = set()

    def counted(self, submit: Callable[..., Future[Any]]) -> Callable[..., Future[Any]]:
        @functools.wraps(submit)
        def submitted(pool: ThreadPoolExecutor, /, *arguments: Any, **named: Any) -> Future[Any]:
            unfinished = self._unfinished

            def add(number: int) -> None:
                with self._guard:
                    unfinished[pool] += number

            add(1)
            try:
                future = submit(pool, *arguments, **named)
            except RuntimeError:  # the pool is closed
                add(-1)
                raise
            _after_callbacks(future, lambda: add(-1))
            return future

        return submitted


def _after_callbacks(future: Future[Any], act: Callable[[], None]) -> None:
    """Act once a job is done and has told so to everybody who waits for it, also to those that begin to wait after this call."""
    with future._condition:
        if not future.done():
            tell = future._invoke_callbacks  # type: ignore[attr-defined]

            def told() -> None:
                tell()
                act()

            future._invoke_callbacks = told  # type: ignore[attr-defined]
            return
    act()


class _Selector(selectors.DefaultSelector):
    def __init__(self, jobs: PoolJobs) -> None:
        super().__init__()
        self._jobs = jobs
        self.now_s = BEGAN_S

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        while self._jobs.any_to_wait_for:
            if events := super().select(LOOK_S):
                return events
        if events := super().select(0):  # a job tells the loop that it is done before it counts as finished
            return events
        self.now_s += timeout
        return []


class SteadyLoop(asyncio.SelectorEventLoop):
    """`jobs` counts what runs in threads (`steady_clock`)."""

    def __init__(self, jobs: PoolJobs) -> None:
        self._steady = _Selector(jobs)
        super().__init__(self._steady)

    def time(self) -> float:
        self._steady.now_s += TICK_S
        return self._steady.now_s


JOBS = PoolJobs()


@pytest.fixture(autouse=True)
def steady_clock() -> Iterator[PoolJobs]:
    """Count the jobs of thread pools. A conftest.py whose loops are `steady` has to import this."""
    JOBS.begin()
    with pytest.MonkeyPatch.context() as patch:  # a test may undo its own
        patch.setattr(ThreadPoolExecutor, "submit", JOBS.counted(ThreadPoolExecutor.submit))
        yield JOBS


def steady() -> SteadyLoop:
    return SteadyLoop(JOBS)
