"""Execution: the one thread that torch runs on, and the order in which it takes work.

Everything that reads or changes a stage's tensors or its ledger is a job here, so this thread is the critical section
of the step protocol: no lock guards the accumulator because nothing else touches it.
"""

from __future__ import annotations

import asyncio
import enum
import heapq
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from peerd.background import INTERNAL_ERRORS
from peerd.errors import PeerdError
from peerd.policy.route.launching import FORWARDS_PER_MICROBATCH
from peerd.stage.malloc import keep_freed_memory

Result = TypeVar("Result")


class Priority(enum.IntEnum):
    """Lower runs first. Backward before forward frees memory and keeps the pipeline moving (1F1B); before both goes an older step."""

    CONTROL = 0
    BACKWARD = 1
    FORWARD = 2
    IDLE = 3


FORWARD_SHARE = 1 / FORWARDS_PER_MICROBATCH
BACKWARD_SHARE = 1 - FORWARD_SHARE
"""Of the work on a microbatch."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Makes this peer slower on purpose, for its owner's sake, benchmarks and tests. Never reaches the arithmetic."""

    stand_in_s: float = 0.0
    slow_factor: float = 1.0
    duty: float = 1.0
    """Share of the time that the device may compute; the owner's limit."""

    def hold(self, started_s: float, share: float) -> None:
        """Sleep so that work begun at `started_s` takes its share of the stand-in, or slow_factor times as long."""
        spent = time.monotonic() - started_s
        factor = self.slow_factor / self.duty
        wanted = self.stand_in_s * share * factor if self.stand_in_s else spent * factor
        if wanted > spent:
            time.sleep(wanted - spent)


class Executor:
    """A single worker thread with a priority queue. `run` is the only way in."""

    def __init__(self, name: str = "torch") -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=keep_freed_memory)
        self._jobs: list[tuple[tuple[int, int, int], int, Priority, Callable[[], Any], Future[Any]]] = []
        """Each with its turn and, among equals, its number."""
        self._numbers = itertools.count()
        self._guard = threading.Lock()
        self.busy_s = 0.0
        """Total time spent on forward and backward."""

    async def run(self, priority: Priority, work: Callable[[], Result], step: int = 0) -> Result:
        """The result of `work`, run when its turn comes. Cancelling the caller does not stop work that has begun.

        `step` is whose pass it is: where steps overlap, what an older one lacks keeps all others waiting.
        """
        future: Future[Result] = Future()
        with self._guard:
            heapq.heappush(self._jobs, (_turn(priority, step), next(self._numbers), priority, work, future))
        self._pool.submit(self._run_next)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(_report)  # nobody else hears how it ends
            raise

    def close(self) -> None:
        """Forget what has not begun and wait for what has."""
        with self._guard:
            for *_, future in self._jobs:
                future.cancel()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _run_next(self) -> None:
        with self._guard:
            _, _, priority, work, future = heapq.heappop(self._jobs)
        if not future.set_running_or_notify_cancel():
            return
        started = time.monotonic()
        try:
            future.set_result(work())
        except BaseException as error:  # it belongs to whoever awaits the future
            future.set_exception(error)
        if priority in (Priority.BACKWARD, Priority.FORWARD):
            self.busy_s += time.monotonic() - started


def _report(future: Future[Any]) -> None:
    error = None if future.cancelled() else future.exception()
    if error is not None and not isinstance(error, PeerdError):
        INTERNAL_ERRORS.report("job whose caller is gone", error)


def _turn(priority: Priority, step: int) -> tuple[int, int, int]:
    if priority is Priority.CONTROL:
        return 0, 0, 0
    return (2, 0, 0) if priority is Priority.IDLE else (1, step, priority)
