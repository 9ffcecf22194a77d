"""The executor: the one thread on which torch runs, and the order in which it takes jobs.

Everything that reads or changes a stage's tensors or its ledger is a job here, so this thread is the critical section
of the step protocol. The accumulator needs no lock, because nothing else touches it.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import heapq
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from peerd.background import INTERNAL_ERRORS
from peerd.errors import PeerdError, WrongStateError
from peerd.policy.route.launching import FORWARDS_PER_MICROBATCH
from peerd.stage.malloc import keep_freed_memory

Result = TypeVar("Result")


_HERE = threading.local()
"""Its `executor` is the one whose thread this is."""


class Priority(enum.IntEnum):
    """Lower runs first. Backward before forward frees memory and keeps the pipeline moving (1F1B). Passes of an older step precede both."""

    LEDGER = -1
    """A control job that changes no parameter. It may run between two layers of a pass, which takes minutes where a microbatch does."""
    CONTROL = 0
    TEXT = 1
    """A pass for those who ask the model, within the share of the time that the owner allows."""
    BACKWARD = 2
    FORWARD = 3
    IDLE = 4


_NO_TRAINING = frozenset({Priority.TEXT, Priority.IDLE})
FORWARD_SHARE = 1 / FORWARDS_PER_MICROBATCH
BACKWARD_SHARE = 1 - FORWARD_SHARE
"""The shares of the forward and the backward pass in the computing time of a microbatch."""


GIVES_WAY = 9
"""By so much the niceness of a thread that computes is higher: it has an eighth of the weight of the event loop where both want a core,
and of the threads that send and receive. None of it is lost: those sleep most of the time."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Slows this peer down on purpose: for its owner's limits, benchmarks and tests. It never changes a result."""

    stand_in_s: float = 0.0
    slow_factor: float = 1.0
    duty: float = 1.0
    """The share of the time in which the device may compute; the owner's limit."""
    rest: Callable[[float], None] = field(default=time.sleep, compare=False)
    """Lets so many seconds pass in the middle of a job (`Executor.rest`)."""

    @property
    def is_plain(self) -> bool:
        """Whether this peer computes as fast as it can: then nobody has to know when a pass ends to begin the next."""
        return not self.stand_in_s and self.slow_factor == self.duty == 1.0

    def hold(self, started_s: float, share: float) -> None:
        """Rest until work begun at `started_s` has taken `share` of the stand-in's time, or slow_factor / duty times its own time."""
        spent = time.monotonic() - started_s
        factor = self.slow_factor / self.duty
        wanted = self.stand_in_s * share * factor if self.stand_in_s else spent * factor
        if wanted > spent:
            self.rest(wanted - spent)


@dataclass(order=True, slots=True)
class _Job:
    turn: tuple[int, int, int]
    number: int
    """Keeps jobs of equal turn in order of arrival."""
    priority: Priority = field(compare=False)
    work: Callable[[], Any] = field(compare=False)
    future: Future[Any] = field(compare=False)
    asked_s: float = field(compare=False)


