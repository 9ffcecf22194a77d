"""Values that overflow: in float16 the step is left out and the scale falls, else the microbatch is refused and nothing is added."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from peerd.errors import DivergedError, NotFiniteError
from peerd.reference import train_reference
from peerd.stage.accumulator import LARGEST, Accumulator, usable
from peerd.stage.microbatches import backward, forward
from tests.stage.test_options import Chain, run_with, worst_difference
from tests.stage.test_state import CPU, Stage
from tests.tiny_run import corpus_of

SPOILT: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 100.0, "weight_decay": 1.0}
"""After the first update float16 cannot hold the activations; float32 can for some steps."""


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -2 * LARGEST])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_value_that_overflowed_is_seen_among_many(value: float, dtype: torch.dtype) -> None:
    spoilt = torch.zeros(9, dtype=dtype)
    assert usable([spoilt, torch.full((2,), -LARGEST, dtype=dtype), torch.zeros(0, dtype=dtype)])
    spoilt[4] = value
    assert not usable([torch.zeros(3, dtype=dtype), spoilt])


def test_activations_that_overflow_are_not_handed_on() -> None:
    stage = Stage(stage=0)
    with torch.no_grad():
        next(stage.state.holdings.module.parameters()).fill_(torch.inf)
    with pytest.raises(NotFiniteError, match="activations of microbatch 0 of step 0 are not finite at stage 0"):
        forward(stage.state, stage.batch(0))


@pytest.mark.parametrize("given", [1e25, math.inf])
def test_gradients_that_overflow_are_not_added(given: float) -> None:
    stage = Stage(stage=0)
    batch = stage.batch(0)
    output = forward(stage.state, batch)
    with pytest.raises(NotFiniteError, match="gradients of microbatch 0"):
        backward(stage.state, batch, torch.full_like(output, given))
    assert stage.state.record.done == 0
    assert not stage.state.accumulator.flat.any()


def test_the_largest_gradients_of_a_step_can_be_squared_and_averaged() -> None:
    accumulator, number = Accumulator({"a": torch.Size([4])}, torch.float32, CPU), 4096
    for _ in range(number):
        accumulator.add([torch.full((4,), LARGEST)], None)
    mean = accumulator.sums(accumulator.flat)["a"] / number
    assert torch.equal(mean, torch.full((4,), LARGEST))
    assert bool((mean**2).isfinite().all())
    assert math.isfinite(accumulator.norm(accumulator.flat, number))


def test_an_overflow_in_float16_counts_as_done_and_a_missing_loss_is_left_out_of_the_mean() -> None:
    accumulator = Accumulator({"a": torch.Size([2])}, torch.float64, CPU, overflows=True)
    accumulator.add([torch.ones(2)], 3.0)
    accumulator.add([torch.full((2,), math.nan)], math.nan, overflowed=True)
    accumulator.add([torch.full((2,), math.inf)], 5.0, overflowed=True)
    assert accumulator.flat.tolist() == [1, 1, 1, 2, 8]
    assert accumulator.mean_loss(accumulator.flat, 3) == 4.0
    assert accumulator.norm(accumulator.flat, 3) == math.inf
    lost: Tensor = torch.tensor([0, 0, 3, 3, 0], dtype=torch.float64)
    assert math.isnan(accumulator.mean_loss(lost, 3))


@pytest.mark.parametrize("keep_graph", [False, True])
def test_a_float16_run_leaves_steps_out_until_the_scale_cannot_fall_and_stops_where_the_reference_stops(
    keep_graph: bool, tmp_path: Path
) -> None:
    """Its forward passes overflow from step 1 on: a scale of 4 falls to 2 and to 1, and step 3 is refused."""
    manifest = run_with({**SPOILT, "precision": "float16", "loss_scale": 4.0}, num_stages=3)
    corpus = corpus_of(manifest, tmp_path)
    chain, expected = Chain(manifest, keep_graph), train_reference(manifest, corpus, 3)
    norms = chain.train(corpus, 3)
    assert norms == expected.norms
    assert norms[1:] == [math.inf, math.inf]
    assert worst_difference(chain.parameters, expected.parameters) < 1e-6
    assert [entry.loss for entry in chain.states[-1].history] == [entry.loss for entry in expected.history]
    assert all(math.isfinite(entry.loss) for entry in expected.history)
    with pytest.raises(NotFiniteError):
        chain.microbatch(corpus, 3, 0)
    with pytest.raises(DivergedError, match="diverged at step 3"):
        train_reference(manifest, corpus, 4)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_other_precisions_stop_where_the_reference_stops(precision: str, tmp_path: Path) -> None:
    manifest = run_with({**SPOILT, "precision": precision}, num_stages=2)
    corpus = corpus_of(manifest, tmp_path)
    with pytest.raises(DivergedError) as stop:
        train_reference(manifest, corpus, 20)
    chain = Chain(manifest)
    with pytest.raises(NotFiniteError, match="of step") as refusal:
        chain.train(corpus, 20)
    step = chain.states[0].record.step
    assert stop.value.message.startswith(f"diverged at step {step}:")
    assert f"of step {step} " in refusal.value.message
