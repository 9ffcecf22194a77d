"""When an owner's machine may work: every limit pauses by its own reading only, and says why and until when."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.owner.governor import (
    BUSY_SHARE,
    COOL_DOWN_C,
    LEAST_DUTY,
    QUIET_S,
    QUIET_SHARE,
    Hours,
    Limits,
    Pause,
    PauseVerdict,
    Readings,
    duty_within,
    judge,
    why_pause,
)

minutes = st.integers(0, 24 * 60 - 1)
yes_no_unknown = st.sampled_from([True, False, None])
readings = st.builds(
    Readings,
    minute=minutes,
    today=st.integers(0, 10**12),
    this_month=st.integers(0, 10**13),
    others_share=st.none() | st.floats(0, 1),
    gpu_shared=yes_no_unknown,
    input_idle=yes_no_unknown,
    on_battery=yes_no_unknown,
    on_metered=yes_no_unknown,
    temperature=st.none() | st.floats(0, 120),
)
STRICT = Limits(daily=10, monthly=100, hours=Hours(600, 660), max_temperature=80, while_used=False, on_battery=False, on_metered=False)
QUIET = Readings(minute=610, others_share=0.0, gpu_shared=False, input_idle=True, on_battery=False, on_metered=False, temperature=40)


@given(readings, st.booleans())
def test_without_limits_nothing_pauses(read: Readings, paused: bool) -> None:
    assert why_pause(Limits(), read, paused) is None


def test_a_quiet_machine_works_within_all_limits() -> None:
    assert why_pause(STRICT, QUIET) is None
    assert why_pause(STRICT, QUIET, paused=True) is None


@pytest.mark.parametrize(
    ("changed", "reason", "until"),
    [
        ({"minute": 660}, "hours", "10:00"),
        ({"minute": 599}, "hours", "10:00"),
        ({"today": 10}, "today's data quota", "midnight"),
        ({"this_month": 100}, "month's data quota", "first of next month"),
        ({"on_battery": True}, "battery", "plugged in"),
        ({"on_metered": True}, "metered", "another connection"),
        ({"temperature": 80.1}, "80 degrees", "below 72"),
        ({"gpu_shared": True}, "GPU", "free again"),
        ({"others_share": BUSY_SHARE + 0.01}, "26%", "free again"),
        ({"input_idle": False}, "somebody works", "free again"),
    ],
)
def test_each_reading_pauses_with_its_reason(changed: dict[str, object], reason: str, until: str) -> None:
    pause = why_pause(STRICT, replace(QUIET, **changed))  # type: ignore[arg-type]
    assert pause is not None
    assert reason in pause.reason
    assert until in pause.until


@given(readings)
def test_a_sensor_that_is_not_there_pauses_nobody(read: Readings) -> None:
    nothing_known = replace(
        read,
        minute=610,
        today=0,
        this_month=0,
        others_share=None,
        gpu_shared=None,
        input_idle=None,
        on_battery=None,
        on_metered=None,
        temperature=None,
    )
    assert why_pause(STRICT, nothing_known) is None


@given(readings)
def test_who_may_not_work_may_not_go_on_either(read: Readings) -> None:
    """Going on is never easier than staying: no reading makes a peer come and go."""
    assert why_pause(STRICT, read) is None or why_pause(STRICT, read, paused=True) is not None


pauses = st.none() | st.builds(Pause, st.sampled_from(["a", "b"]), st.just("later"), st.booleans())


@given(st.lists(st.tuples(st.floats(0.1, 50), pauses), max_size=30))
def test_a_pause_counts_at_once_and_what_a_sensor_saw_ends_after_a_quiet_minute(looks: list[tuple[float, Pause | None]]) -> None:
    verdict, now_s, last, quiet_from_s = PauseVerdict(), 0.0, None, 0.0
    for after_s, found in looks:
        now_s += after_s
        verdict = judge(verdict, found, now_s)
        if found is not None:
            last, quiet_from_s = found, float("inf")
            assert verdict.pause == found
        else:
            quiet_from_s = min(quiet_from_s, now_s)
            holds = last is not None and last.sensed and now_s - quiet_from_s < QUIET_S
            assert verdict.pause == (last if holds else None)
            last = last if holds else None


def test_going_on_takes_a_clearer_case() -> None:
    busy = replace(QUIET, others_share=(BUSY_SHARE + BUSY_SHARE * QUIET_SHARE) / 2)
    warm = replace(QUIET, temperature=80 - COOL_DOWN_C / 2)
    for read in (busy, warm):
        assert why_pause(STRICT, read) is None
        assert why_pause(STRICT, read, paused=True) is not None


@given(minutes, minutes, minutes)
def test_hours_and_the_hours_between_them_make_the_day(start: int, end: int, minute: int) -> None:
    if start == end:
        with pytest.raises(ValueError, match="different"):
            Hours(start, end)
    else:
        assert Hours(start, end).holds(minute) != Hours(end, start).holds(minute)
        assert Hours(start, end).holds(start)
        assert not Hours(start, end).holds(end)


@pytest.mark.parametrize("field", ["upload", "download", "daily", "monthly", "memory", "disk", "power", "max_temperature"])
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf")])
def test_impossible_limits_are_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        Limits(**{field: value})  # type: ignore[arg-type]


@given(st.floats(1, 100), st.floats(110, 1000), st.floats(0.1, 1), st.floats(0.01, 1))
def test_a_gpu_is_kept_within_its_power_and_works_as_much_as_that_allows(idle: float, busy: float, duty: float, start: float) -> None:
    """One that draws in proportion to its work, and whose readings lag as those of the sensors do."""
    limits, share, shown = Limits(power=100.0, duty=duty), min(start, duty), idle
    for _ in range(2000):
        shown += 0.2 * (idle + share * (busy - idle) - shown)
        share = duty_within(limits, share, shown)
    drawn, allowed = idle + share * (busy - idle), idle + duty * (busy - idle)
    assert LEAST_DUTY <= share <= duty
    assert drawn <= 102 or share == LEAST_DUTY
    assert drawn >= min(98, allowed * (1 - 1e-9))


@given(st.floats(0.01, 1), st.none() | st.floats(0, 1000))
def test_a_duty_is_kept_as_it_is_where_no_power_is_limited_or_known(duty: float, power: float | None) -> None:
    assert duty_within(Limits(duty=duty), 0.5, power) == duty
    assert duty_within(Limits(duty=duty, power=100), 0.5, None) == duty


@pytest.mark.parametrize("duty", [0.0, -0.5, 1.01, float("nan")])
def test_a_duty_is_a_share(duty: float) -> None:
    with pytest.raises(ValueError, match="duty"):
        Limits(duty=duty)
