"""Strikes of the demo's chaos that take several steps: p2pd killed again and again, a stage wiped, a peer that wakes with an old state.

Each is a generator, which the demo advances at every look at its daemons, until it is over.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from peerd.cli.demo_chaos import STEPS_MISSED
from peerd.cli.demo_figures import longest_still_s
from peerd.cli.demo_process import p2pd_of
from peerd.errors import PeerdError

if TYPE_CHECKING:
    from peerd.cli.demo_daemons import DemoSwarm
    from peerd.cli.demo_process import DemoDaemon

Act = Iterator[None]
ACT_STILL_S, LONGEST_SLEEP_S = 180.0, 6 * 3600.0
"""A part of an act is waited for as long as the run moves, and so long after that. A sleeper wakes after the second time by itself."""
OWNER_SILENCE_S = 150.0
"""Longest wait for the answer to `pause`, which comes when the daemon has handed on what it held."""
LOOK_SILENCE_S = 3.0
SEEN_WITHIN_S = 5.0
"""Longest wait until others see a woken peer serve its old step. It joins instead if it wakes with news of a mate that has paused since."""


def _until(swarm: DemoSwarm, holds: Callable[[], bool]) -> Generator[None, None, bool]:
    """Wait for a condition across looks. False if the run stood still for too long before it held."""
    heard, heard_at = swarm.heard(), time.monotonic()
    while not holds():
        if (now := swarm.heard()) != heard:
            heard, heard_at = now, time.monotonic()
        elif time.monotonic() - heard_at > longest_still_s((daemon.status for daemon in swarm.living), ACT_STILL_S):
            return False
        yield
    return True


def _within(holds: Callable[[], bool], timeout_s: float) -> Generator[None, None, bool]:
    """Wait for a condition across looks. False if the time was up before it held."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        yield
    return True


def kill_p2pd(swarm: DemoSwarm, daemon: DemoDaemon, for_s: float) -> Act:
    """Kill its p2pd, and each one that the daemon starts within `for_s`."""
    began, killed = time.monotonic(), 0
    fault = swarm.note(daemon, "p2pd", "lost its p2pd")
    last: int | None = None
    while (passed_s := time.monotonic() - began) < for_s and daemon.alive:
        with contextlib.suppress(ProcessLookupError):
            if (process := p2pd_of(daemon.process.pid)) != last:
                os.kill(process, signal.SIGKILL)
                last, killed = process, killed + 1
        yield
    swarm.amend(fault, f"lost its p2pd {killed} times within {passed_s:.0f} s", passed_s)


def wipe_stage(swarm: DemoSwarm, comes_back: DemoDaemon, addresses: str) -> Act:
    """Kill all peers of its stage, start this one again from its disk, and wait until all peers serve again."""
    began, reached = time.monotonic(), swarm.step
    others = [daemon for daemon in swarm.living if daemon.stage == comes_back.stage and daemon is not comes_back]
    fault = swarm.note(comes_back, "stage-wiped", "was killed with its whole stage, and starts again from its disk")
    for daemon in others:
        daemon.kill()
    again = swarm.spawn_again(comes_back, addresses)
    is_back = yield from _until(swarm, lambda: (again.answers and again.serves) or not again.alive)
    first_step, back_s = again.step, time.monotonic() - began
    all_serve = yield from _until(swarm, lambda: all(daemon.answers and daemon.serves for daemon in swarm.living))
    told = f"was killed with its whole stage, which served again from disk after {back_s:.0f} s, at step {first_step} of {reached}"
    if not (is_back and all_serve):
        told = "was killed with its whole stage, which did not come back"
    swarm.amend(fault, told, back_s, max(0, reached - first_step))


def pause_stale(swarm: DemoSwarm, sleeper: DemoDaemon) -> Act:
    """It sleeps, its mates train on and pause, it wakes, they resume: the stage must go on from their newer state."""
    began, mates = time.monotonic(), [each for each in swarm.living if each.stage == sleeper.stage and each is not sleeper]
    asleep_at = sleeper.step
    fault = swarm.note(sleeper, "pause-stale", "sleeps while its mates train on and pause")
    sleeper.suspend(LONGEST_SLEEP_S)
    try:
        yield from _until(swarm, lambda: min(mate.step for mate in mates) >= asleep_at + STEPS_MISSED)
        yield from _until(swarm, _all_done([swarm.pool.submit(_ask, mate, "pause") for mate in mates]))
        swarm.ask(mates, LOOK_SILENCE_S)
        reached = max(mate.step for mate in mates)
        sleeper.wake()
        yield from _within(lambda: _is_seen(swarm, sleeper, mates), SEEN_WITHIN_S)
        woke_at = sleeper.step
    finally:
        sleeper.wake()
    yield from _until(swarm, _all_done([swarm.pool.submit(_ask, mate, "resume") for mate in mates]))
    lowest = reached - 1  # other stages may wait there for the paused one
    others = [each for each in swarm.living if each.stage != sleeper.stage and each.serves]

    def is_back() -> bool:
        nonlocal lowest
        lowest = min([lowest, *(each.step for each in others if each.serves)])
        return all(each.answers and each.serves and each.step >= reached for each in (sleeper, *mates) if each.alive)

    came_back, lasted_s = (yield from _until(swarm, is_back)), time.monotonic() - began
    ends = "brought it back" if lowest >= reached - 1 else f"came too late: the run went back to step {lowest}"
    told = f"woke at step {woke_at}; its mates had paused at step {reached} and {ends}; {lasted_s:.0f} s"
    swarm.amend(fault, told if came_back else "woke with an old step, and the stage did not come back", lasted_s, reached - 1 - lowest)


def _ask(daemon: DemoDaemon, verb: str) -> None:
    with contextlib.suppress(PeerdError):  # it has just ended, which the next poll notes
        daemon.client.request(verb, silence_s=OWNER_SILENCE_S)


def _all_done(asked: Sequence[Future[Any]]) -> Callable[[], bool]:
    return lambda: all(each.done() for each in asked)


def _is_seen(swarm: DemoSwarm, woken: DemoDaemon, resting: Sequence[DemoDaemon]) -> bool:
    """Whether a peer of another stage, or the woken one where there is no other stage, sees the woken one serve."""
    table = swarm.table([each for each in swarm.living if each not in resting and each is not woken] or [woken])
    rows = [row for stage in (table["stages"] if table is not None else []) for row in stage["peers"]]
    return any(woken.ready is not None and row["id"] == woken.ready.peer and row["phase"] != "joining" for row in rows)
