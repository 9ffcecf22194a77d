"""A simulated machine: one compute lane, which takes the passes in the daemon's order."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from random import Random

from peerd.policy.route.launching import FORWARDS_PER_MICROBATCH
from peerd.sim.clock import Clock

BACKWARD, FORWARD = 0, 1
"""Backward passes go first, as in the daemon; passes of an older step precede both."""
FORWARD_SHARE = 1 / FORWARDS_PER_MICROBATCH


class Machine:
    """`noise`: standard deviation of the logarithm of a pass's time."""

    def __init__(self, clock: Clock, noise: float, random: Random) -> None:
        self._clock = clock
        self._noise = noise
        self._random = random
        self._waiting: list[tuple[int, int, int, float, Callable[[float, float], None]]] = []
        self._number = 0
        self._is_busy = False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def compute(self, step: int, kind: int, usual_s: float, done: Callable[[float, float], None]) -> None:
        """Make a pass that usually takes so long. `done` gets when it began and ended."""
        self._number += 1
        heapq.heappush(self._waiting, (step, kind, self._number, usual_s, done))
        if not self._is_busy:
            self._next()

    def _next(self) -> None:
        if not self._waiting:
            self._is_busy = False
            return
        self._is_busy = True
        *_, usual_s, done = heapq.heappop(self._waiting)
        began_s = self._clock.now_s
        took_s = usual_s * math.exp(self._random.gauss(0, self._noise)) if self._noise else usual_s
        self._clock.after(took_s, self._end, began_s, done)

    def _end(self, began_s: float, done: Callable[[float, float], None]) -> None:
        done(began_s, self._clock.now_s)
        self._next()
