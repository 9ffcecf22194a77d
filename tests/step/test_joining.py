"""A joiner that comes no nearer to its stage stops asking for a while, and tries again when things have changed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from peerd.policy.step.joining import KEEPS_UP, PAUSE_SHARE, TIMED
from peerd.step.joining import Joining
from peerd.table.record import Phase
from tests.strategies import member, view_of

STEP_S, AVERAGE_S = 5.0, 8.0


class Join:
    """A joiner at some step, and a stage that goes on."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.stage_step = 0
        self.mine, self.mate = member("me", step=0, phase=Phase.JOINING), member("m", step=0)
        flat = torch.empty(10**8, device="meta")
        state: Any = SimpleNamespace(record=self.mine, accumulator=SimpleNamespace(flat=flat))
        self.state = state
        downloader: Any = SimpleNamespace(bytes_total=0, bytes_done=0, rate=None, step=None)
        self.joining = Joining(state, downloader)

    def looks(self, step: int, stage_step: int) -> str:
        self.state.record = member("me", step=step, phase=Phase.JOINING)
        return self.joining.why_wait(view_of(self.state.record, member("m", step=stage_step)), self.now_s)

    def applies(self, average_s: float, step_s: float, behind: int) -> list[str]:
        """Apply a few averages, while the stage makes a step in each `step_s`. Returns why it waits, at each look."""
        found, began_s = [self.looks(0, behind)], self.now_s
        for number in range(1, TIMED + 1):
            self.now_s += average_s
            self.joining.applied(average_s)
            self.stage_step = behind + int((self.now_s - began_s) / step_s)
            found.append(self.looks(number, self.stage_step))
        return found


def test_a_joiner_waits_once_several_averages_have_brought_it_no_nearer() -> None:
    join = Join()
    *before, last = join.applies(AVERAGE_S, STEP_S, behind=2)
    assert before == TIMED * [""]
    assert last.startswith("it cannot catch up: an average of 400 MB takes 8.0 s to get, and a step ")
    assert join.joining.waits


def test_a_joiner_that_comes_nearer_goes_on() -> None:
    join = Join()
    assert join.applies(STEP_S / 2, STEP_S, behind=6) == (TIMED + 1) * [""]
    assert join.applies(KEEPS_UP * STEP_S, STEP_S, behind=6) == (TIMED + 1) * [""]
    assert not join.joining.waits


def test_it_tries_again_after_a_while_and_measures_anew() -> None:
    join = Join()
    join.applies(AVERAGE_S, STEP_S, behind=2)
    tried_s = TIMED * AVERAGE_S
    ends_s = join.now_s + PAUSE_SHARE * tried_s
    while join.now_s + STEP_S < ends_s:
        join.now_s += STEP_S
        join.stage_step += 1
        assert join.looks(TIMED, join.stage_step)
    join.now_s = ends_s
    assert join.looks(TIMED, join.stage_step + 1) == ""
    assert not join.joining.waits


def test_it_tries_again_at_once_when_steps_take_longer() -> None:
    join = Join()
    join.applies(AVERAGE_S, STEP_S, behind=2)
    join.now_s += AVERAGE_S
    assert join.looks(TIMED, join.stage_step), "the step is not long enough yet"
    join.now_s += AVERAGE_S
    assert join.looks(TIMED, join.stage_step) == ""


def test_before_anything_is_known_there_is_no_plan() -> None:
    join = Join()
    assert join.joining.plan(view_of(join.mine, join.mate), join.now_s).text == ""
