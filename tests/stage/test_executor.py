"""The executor: one thread, backward before forward, and nothing that a caller's end can break."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.background import INTERNAL_ERRORS
from peerd.errors import WrongStateError
from peerd.stage.executor import GIVES_WAY, Executor, Pace, Priority, threads_for_blocking


@pytest.fixture
async def executor() -> AsyncIterator[Executor]:
    made = Executor()
    yield made
    made.close()


class Gate:
    """A job that holds the executor's thread until it is opened, so that what follows has to queue."""

    def __init__(self, executor: Executor) -> None:
        self._entered, self._open = threading.Event(), threading.Event()
        self.work = asyncio.ensure_future(executor.run(Priority.CONTROL, self._hold))

    def _hold(self) -> None:
        self._entered.set()
        assert self._open.wait(10)

    async def entered(self) -> None:
        await asyncio.to_thread(self._entered.wait, 10)

    async def open(self) -> None:
        self._open.set()
        await self.work


async def held(executor: Executor) -> Gate:
    gate = Gate(executor)
    await gate.entered()
    return gate


async def test_once_it_is_closed_a_job_is_refused_with_words(executor: Executor) -> None:
    """A checkpoint that is begun as its peer leaves is no bug of the program."""
    executor.close()
    with pytest.raises(WrongStateError, match="left the stage"):
        await executor.run(Priority.LEDGER, lambda: None)


async def test_jobs_run_by_priority_and_then_in_order(executor: Executor) -> None:
    gate, ran = await held(executor), list[str]()
    asked = [(Priority.IDLE, "log"), (Priority.FORWARD, "f1"), (Priority.BACKWARD, "b1"), (Priority.FORWARD, "f2")]
    asked += [(Priority.CONTROL, "commit"), (Priority.BACKWARD, "b2")]
    jobs = [asyncio.ensure_future(executor.run(priority, lambda name=name: ran.append(name))) for priority, name in asked]  # type: ignore[misc]
    await asyncio.sleep(0)
    await gate.open()
    await asyncio.gather(*jobs)
    assert ran == ["commit", "b1", "b2", "f1", "f2", "log"]


async def test_where_steps_overlap_what_an_older_one_lacks_comes_first(executor: Executor) -> None:
    gate, ran = await held(executor), list[str]()
    asked = [(Priority.BACKWARD, 8), (Priority.FORWARD, 8), (Priority.FORWARD, 7), (Priority.IDLE, 0), (Priority.BACKWARD, 7)]

    def run(priority: Priority, step: int) -> asyncio.Future[None]:
        return asyncio.ensure_future(executor.run(priority, lambda: ran.append(f"{priority.name} {step}"), step))

    jobs = [run(*each) for each in asked]
    await asyncio.sleep(0)
    await gate.open()
    await asyncio.gather(*jobs)
    assert ran == ["BACKWARD 7", "FORWARD 7", "BACKWARD 8", "FORWARD 8", "IDLE 0"]


async def test_a_text_within_its_share_runs_before_training_and_another_one_once_it_may(executor: Executor) -> None:
    gate, ran = await held(executor), list[str]()

    def text(name: str, wait_s: float) -> asyncio.Future[None]:
        return asyncio.ensure_future(executor.run_text(lambda: ran.append(name), wait_s))

    def training() -> None:
        time.sleep(0.005)
        if "hastened" in ran:
            ran.append("training")
        else:
            executor._add(Priority.BACKWARD, training)  # it waits before this one ends

    jobs = [text("late", 60.0), asyncio.ensure_future(executor.run(Priority.FORWARD, lambda: ran.append("forward")))]
    jobs += [asyncio.ensure_future(executor.run(Priority.CONTROL, lambda: ran.append("control"))), text("first", 0.0)]
    jobs += [text("hastened", 0.1), asyncio.ensure_future(executor.run(Priority.FORWARD, training))]
    await asyncio.sleep(0)
    await gate.open()
    await asyncio.gather(*jobs)
    assert ran == ["control", "first", "forward", "hastened", "training", "late"]


def since_s(executor: Executor) -> float:
    return math.inf if executor.waits_since_s is None else executor.waits_since_s


async def test_it_is_known_since_when_training_waits(executor: Executor) -> None:
    """Neither texts nor what goes after training count."""
    gate = await held(executor)
    begun = [asyncio.ensure_future(executor.run(Priority.IDLE, lambda: None)), asyncio.ensure_future(executor.run_text(lambda: None, 0.0))]
    await asyncio.sleep(0)
    assert since_s(executor) == math.inf
    before_s = time.monotonic()
    begun.append(asyncio.ensure_future(executor.run(Priority.FORWARD, lambda: None)))
    await asyncio.sleep(0)
    assert before_s <= since_s(executor) <= time.monotonic()
    begun[-1].cancel()
    await asyncio.gather(begun[-1], return_exceptions=True)
    assert since_s(executor) == math.inf
    await gate.open()
    await asyncio.gather(*begun[:2])


async def test_every_job_runs_on_the_same_thread_and_never_two_at_once(executor: Executor) -> None:
    threads, inside = set[str](), list[int]()

    def job() -> int:
        inside.append(1)
        threads.add(threading.current_thread().name)
        found = len(inside)
        inside.pop()
        return found

    assert set(await asyncio.gather(*(executor.run(Priority.FORWARD, job) for _ in range(50)))) == {1}
    assert len(threads) == 1


