"""A stage's state: what may be added to the ledger and when, and what a commit, a fence and a skipped step leave."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from peerd.errors import NotFiniteError, WrongStateError
from peerd.policy.step.roster import Roster, RosterEntry, lineage_after
from peerd.stage.accumulator import views_of
from peerd.stage.microbatches import backward, forward, forward_backward
from peerd.stage.results import BackwardResult, HeldMicrobatch, Ticket
from peerd.stage.state import StageState
from peerd.table.record import Lineage, PeerId, PeerRecord, Phase
from peerd.table.view import LiveView
from tests.strategies import view_of
from tests.tiny_run import tiny_manifest

ME, MATE = PeerId("me"), PeerId("mate")
CPU = torch.device("cpu")
MANIFEST = tiny_manifest(num_stages=2, accumulate="float64")
ROWS = (MANIFEST.train.microbatch_size, MANIFEST.train.sequence_length)
ALL = (1 << MANIFEST.train.microbatches_per_step) - 1


@dataclass
class Stage:
    """A serving peer of one stage, and the mates it sees."""

    stage: int = 1
    num_stages: int = 2
    num_microbatches: int = MANIFEST.train.microbatches_per_step
    recompute: str = "always"
    mates: list[PeerRecord] = field(default_factory=list)
    state: StageState = field(init=False)

    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        compute = replace(MANIFEST.compute, recompute=self.recompute)  # type: ignore[arg-type]
        record = PeerRecord(peer=ME, incarnation=1, stage=self.stage)
        train = replace(MANIFEST.train, num_stages=self.num_stages, microbatches_per_step=self.num_microbatches)
        self.state = StageState(replace(MANIFEST, compute=compute, train=train), record, CPU, self.live)
        self.state.serve()

    def live(self) -> LiveView:
        return view_of(self.state.record, *self.mates)

    def batch(self, index: int = 0, **changes: Any) -> HeldMicrobatch:
        record = self.state.record
        chance = torch.Generator().manual_seed(index)
        labels = torch.randint(0, MANIFEST.model.vocab_size, ROWS, generator=chance)
        inputs: Tensor = labels if self.stage == 0 else torch.randn((*ROWS, MANIFEST.decoder.d_model), generator=chance)
        mark = (record.incarnation, record.ledger_no)
        known: dict[str, Any] = {"step": record.step, "index": index, "accept_mark": mark, "accumulate": True}
        return HeldMicrobatch(Ticket(**{**known, **changes}), inputs, labels)

    def add(self, index: int, **changes: Any) -> str:
        """Why the microbatch was not accumulated; empty when it was."""
        batch = self.batch(index, **changes)
        if self.state.holdings.module.is_last:
            return forward_backward(self.state, batch).refused
        return backward(self.state, batch, torch.ones_like(forward(self.state, batch))).refused

    def average(self) -> Roster:
        """Accumulate the whole step alone and average it."""
        for index in range(MANIFEST.train.microbatches_per_step):
            assert self.add(index) == ""
        record = self.state.record
        roster = Roster(record.stage, record.step, 0, ME, (RosterEntry(ME, record.incarnation, record.ledger_no, ALL),))
        reason, copy = self.state.open_round(roster)
        assert reason == ""
        assert copy is not None
        self.state.take_average(roster, copy)
        return roster


# The ledger


@pytest.mark.parametrize("stage_index", [0, 1, 2])
def test_gradients_that_would_not_be_added_are_not_computed(stage_index: int) -> None:
    """A pass may take place while a round has its copy of the sums: its gradients would come on top."""
    stage, computed = Stage(stage_index, num_stages=3), list[Tensor]()
    for parameter in stage.state.holdings.module.parameters():
        parameter.register_hook(computed.append)  # type: ignore[no-untyped-call]

    def outcome(index: int) -> BackwardResult:
        batch = stage.batch(index)
        if stage.state.holdings.module.is_last:
            return forward_backward(stage.state, batch)
        return backward(stage.state, batch, torch.ones_like(forward(stage.state, batch)))

    first = outcome(0)
    assert (first.refused, len(computed) > 0) == ("", True)
    computed.clear()
    again = outcome(0)
    assert (again.refused, computed) == ("already held here", [])
    assert (first.gradient is None) == (again.gradient is None) == (stage_index == 0)
    if first.gradient is not None and again.gradient is not None:
        assert torch.equal(first.gradient, again.gradient)


def test_a_gradient_is_added_once_and_its_bit_is_set_after_it() -> None:
    stage = Stage()
    assert stage.add(0) == ""
    held = stage.state.accumulator.flat.clone()
    assert stage.state.record.done == 0b1
    assert held.abs().sum() > 0
    assert stage.add(0) == "already held here"
    assert torch.equal(stage.state.accumulator.flat, held)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"accumulate": False}, "not asked to"),
        ({"cancelled": True}, "the caller gave the call up"),
        ({"accept_mark": (0, 1)}, "ledger was dropped since"),
        ({"accept_mark": (1, 0)}, "ledger was dropped since"),
    ],
)
def test_what_may_not_be_added_still_gives_its_gradient_and_leaves_no_trace(changes: dict[str, Any], reason: str) -> None:
    stage = Stage()
    outcome = forward_backward(stage.state, stage.batch(0, **changes))
    assert outcome.refused == reason
    assert outcome.gradient is not None
    assert stage.state.record.done == 0
    assert not stage.state.accumulator.flat.any()


def test_what_a_mate_holds_already_is_not_added_again() -> None:
    stage = Stage(mates=[PeerRecord(peer=MATE, stage=1, phase=Phase.ACCUMULATING, done=0b10)])
    assert stage.add(1) == "already held by a stage mate"
    assert stage.add(0) == ""


def test_a_round_freezes_the_ledger_and_a_failed_one_keeps_it() -> None:
    stage = Stage()
    stage.average()
    assert stage.add(0) == "ledger is frozen"
    other = Stage()
    for index in range(MANIFEST.train.microbatches_per_step):
        other.add(index)
    record = other.state.record
    roster = Roster(1, 0, 0, ME, (RosterEntry(ME, 1, record.ledger_no, ALL),))
    other.state.open_round(roster)
    assert (other.state.record.phase, other.state.round) == (Phase.AVERAGING, roster)
    other.state.close_round(replace(roster, attempt=1).average_id)
    assert other.state.round == roster, "another round's end is not this one's"
    other.state.close_round(roster.average_id)
    assert vars(other.state)["round"] is None
    assert replace(other.state.record, phase=record.phase) == record


def test_a_microbatch_of_the_last_step_is_computed_with_the_last_parameters_and_not_added() -> None:
    stage = Stage()
    early = forward_backward(stage.state, stage.batch(0, accumulate=False)).gradient
    stage.average()
    stage.state.commit()
    late = forward_backward(stage.state, stage.batch(0, step=0))
    assert late.refused == "another step"
    assert late.gradient is not None
    assert early is not None
    assert torch.equal(late.gradient, early)
    assert stage.state.record.done == 0


@pytest.mark.parametrize("step", [1, 5])
def test_a_microbatch_of_a_step_whose_parameters_are_not_here_is_refused(step: int) -> None:
    with pytest.raises(WrongStateError, match="this peer is at step 0"):
        Stage().add(0, step=step)


@pytest.mark.parametrize("recompute", ["always", "never"])
def test_parameters_that_changed_between_forward_and_backward_never_mix(recompute: str) -> None:
    """A graph of older parameters is thrown away, and the forward pass done again with those of its step."""
    stage = Stage(num_stages=3, recompute=recompute)
    late = stage.batch(0)
    gradient = torch.ones_like(forward(stage.state, late))
    in_time = stage.batch(0, accumulate=False)
    forward(stage.state, in_time)
    expected = backward(stage.state, in_time, gradient).gradient
    stage.average()
    stage.state.commit()
    outcome = backward(stage.state, late, gradient)
    assert outcome.refused == "another step"
    assert outcome.gradient is not None
    assert expected is not None
    assert torch.equal(outcome.gradient, expected)
    assert stage.state.record.done == 0


@pytest.mark.parametrize("recompute", ["always", "never"])
def test_hole_4_a_microbatch_of_the_last_step_is_computed_whole_in_this_one(recompute: str) -> None:
    stage = Stage(num_stages=3, recompute=recompute)
    in_time = stage.batch(0, accumulate=False)
    gradient = torch.ones_like(forward(stage.state, in_time))
    expected = backward(stage.state, in_time, gradient).gradient
    stage.average()
    stage.state.commit()
    late = stage.batch(0, step=0)
    forward(stage.state, late)
    found = backward(stage.state, late, gradient).gradient
    assert found is not None
    assert expected is not None
    assert torch.equal(found, expected)


def test_a_microbatch_is_given_up_when_another_state_was_loaded_since_its_forward_pass() -> None:
    """The next stage has computed with what this one gave before."""
    stage = Stage(num_stages=3)
    batch = stage.batch(0)
    gradient = torch.ones_like(forward(stage.state, batch))
    stage.state.begin_joining()
    stage.state.load(stage.state.holdings.tensors(stage.state.record), 0, Lineage(), ())
    stage.state.serve()
    with pytest.raises(WrongStateError, match="changed since the forward pass"):
        backward(stage.state, batch, gradient)


def test_keeping_the_graph_and_recomputing_it_give_the_same_bits() -> None:
    sums = []
    for recompute in ("always", "never"):
        stage = Stage(stage=0, recompute=recompute)
        for index in range(2):
            assert stage.add(index) == ""
        sums.append(stage.state.accumulator.flat)
    assert torch.equal(*sums)


def test_a_loss_that_is_not_finite_never_reaches_the_accumulator() -> None:
    stage = Stage()
    batch = stage.batch(0)
    with torch.no_grad():
        next(stage.state.holdings.module.parameters()).fill_(torch.inf)
    with pytest.raises(NotFiniteError, match="loss of microbatch 0 of step 0 are not finite at stage 1"):
        forward_backward(stage.state, batch)
    assert stage.state.record.done == 0
    assert torch.isfinite(stage.state.accumulator.flat).all()


# The life of a step


def test_a_commit_updates_the_parameters_once_and_begins_an_empty_step() -> None:
    stage = Stage()
    roster, before = stage.average(), stage.state.record
    old = {name: value.detach().clone() for name, value in stage.state.holdings.module.named_parameters()}
    held = stage.state.commit()
    mine = stage.state.record
    assert (mine.step, mine.done, mine.phase, mine.ledger_no) == (1, 0, Phase.ACCUMULATING, before.ledger_no + 1)
    assert mine.lineage == lineage_after(before.lineage, roster.average_id)
    assert (held.roster, held.lineage) == (roster, before.lineage)
    assert not stage.state.accumulator.flat.any()
    assert stage.state.holdings.previous is not None
    assert all(torch.equal(value, old[name]) for name, value in stage.state.holdings.previous.named_parameters())
    assert not any(torch.equal(value, old[name]) for name, value in stage.state.holdings.module.named_parameters())
    (entry,) = stage.state.history
    assert entry.loss == pytest.approx(5.5, abs=0.5)


def test_the_smaller_of_two_averages_is_kept_and_one_of_another_step_is_ignored() -> None:
    stage = Stage()
    first = stage.average()
    rivals = [replace(first, attempt=attempt) for attempt in range(1, 9)]
    for rival in rivals:
        stage.state.take_average(rival, torch.zeros_like(stage.state.accumulator.flat))
    assert stage.state.record.average_id == min(roster.average_id for roster in (first, *rivals))
    stage.state.take_average(replace(first, step=7), torch.zeros_like(stage.state.accumulator.flat))
    assert stage.state.record.step == 0


def test_a_fence_drops_the_ledger_and_keeps_a_finished_average() -> None:
    stage = Stage()
    stage.add(0)
    stage.state.fence(9)
    assert (stage.state.record.incarnation, stage.state.record.done) == (9, 0)
    assert stage.add(0) == ""
    averaged = Stage()
    averaged.average()
    averaged.state.fence(9)
    assert averaged.state.record.phase is Phase.AVERAGED
    assert averaged.state.commit().roster.step == 0


def test_a_skipped_step_is_told_by_the_lineage_and_changes_no_parameter() -> None:
    stage = Stage()
    stage.add(0)
    old = {name: value.detach().clone() for name, value in stage.state.holdings.module.named_parameters()}
    stage.state.skip_step()
    assert (stage.state.record.step, stage.state.record.lineage.inexact, stage.state.record.done) == (1, 1, 0)
    assert all(torch.equal(value, old[name]) for name, value in stage.state.holdings.module.named_parameters())


def test_a_joiner_that_applies_logged_averages_equals_the_peer_that_made_them() -> None:
    teacher, joiner = Stage(), Stage()
    joiner.state.begin_joining()
    joiner.state.load(teacher.state.holdings.tensors(teacher.state.record), 0, Lineage(), ())
    for _ in range(3):
        teacher.average()
        held = teacher.state.commit()
        joiner.state.catch_up(held)
    joiner.state.serve()
    theirs, mine = teacher.state.holdings.tensors(teacher.state.record), joiner.state.holdings.tensors(joiner.state.record)
    assert all(torch.equal(theirs[name], mine[name]) for name in theirs)
    assert joiner.state.record.lineage == teacher.state.record.lineage
    assert joiner.state.history == teacher.state.history


# Bits


GRADIENT_BITS = """
import hashlib, json
from peerd.stage.microbatches import forward_backward
from tests.stage.test_state import Stage
stage = Stage()
outcome = forward_backward(stage.state, stage.batch(0))
flat = stage.state.accumulator.flat
print(json.dumps([hashlib.sha256(t.numpy().tobytes()).hexdigest() for t in (outcome.gradient, flat)]))
"""


def test_two_processes_give_bit_equal_gradients_for_one_microbatch() -> None:
    """Neither process, clock nor replica reaches the arithmetic."""
    command = [sys.executable, "-c", GRADIENT_BITS]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) for _ in range(2)]
    found = {process.communicate(timeout=100)[0] for process in processes}
    assert len(found) == 1
    assert len(json.loads(found.pop())) == 2


def test_sums_do_not_depend_on_the_order_in_which_microbatches_came() -> None:
    one, other = Stage(), Stage()
    for index in range(3):
        one.add(index)
        other.add(2 - index)
    assert torch.equal(one.state.accumulator.flat, other.state.accumulator.flat)
    shapes = {name: value.shape for name, value in one.state.holdings.module.named_parameters()}
    assert all(view.abs().sum() > 0 for view in views_of(one.state.accumulator.flat, shapes).values())


def test_the_parameters_of_an_evaluated_step_are_set_aside_until_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.stage.test_state.MANIFEST", tiny_manifest(2, 0.1, accumulate="float64", evaluate_every_steps=2))
    stage = Stage()
    state, batch = stage.state, stage.batch()
    losses = {}
    for step in range(4):
        losses[step] = float(state.evaluate(step, batch.inputs, batch.labels))
        assert state.evaluated.step == {0: None, 1: 0, 2: 0, 3: 2}[step]
        if step % 2:
            assert float(state.evaluate(step - 1, batch.inputs, batch.labels)) == losses[step - 1]
            assert losses[step] != losses[step - 1]
        stage.average()
        state.commit()
    with pytest.raises(WrongStateError, match="this peer does not hold the parameters of step 0"):
        state.evaluate(0, batch.inputs, batch.labels)


def test_a_step_with_an_evaluation_in_its_middle_is_the_same_step() -> None:
    plain, looked_at = Stage(), Stage()
    batch = looked_at.batch()
    assert looked_at.add(0) == plain.add(0) == ""
    looked_at.state.evaluate(0, batch.inputs, batch.labels)
    assert looked_at.add(1) == plain.add(1) == ""
    assert torch.equal(looked_at.state.accumulator.flat, plain.state.accumulator.flat)
    assert looked_at.state.record == plain.state.record


def test_a_microbatch_is_done_only_after_its_pass_has_rested() -> None:
    """A round opens when nothing is missing, and this peer joins it on the thread that rests."""
    stage, seen = Stage(stage=1), list[int]()
    outcome = forward_backward(stage.state, stage.batch(0), lambda: seen.append(stage.state.record.done))
    assert (outcome.refused, seen, stage.state.record.done) == ("", [0], 1)
