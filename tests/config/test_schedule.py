"""The learning rate is a function of the step: it rises during the warm-up, falls to its final value, and stays within bounds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.config.manifest import TrainConfig
from peerd.config.schedule import learning_rate_at


@st.composite
def falling(draw: st.DrawFn) -> TrainConfig:
    warmup, length = draw(st.integers(0, 40)), draw(st.integers(1, 60))
    by_steps = draw(st.booleans())
    return TrainConfig(
        schedule=draw(st.sampled_from(["linear", "cosine"])),
        learning_rate=draw(st.floats(0.1, 1.0)),
        final_learning_rate=draw(st.floats(0.0, 0.1)),
        warmup_steps=warmup,
        steps=warmup + length if by_steps else draw(st.integers(0, 500)),
        decay_steps=0 if by_steps else warmup + length,
    )


@given(falling(), st.integers(0, 200))
def test_the_rate_rises_over_the_warm_up_and_falls_after_it(train: TrainConfig, step: int) -> None:
    rate, following = learning_rate_at(train, step), learning_rate_at(train, step + 1)
    assert 0 < rate <= train.learning_rate or rate == train.final_learning_rate == 0
    if step + 1 < train.warmup_steps:
        assert rate < following
    else:
        assert rate >= following >= train.final_learning_rate


@given(falling())
def test_it_is_whole_at_the_end_of_the_warm_up_and_has_come_down_at_the_end_of_its_decay(train: TrainConfig) -> None:
    if train.warmup_steps:
        assert learning_rate_at(train, train.warmup_steps - 1) == pytest.approx(train.learning_rate)
    for step in (train.last_decay_step - 1, train.last_decay_step + 100):
        assert learning_rate_at(train, step) == pytest.approx(train.final_learning_rate, abs=1e-15)


@pytest.mark.parametrize(("schedule", "half_way"), [("linear", 0.6), ("cosine", 0.2 + 0.8 * (1 + math.cos(math.pi / 2)) / 2)])
def test_half_way_down(schedule: str, half_way: float) -> None:
    train = TrainConfig(schedule=schedule, learning_rate=1.0, final_learning_rate=0.2, warmup_steps=2, decay_steps=12)  # type: ignore[arg-type]
    assert learning_rate_at(train, 6) == pytest.approx(half_way)
    assert learning_rate_at(train, 0) == 0.5
