"""Polls a swarm of daemons until a benchmark's condition holds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

from peerd.cli.demo_daemons import DemoSwarm
from peerd.errors import PeerdError, TimedOutError

POLL_S = 1.0
"""Polling takes processor time from the daemons; it need not be frequent, because steps carry the time of their end."""
LOOK_EVERY = 10.0
"""Dozens of daemons are polled no more often than after so many times what it takes."""
SILENCE_S = 120.0


def nothing() -> None:
    return


def looks(swarm: DemoSwarm, period_s: float = POLL_S, silence_s: float = SILENCE_S) -> Iterator[None]:
    """Poll all daemons once a period, and yield. Raises PeerdError if a stage dies out or there is no progress."""
    heard, heard_at, took_s = swarm.heard(), time.monotonic(), 0.0
    while True:
        time.sleep(max(period_s, LOOK_EVERY * took_s))
        began_s = time.monotonic()
        swarm.poll()
        took_s = time.monotonic() - began_s
        swarm.require_every_stage()
        yield
        if swarm.heard() != heard:
            heard, heard_at = swarm.heard(), time.monotonic()
        elif time.monotonic() - heard_at > silence_s:
            raise TimedOutError(f"nothing done for {silence_s:.0f} s in step {swarm.step}")


def until_holds(swarm: DemoSwarm, holds: Callable[[], bool], what: str, patience_s: float, look_s: float) -> float:
    """Poll until this holds. Returns the time at which it did. Raises PeerdError if a peer ends, or after so long."""
    deadline_s = time.monotonic() + patience_s
    while not holds():
        if time.monotonic() > deadline_s:
            raise TimedOutError(f"not within {patience_s:.0f} s: {what}")
        time.sleep(look_s)
        swarm.poll()
        if any(not daemon.alive for daemon in swarm.daemons):
            raise PeerdError("a peer has ended")
    return time.monotonic()


def until_done(swarm: DemoSwarm, num_steps: int, after_each_look: Callable[[], None] = nothing) -> None:
    """Return once all daemons are done and the losses of so many steps are known. Raises PeerdError as `looks` does."""
    for _ in looks(swarm):
        after_each_look()
        if swarm.finished and len(swarm.steps) >= num_steps:
            return


def median_step_s(ends_s: Iterable[float]) -> float:
    """The median time between two ends of steps."""
    return statistics.median(later_s - sooner_s for sooner_s, later_s in pairwise(ends_s))
