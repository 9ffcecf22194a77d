"""Sleep is seen on systems whose steady clock stands still meanwhile, and what NTP does to the wall clock is not taken for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.swarm.sleep import LEAST_SLEEP_S, ClockReading, SleepClock

WALL_S = 1.7e9
PAUSES_S = st.lists(st.floats(0.001, 600.0), max_size=50)
CLOSE = 1e-3
"""What is lost in floats of this size, over fifty readings."""


class Machine:
    """Both clocks of a machine, and what peerd makes of them."""

    def __init__(self) -> None:
        self.steady_s, self.wall_s = 1000.0, WALL_S
        self.clock = SleepClock(WALL_S - 1000.0)

    def look(self) -> float:
        self.clock = self.clock.after(ClockReading(self.steady_s, self.wall_s))
        return self.steady_s + self.clock.slept_s

    def run(self, pause_s: float, *, slewed: float = 0.0) -> None:
        self.steady_s += pause_s
        self.wall_s += pause_s * (1 + slewed)


@given(PAUSES_S, st.floats(-5e-4, 5e-4))
def test_slewing_is_no_sleep(pauses_s: list[float], slewed: float) -> None:
    machine = Machine()
    for pause_s in pauses_s:
        machine.run(pause_s, slewed=slewed)
        assert machine.look() == machine.steady_s


@given(st.lists(st.floats(-1e9, LEAST_SLEEP_S - CLOSE), max_size=20))
def test_small_steps_and_a_clock_that_is_set_back_are_no_sleep(steps_s: list[float]) -> None:
    machine = Machine()
    for step_s in steps_s:
        machine.run(1.0)
        machine.wall_s += step_s
        machine.look()
    assert machine.clock.slept_s == 0.0


@given(PAUSES_S, st.floats(LEAST_SLEEP_S + CLOSE, 1e7))
def test_a_jump_of_the_wall_clock_alone_counts_once_and_whole(pauses_s: list[float], slept_s: float) -> None:
    machine = Machine()
    before_s = machine.look()
    machine.wall_s += slept_s
    assert machine.look() - before_s == pytest.approx(slept_s, abs=CLOSE)
    for pause_s in pauses_s:
        machine.run(pause_s)
        machine.look()
    assert machine.clock.slept_s == pytest.approx(slept_s, abs=CLOSE)


@given(st.floats(LEAST_SLEEP_S, 1e7))
def test_sleep_that_the_steady_clock_counts_is_not_counted_again(slept_s: float) -> None:
    machine = Machine()
    before_s = machine.look()
    machine.run(slept_s)
    assert machine.look() - before_s == pytest.approx(slept_s, abs=CLOSE)
    assert machine.clock.slept_s == 0.0


@given(st.lists(st.tuples(st.floats(0, 600.0), st.floats(-1e7, 1e7)), max_size=30))
def test_whatever_is_done_to_the_wall_clock_time_never_goes_back(changes: list[tuple[float, float]]) -> None:
    machine = Machine()
    last_s = machine.look()
    for pause_s, step_s in changes:
        machine.run(pause_s)
        machine.wall_s += step_s
        now_s = machine.look()
        assert now_s >= last_s
        last_s = now_s
