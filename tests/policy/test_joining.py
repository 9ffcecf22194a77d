"""The plan of a joiner: it comes true in a stage that goes on meanwhile, and where it cannot, what it names would do."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.step.acts import FetchAverage, Wait
from peerd.policy.step.joining import KEEPS_UP, TIMED, JoinProgress, StagePace, can_catch_up, duration, pause_s, plan_of
from peerd.policy.step.situation import OwnState
from tests.policy.test_stepping import decided, joiner
from tests.strategies import member

MB = 10**6
HOME = JoinProgress(
    bytes_left=1200 * MB, bytes_total=1200 * MB, rate=100e6 / 8, steps_behind=0, step_s=120.0, average_bytes=400 * MB, average_s=None
)
"""A stage of 100 million parameters over a downlink of 100 Mbit/s."""


def lived(now: JoinProgress) -> float:
    """When the joiner has what its stage has: it downloads, and then gets one average after another."""
    assert now.rate is not None
    assert now.step_s is not None
    average_s = now.average_s if now.average_s is not None else now.average_bytes / now.rate
    time_s, has = now.bytes_left / now.rate, 0
    while has < now.steps_behind + int(time_s / now.step_s):
        time_s, has = time_s + average_s, has + 1
    return time_s


@given(
    left=st.integers(0, 10**10),
    behind=st.integers(0, 20),
    step_s=st.floats(0.3, 600.0),
    share=st.floats(0.01, KEEPS_UP),
    download_steps=st.floats(0.1, 50.0),
)
def test_the_plan_comes_true_whether_steps_take_a_third_of_a_second_or_ten_minutes(
    left: int, behind: int, step_s: float, share: float, download_steps: float
) -> None:
    rate = max(left, 1) / (download_steps * step_s)
    now = replace(HOME, bytes_left=left, bytes_total=left, rate=rate, steps_behind=behind, step_s=step_s, average_s=share * step_s)
    ready_s = plan_of(now).ready_s
    assert ready_s is not None
    one_more_s = share * step_s / (1 - share)  # it may end at the end of a step or at its beginning
    assert ready_s - one_more_s <= lived(now) + 1e-6 <= ready_s + one_more_s + 2e-6


def test_a_joiner_over_a_home_line_says_what_it_downloads_and_when_it_is_ready() -> None:
    plan = plan_of(replace(HOME, bytes_left=900 * MB))
    assert plan.text == (
        "downloads 1200 MB, 300 MB of it here, at 100 Mbit/s; 0 steps behind, an average takes 32 s and a step 2 min; ready in about 98 s"
    )
    assert plan.ready_s == pytest.approx(72 + 72 / 120 * 32 / (1 - 32 / 120))


def test_a_joiner_that_will_not_catch_up_at_its_rate_says_so_while_it_downloads() -> None:
    plan = plan_of(replace(HOME, bytes_left=900 * MB, step_s=20.0))
    assert plan.ready_s == math.inf
    assert plan.text == (
        "downloads 1200 MB, 300 MB of it here, at 100 Mbit/s; 0 steps behind; at this rate it cannot catch up: an average of 400 MB "
        "takes 32 s to get, and a step 20 s; it needs steps of at least 36 s, or averages at 178 Mbit/s"
    )


def test_what_is_not_known_yet_is_not_told() -> None:
    assert plan_of(replace(HOME, bytes_left=0)).text == "ready in about 0.0 s"
    assert plan_of(replace(HOME, rate=None)).ready_s is None
    assert plan_of(replace(HOME, step_s=None)).ready_s == 96.0, "no step has ended meanwhile"
    assert plan_of(replace(HOME, step_s=None, steps_behind=1)).ready_s is None
    assert "ready" not in plan_of(replace(HOME, rate=None)).text


@given(average_s=st.floats(0.01, 1e5), share=st.floats(0.01, 1 / KEEPS_UP, exclude_max=True))
def test_a_joiner_that_cannot_catch_up_says_what_step_or_line_would_do(average_s: float, share: float) -> None:
    now = replace(HOME, bytes_left=0, steps_behind=3, average_s=average_s, step_s=share * average_s)
    plan = plan_of(now)
    assert not can_catch_up(now)
    assert plan.ready_s == math.inf
    assert f"needs steps of at least {duration(average_s / KEEPS_UP)}, or averages at " in plan.text
    assert can_catch_up(replace(now, step_s=1.001 * average_s / KEEPS_UP))
    assert can_catch_up(replace(now, average_s=0.999 * KEEPS_UP * share * average_s))


def test_a_joiner_that_cannot_catch_up_asks_for_nothing() -> None:
    mine, mate = joiner(step=5), member("m", step=9, kept_averages=9)
    assert isinstance(decided(mine, mate, own=OwnState(record=mine)), FetchAverage)
    told = "it cannot catch up"
    assert decided(mine, mate, own=OwnState(record=mine, cannot_catch_up=told)) == Wait(told)
    assert decided(mine, replace(mate, kept_averages=0), own=OwnState(record=mine, cannot_catch_up=told)) == Wait(told)


def test_it_waits_for_longer_than_it_has_tried() -> None:
    assert pause_s(100.0) > 100.0
    assert pause_s(-1.0) == 0.0


def test_a_stage_is_as_fast_as_its_last_steps_and_a_long_step_counts_before_it_ends() -> None:
    pace = StagePace()
    pace.saw(3, 0.0)
    assert pace.step_s(50.0) is None
    for step, now_s in ((5, 4.0), (5, 5.0), (6, 6.0)):
        pace.saw(step, now_s)
    assert pace.step_s(6.0) == 2.0
    assert pace.step_s(600.0) == 594.0
    for step in range(7, 8 + TIMED):
        pace.saw(step, 10.0 * step)
    assert pace.step_s(10.0 * (7 + TIMED)) == 10.0


def test_a_stage_that_goes_back_is_timed_anew() -> None:
    pace = StagePace()
    pace.saw(8, 0.0)
    pace.saw(9, 1.0)
    pace.saw(4, 2.0)
    assert pace.step_s(3.0) is None
