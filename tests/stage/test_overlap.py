"""Delayed updates: a step is computed while the one before is averaged, with its own ledger and the parameters it is due."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from peerd.errors import WrongStateError
from peerd.reference import train_reference
from peerd.stage.microbatches import backward, forward, forward_backward
from peerd.stage.results import HeldMicrobatch
from peerd.table.record import Phase
from peerd.train.corpus import Corpus
from tests.stage.test_options import OPTIONS, Chain, run_with, worst_difference
from tests.stage.test_state import Stage
from tests.tiny_run import corpus_of, tiny_manifest

STEPS = 4


@pytest.fixture(autouse=True)
def delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.stage.test_state.MANIFEST", tiny_manifest(2, accumulate="float64", delayed_updates=True))


class Overlapping(Chain):
    """Half of every step is computed before the last one is applied anywhere, and some of it while only stage 0 has applied it."""

    def train(self, corpus: Corpus, steps: int = STEPS) -> list[float | None]:
        norms = []
        half = self.manifest.train.microbatches_per_step // 2
        self.accumulate(corpus, 0)
        for step in range(1, steps + 1):
            norms.append(self.average()[1])
            for index in range(half if step < steps else 0):
                self.microbatch(corpus, step, index)
            self.states[0].commit(norms[-1])
            if step < steps:
                self.microbatch(corpus, step, half)
            for state in self.states[1:]:
                state.commit(norms[-1])
            for index in range(half + 1, self.manifest.train.microbatches_per_step if step < steps else 0):
                self.microbatch(corpus, step, index)
        return norms


@pytest.mark.parametrize("keep_graph", [False, True])
@pytest.mark.parametrize("option", ["delayed updates", "all"])
def test_steps_that_overlap_equal_the_reference_to_the_bit(option: str, keep_graph: bool, tmp_path: Path) -> None:
    manifest = run_with(OPTIONS[option], num_stages=2)
    corpus = corpus_of(manifest, tmp_path)
    chain, expected = Overlapping(manifest, keep_graph=keep_graph), train_reference(manifest, corpus, STEPS)
    norms = chain.train(corpus)
    assert worst_difference(chain.parameters, expected.parameters) == 0
    assert [entry.loss for entry in chain.states[-1].history] == [entry.loss for entry in expected.history]
    assert [norm for norm in norms if norm is not None] == expected.norms


def early(stage: Stage, index: int, **changes: Any) -> HeldMicrobatch:
    record = stage.state.record
    return stage.batch(index, step=record.step + 1, accept_mark=(record.incarnation, record.next_ledger_no), **changes)


def add_early(stage: Stage, index: int) -> Tensor:
    outcome = forward_backward(stage.state, early(stage, index))
    assert outcome.refused == ""
    assert outcome.gradient is not None
    return outcome.gradient


def test_while_a_step_is_averaged_the_next_one_is_added_to_and_kept_by_the_commit() -> None:
    stage = Stage()
    stage.average()
    assert stage.state.record.phase is Phase.AVERAGED
    sums = stage.state.accumulator.flat.clone()
    add_early(stage, 2)
    assert torch.equal(stage.state.accumulator.flat, sums), "the frozen sum is not touched"
    stage.state.commit()
    record = stage.state.record
    assert (record.step, record.done, record.next_done, record.phase) == (1, 0b100, 0, Phase.ACCUMULATING)
    assert stage.state.accumulator.flat.any()
    assert stage.add(2) == "already held here"
    assert stage.add(0) == ""


@pytest.mark.parametrize("recompute", ["always", "never"])
def test_a_microbatch_begun_before_the_commit_ends_after_it_with_the_same_parameters(recompute: str) -> None:
    stage = Stage(num_stages=3, recompute=recompute)
    stage.average()
    before, after = early(stage, 0, accumulate=False), early(stage, 0)
    gradient = torch.ones_like(forward(stage.state, before))
    expected = backward(stage.state, before, gradient).gradient
    forward(stage.state, after)
    stage.state.commit()
    outcome = backward(stage.state, after, gradient)
    assert outcome.refused == ""
    assert (after.passes == ()) == (recompute == "never"), "a kept graph is still good"
    assert expected is not None
    assert outcome.gradient is not None
    assert torch.equal(outcome.gradient, expected)
    assert (stage.state.record.step, stage.state.record.done) == (1, 0b1)


@pytest.mark.parametrize("steps_ahead", [2, 5])
def test_no_step_further_than_the_next_is_computed(steps_ahead: int) -> None:
    stage = Stage()
    with pytest.raises(WrongStateError, match="this peer is at step 0"):
        forward_backward(stage.state, stage.batch(0, step=steps_ahead))


def test_what_drops_a_ledger_drops_the_next_one_too_but_for_an_overlap_of_this_steps() -> None:
    stage = Stage()
    stage.add(0)
    add_early(stage, 1)
    stage.state.drop_sums([stage.state.record.peer])
    assert (stage.state.record.done, stage.state.record.next_done) == (0, 0b10)
    late = early(stage, 2)
    stage.state.fence(9)
    assert (stage.state.record.done, stage.state.record.next_done) == (0, 0)
    assert forward_backward(stage.state, late).refused == "ledger was dropped since"
    add_early(stage, 1)
    stage.state.begin_joining()
    assert stage.state.record.next_done == 0
    stage.state.load(stage.state.holdings.tensors(stage.state.record), 0, stage.state.record.lineage, ())
    stage.state.serve()
    assert not stage.state.accumulator.flat.any()
    stage.average()
    stage.state.commit()
    assert not stage.state.accumulator.flat.any()


def test_a_step_that_is_given_up_still_hands_its_parameters_on() -> None:
    """What was computed of the next step stays, for the parameters that it was computed with are that step's."""
    stage = Stage()
    stage.average()
    stage.state.commit()
    newest = {name: value.detach().clone() for name, value in stage.state.holdings.newest.named_parameters()}
    gradient = add_early(stage, 0)
    stage.state.skip_step()
    assert (stage.state.record.step, stage.state.record.done) == (2, 0b1)
    assert all(torch.equal(value, newest[name]) for name, value in stage.state.holdings.module.named_parameters())
    assert all(torch.equal(value, newest[name]) for name, value in stage.state.holdings.newest.named_parameters())
    again = forward_backward(stage.state, stage.batch(0, accumulate=False)).gradient
    assert again is not None
    assert torch.equal(again, gradient)


def test_in_float16_a_step_waits_for_the_last_one_because_its_loss_scale_does(monkeypatch: pytest.MonkeyPatch) -> None:
    halves = tiny_manifest(2, accumulate="float64", delayed_updates=True, precision="float16")
    monkeypatch.setattr("tests.stage.test_state.MANIFEST", halves)
    stage = Stage()
    assert stage.state.record.next_ledger_no == 0
    with pytest.raises(WrongStateError, match="this peer is at step 0"):
        forward_backward(stage.state, stage.batch(0, step=1))