async def test_an_error_belongs_to_whoever_asked_and_to_nobody_else(executor: Executor) -> None:
    def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await executor.run(Priority.CONTROL, fail)
    assert await executor.run(Priority.CONTROL, lambda: 7) == 7


async def test_work_that_nobody_waits_for_any_more_is_not_begun(executor: Executor) -> None:
    gate, ran = await held(executor), list[int]()
    given_up = asyncio.ensure_future(executor.run(Priority.FORWARD, lambda: ran.append(1)))
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    await gate.open()
    await executor.run(Priority.IDLE, lambda: None)
    assert ran == []


async def test_work_that_has_begun_is_finished_though_its_caller_is_gone(executor: Executor) -> None:
    gate = await held(executor)
    gate.work.cancel()
    await asyncio.gather(gate.work, return_exceptions=True)
    gate._open.set()
    assert await executor.run(Priority.CONTROL, lambda: "next") == "next"


async def test_closing_forgets_what_has_not_begun_and_keeps_nobody_waiting_for_what_has() -> None:
    executor, ran = Executor(), list[str]()
    gate = await held(executor)
    waiting = asyncio.ensure_future(executor.run(Priority.FORWARD, lambda: ran.append("waiting")))
    await asyncio.sleep(0)
    executor.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    ending = asyncio.ensure_future(executor.ended())
    await asyncio.sleep(0.01)
    assert not gate.work.done()
    assert not ending.done()
    await gate.open()
    await ending
    assert ran == []


async def test_control_jobs_run_while_a_pass_rests_and_no_other_pass_does(executor: Executor) -> None:
    """A peer whose owner allows a tenth of the time rests for minutes after a long pass: a round must not wait for that."""
    entered, ran = threading.Event(), list[str]()

    def work() -> None:
        entered.set()
        executor.rest(1.0)
        ran.append("rested")

    resting = asyncio.ensure_future(executor.run(Priority.BACKWARD, work))
    await asyncio.to_thread(entered.wait, 10)
    other = asyncio.ensure_future(executor.run(Priority.FORWARD, lambda: ran.append("other")))
    await executor.run(Priority.CONTROL, lambda: ran.append("control"))
    assert ran == ["control"]
    await asyncio.gather(resting, other)
    assert ran == ["control", "rested", "other"]
    assert await executor.run(Priority.IDLE, lambda: "next") == "next"


async def test_only_forward_and_backward_count_as_busy(executor: Executor) -> None:
    await executor.run(Priority.CONTROL, lambda: time.sleep(0.02))
    assert executor.busy_s == 0
    await executor.run(Priority.BACKWARD, lambda: time.sleep(0.02))
    await executor.run(Priority.CONTROL, lambda: None)  # an answer may come before the time is noted
    assert executor.busy_s >= 0.02


def rested(pace: Pace, spent_s: float, share: float) -> tuple[float, float]:
    """How long a pace rests after work that took `spent_s`, and by how much less than it should that may be: the time that this took."""
    rests, began_s = list[float](), time.monotonic()
    replace(pace, rest=rests.append).hold(began_s - spent_s, share)
    return sum(rests), time.monotonic() - began_s


@given(st.floats(0.001, 0.01), st.floats(1, 3))
def test_a_stand_in_takes_its_share_times_the_factor(stand_in_s: float, slow_factor: float) -> None:
    rest_s, late_s = rested(Pace(stand_in_s, slow_factor), 0.0, 0.5)
    wanted_s = 0.5 * stand_in_s * slow_factor
    assert wanted_s - late_s - 1e-9 <= rest_s <= wanted_s + 1e-9


def test_without_a_stand_in_a_slow_peer_takes_its_factor_of_the_real_time() -> None:
    rest_s, late_s = rested(Pace(slow_factor=3), 0.01, 1.0)
    assert 0.02 - 1e-9 <= rest_s <= 0.02 + 2 * late_s + 1e-9
    assert rested(Pace(), 0.01, 1.0)[0] == 0


@pytest.mark.parametrize(("error", "counted"), [(TypeError("a bug"), 1), (WrongStateError("over"), 0)])
async def test_a_bug_in_a_job_whose_caller_is_gone_is_counted(executor: Executor, error: Exception, counted: int) -> None:
    entered, go, before = threading.Event(), threading.Event(), INTERNAL_ERRORS.count

    def work() -> None:
        entered.set()
        assert go.wait(10)
        raise error

    asked = asyncio.ensure_future(executor.run(Priority.CONTROL, work))
    await asyncio.to_thread(entered.wait, 10)
    asked.cancel()
    await asyncio.wait({asked})
    go.set()
    await executor.run(Priority.CONTROL, lambda: None)
    assert INTERNAL_ERRORS.count == before + counted


def niceness_here() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
async def test_what_computes_and_what_blocks_come_after_the_event_loop(executor: Executor) -> None:
    mine = niceness_here()
    asyncio.get_running_loop().set_default_executor(threads_for_blocking())
    assert await asyncio.to_thread(niceness_here) == mine + GIVES_WAY
    assert await executor.run(Priority.FORWARD, niceness_here) == mine + GIVES_WAY
    assert niceness_here() == mine