class Executor:
    """One worker thread with a priority queue. Jobs enter through `run` only."""

    def __init__(self, name: str = "torch") -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=self._enter)
        self._jobs: list[_Job] = []
        """A heap."""
        self._numbers = itertools.count()
        self._guard = threading.Condition()
        """Held while a job is added to the heap or taken from it; told of each that is added."""
        self._is_closed = False
        self.busy_s = 0.0
        """Total seconds spent on forward and backward passes."""

    async def run(self, priority: Priority, work: Callable[[], Result], step: int = 0) -> Result:
        """Run `work` in its turn and return its result. Cancelling the caller does not stop work that has begun.

        `step` is the step of a forward or backward pass: if steps overlap, the older step goes first. Raises WrongStateError once this is
        closed.
        """
        return await _result_of(self._add(priority, work, step).future)

    async def run_text(self, work: Callable[[], Result], wait_s: float) -> Result:
        """Run a pass of a text once no work of training waits, and after `wait_s` in any case: then before all of that.

        It never interrupts a pass. Raises as `run`.
        """
        job = self._add(Priority.IDLE if wait_s > 0 else Priority.TEXT, work)
        timer = asyncio.get_running_loop().call_later(wait_s, self._hasten, job) if wait_s > 0 else None
        try:
            return await _result_of(job.future)
        finally:
            if timer is not None:
                timer.cancel()

    def _add(self, priority: Priority, work: Callable[[], Any], step: int = 0) -> _Job:
        with self._guard:
            if self._is_closed:
                raise WrongStateError("this peer has left the stage")
            job = _Job(_turn(priority, step), next(self._numbers), priority, work, Future(), time.monotonic())
            heapq.heappush(self._jobs, job)
            self._guard.notify()
            self._pool.submit(self._run_next)
        return job

    def _hasten(self, job: _Job) -> None:
        """Let a text's pass that still waits go before training's."""
        with self._guard:
            job.priority, job.turn = Priority.TEXT, _turn(Priority.TEXT, 0)
            heapq.heapify(self._jobs)

    @property
    def waits_since_s(self) -> float | None:
        """Since when (`time.monotonic`) training has waited for the job that runs now; None: none of its work waits."""
        with self._guard:
            return min((job.asked_s for job in self._jobs if job.priority not in _NO_TRAINING and not job.future.cancelled()), default=None)

    def rest(self, seconds: float) -> None:
        """Let the time pass in the middle of a pass, which calls this. Control jobs run meanwhile, as they do between two passes."""
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            if (job := self._next_up_to(Priority.CONTROL, left_s)) is not None:
                self._perform(job)

    def fill(self) -> None:
        """Run a forward pass in the middle of a backward pass, which calls this once it has given the device all of its work.

        The device computes it while this thread waits for the backward pass and then for the next one: else it would have nothing to do.
        Where a control job waits, the thread stays free for that.
        """
        with self._guard:
            if any(job.priority <= Priority.CONTROL for job in self._jobs):
                return
            ahead = min((job for job in self._jobs if job.priority is Priority.FORWARD), default=None)
            if ahead is None:
                return
            self._jobs.remove(ahead)
            heapq.heapify(self._jobs)
        busy_s = self.busy_s
        self._perform(ahead)
        self.busy_s = busy_s  # its time is part of the pass's that called this

    @property
    def has_ledger_job(self) -> bool:
        """Whether the next job may run in the middle of a pass."""
        jobs = self._jobs
        return bool(jobs) and jobs[0].priority is Priority.LEDGER

    def breathe(self) -> None:
        """Run such jobs now. Called in the middle of a pass, on whichever thread it is, while the pass stands still."""
        while (job := self._next_up_to(Priority.LEDGER)) is not None:
            self._perform(job)

    def _next_up_to(self, most: Priority, wait_s: float = 0.0) -> _Job | None:
        """The next job if its priority is no lower than `most`; else None, once another job has come or `wait_s` have passed."""
        with self._guard:
            if self._jobs and self._jobs[0].priority <= most:
                return heapq.heappop(self._jobs)
            self._guard.wait(wait_s)
        return None

    def close(self) -> None:
        """Cancel the jobs that have not begun. The running one goes on, which may take minutes: nothing can end it."""
        with self._guard:
            self._is_closed = True
            for job in self._jobs:
                job.future.cancel()
        self._pool.shutdown(wait=False)

    async def ended(self) -> None:
        """Wait until the job that ran when this was closed is done."""
        await asyncio.to_thread(self._pool.shutdown)

    def _enter(self) -> None:
        _HERE.executor = self
        keep_freed_memory()
        give_way()

    def _run_next(self) -> None:
        with self._guard:
            if not self._jobs:
                return  # what this call was made for has run while a pass rested
            job = heapq.heappop(self._jobs)
        self._perform(job)

    def _perform(self, job: _Job) -> None:
        if not job.future.set_running_or_notify_cancel():
            return
        started = time.monotonic()
        try:
            job.future.set_result(job.work())
        except BaseException as error:  # raised where the future is awaited
            job.future.set_exception(error)
        if job.priority in (Priority.BACKWARD, Priority.FORWARD):
            self.busy_s += time.monotonic() - started


def give_way() -> None:
    """Let this thread, and those that it starts, come after the event loop where cores are short: calls and news wait for that."""
    if sys.platform == "linux":  # elsewhere threads have no priority of their own
        with contextlib.suppress(OSError):
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + GIVES_WAY)


def threads_for_blocking() -> ThreadPoolExecutor:
    """Threads for what would block the event loop, such as files and hashes: they give way as computing does."""
    return ThreadPoolExecutor(thread_name_prefix="blocking", initializer=give_way)


def executor_here() -> Executor | None:
    """Return the executor whose thread calls this, if it is one's."""
    return getattr(_HERE, "executor", None)


async def _result_of(future: Future[Result]) -> Result:
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        future.add_done_callback(_report)  # nobody awaits the result any more
        raise


def _report(future: Future[Any]) -> None:
    error = None if future.cancelled() else future.exception()
    if error is not None and not isinstance(error, PeerdError):
        INTERNAL_ERRORS.report("job whose caller is gone", error)


def _turn(priority: Priority, step: int) -> tuple[int, int, int]:
    if priority in (Priority.BACKWARD, Priority.FORWARD):
        return Priority.BACKWARD, step, priority
    return max(priority, Priority.CONTROL), 0, 0
