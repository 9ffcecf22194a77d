"""Local steps in a stage's state: which parameters a pass uses, what seals, drops and rounds make of the ledger, and what is kept."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from peerd.errors import WrongStateError
from peerd.policy.step.asides import sums
from peerd.policy.step.batches import MOST_EARLIER
from peerd.policy.step.roster import Roster, RosterEntry
from peerd.stage.accumulator import Accumulator, views_of
from peerd.stage.local_steps import LocalSteps
from peerd.stage.microbatches import backward, forward, forward_backward
from peerd.stage.optimizer import Optimizer
from peerd.stage.results import HeldMicrobatch
from peerd.stage.state import StageState
from peerd.table.record import PeerId, PeerRecord, Phase
from tests.stage.test_state import CPU, MATE, ME, Stage
from tests.tiny_run import replace_train, tiny_manifest

LOCAL = tiny_manifest(2, microbatches_per_step=8, local_batch=2, learning_rate=0.01, accumulate="float64")


@dataclass
class Local(Stage):
    """A peer whose steps are local."""

    stage: int = 1
    num_microbatches: int = 8
    train: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        self.manifest = replace_train(LOCAL, **self.train)
        self.manifest = replace(self.manifest, compute=replace(self.manifest.compute, recompute=self.recompute))  # type: ignore[arg-type]
        self.state = StageState(self.manifest, PeerRecord(peer=ME, incarnation=1, stage=self.stage), CPU, self.live)
        self.state.serve()

    @property
    def batches(self) -> list[PeerId]:
        """The open batches, the oldest first."""
        return [aside.other for aside in self.state.record.asides]

    def begun(self, index: int) -> tuple[HeldMicrobatch, Tensor]:
        """A microbatch between its forward and its backward pass, with what the forward pass gave."""
        batch = self.batch(index)
        return batch, forward(self.state, batch).clone()

    def ended(self, batch: HeldMicrobatch) -> Tensor | None:
        """The gradient of the inputs."""
        return backward(self.state, batch, torch.ones(*batch.inputs.shape[:2], self.manifest.decoder.d_model)).gradient

    def seal(self) -> None:
        self.state.seal_batch(self.batches[0])

    def open_round(self, attempt: int = 0) -> tuple[Roster, Tensor]:
        """A round of this peer and a mate that has the rest. Returns what this peer adds."""
        record, whole = self.state.record, (1 << self.num_microbatches) - 1
        entries = [RosterEntry(ME, record.incarnation, record.ledger_no, record.done), RosterEntry(MATE, 0, 0, whole & ~record.done)]
        roster = Roster(record.stage, record.step, attempt, ME, tuple(sorted(entries)))
        reason, copy = self.state.open_round(roster)
        assert copy is not None, reason
        return roster, copy

    def parameters(self) -> list[Tensor]:
        """What the step began with."""
        return [parameter.detach().clone() for parameter in self.state.holdings.module.parameters()]


def gradients_of(stage: Local, index: int) -> tuple[dict[str, Tensor], float]:
    """The gradients and the loss of a microbatch at the present parameters, with which nothing is done."""
    batch = stage.batch(index)
    module = stage.state.module_at(batch.ticket.step)
    output = module(batch.inputs, batch.labels) if module.is_last else module(batch.inputs)
    found = torch.autograd.grad(output if module.is_last else output.sum(), list(module.parameters()))
    return dict(zip((name for name, _ in module.named_parameters()), found, strict=True)), float(output.detach()) if module.is_last else 0.0


def expected_share(stage: Local, batches: Sequence[Sequence[int]]) -> Tensor:
    """What `LocalSteps`, of the reference, makes of these batches, each computed at the parameters after the one before."""
    other = Local(stage=stage.stage, train=stage.train)
    steps, loss_sum = LocalSteps(other.manifest, dict(other.state.module_at(0).named_parameters())), 0.0
    for batch in batches:
        for index in batch:
            gradients, loss = gradients_of(other, index)
            steps.add(gradients)
            loss_sum += loss
        steps.seal(0)
    return torch.cat([*(value.flatten() for value in steps.contribution().values()), torch.tensor([loss_sum], dtype=torch.float64)])


def equal(share: Tensor, expected: Tensor) -> bool:
    """Changes of parameters to the bit, and the sum of losses."""
    return torch.equal(share[:-1].double(), expected[:-1].double()) and torch.allclose(share[-1].double(), expected[-1].double())


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


@pytest.mark.parametrize("accumulate", ["float32", "float64"])
@pytest.mark.parametrize("stage_index", [0, 1])
def test_a_peer_gives_to_the_bit_what_the_reference_would_give(stage_index: int, accumulate: str) -> None:
    stage = Local(stage=stage_index, train={"accumulate": accumulate})
    begun = stage.parameters()
    for batch in ([0, 1], [4, 5]):
        assert [stage.add(index) for index in batch] == ["", ""]
        stage.seal()
    assert stage.add(2) == ""
    assert [bits.bit_count() for bits in sums(stage.state.record).values()] == [1, 4]
    _, share = stage.open_round()
    assert stage.state.record.asides == ()
    assert equal(share, expected_share(stage, [[0, 1], [4, 5], [2]]))
    assert same(stage.parameters(), begun), "downloads, checkpoints and evaluations see none of it"


def test_a_peer_that_has_computed_nothing_gives_nothing() -> None:
    _, share = Local().open_round()
    assert share.abs().sum() == 0


@pytest.mark.parametrize("recompute", ["always", "never"])
@pytest.mark.parametrize("stage_index", [0, 1])
def test_a_backward_pass_uses_the_parameters_of_its_forward_pass(stage_index: int, recompute: str) -> None:
    stage, still = (Local(stage=stage_index, recompute=recompute, train={"num_stages": 3}) for _ in range(2))
    batch, _ = stage.begun(0)
    expected, _ = gradients_of(still, 0)
    gradient = still.ended(still.begun(0)[0])
    assert [stage.add(1), stage.add(2)] == ["", ""]
    stage.seal()
    assert not same([*stage.state.module_at(0).parameters()], stage.parameters()), "the next passes use what was updated"
    found = stage.ended(batch)
    assert (found is None) == (gradient is None) == (stage_index == 0)
    assert found is None or gradient is None or torch.equal(found, gradient)
    held = stage.state._sums[0].batch(stage.batches[0])
    assert all(torch.equal(value.float(), expected[name]) for name, value in held.sums(held.flat).items())


def test_an_update_waits_while_as_many_versions_are_needed_as_are_kept() -> None:
    stage = Local(stage=0)
    under_way = [stage.begun(0)[0]]
    for index in range(MOST_EARLIER):
        assert [stage.add(2 * index + 1), stage.add(2 * index + 2)] == ["", ""]
        stage.seal()
        under_way.append(stage.begun(7 - index)[0])
    assert [stage.add(5), stage.add(0)] == ["", ""]
    assert stage.state.keeps_versions
    before = stage.state.num_own_updates
    stage.seal()
    assert (stage.state.num_own_updates, len(stage.batches)) == (before, 1)
    del under_way[0]  # its call has failed
    gc.collect()
    stage.seal()
    assert (stage.state.num_own_updates, stage.batches) == (before + 1, [])
    assert stage.ended(under_way.pop()) is None
    assert not stage.state.keeps_versions


@pytest.mark.parametrize("recompute", ["always", "never"])
def test_a_round_seals_what_is_open_and_gives_up_what_is_under_way(recompute: str) -> None:
    stage = Local(stage=0, recompute=recompute)
    held = [stage.begun(0)[0]]
    assert [stage.add(1), stage.add(2)] == ["", ""]
    stage.seal()
    held.append(stage.begun(3)[0])
    assert [stage.add(index) for index in (4, 5, 6)] == [""] * 3
    stage.open_round()
    assert stage.batches == []
    for batch in held:
        with pytest.raises(WrongStateError, match="the parameters of the forward pass are gone"):
            stage.ended(batch)
    assert not stage.state.keeps_versions
    assert forward(stage.state, stage.batch(7)).numel(), "a stage that lacks it may still have it computed"


def test_an_open_batch_is_dropped_alone_and_the_sealed_ones_go_with_their_updates() -> None:
    stage = Local()
    assert [stage.add(index) for index in (0, 1, 2)] == [""] * 3
    stage.seal()
    stage.state.drop_sums([stage.batches[0]])
    assert stage.state.record.done == 0b11
    _, share = stage.open_round()
    assert equal(share, expected_share(stage, [[0, 1]]))
    stage.state.close_round(stage.state.round.average_id if stage.state.round else b"")  # type: ignore[arg-type]
    assert stage.add(4) == ""
    stage.state.drop_sums([ME])
    assert stage.state.record.done == 0b10000
    assert same([*stage.state.module_at(0).parameters()], stage.parameters())
    stage.state.drop_sums(stage.batches)
    assert stage.add(5) == ""
    fresh = Local()
    assert fresh.add(5) == ""
    assert [gradients_of(stage, 5)[1]] == [gradients_of(fresh, 5)[1]]


def test_a_round_that_fails_loses_nothing_and_the_next_one_takes_more() -> None:
    stage = Local()
    assert [stage.add(0), stage.add(1)] == ["", ""]
    roster, first = stage.open_round()
    stage.state.close_round(roster.average_id)
    assert stage.add(3) == ""
    _, second = stage.open_round(attempt=1)
    assert equal(first, expected_share(stage, [[0, 1]]))
    assert equal(second, expected_share(stage, [[0, 1], [3]]))


def test_a_fence_drops_the_open_batches_and_keeps_what_is_sealed() -> None:
    stage = Local()
    late = stage.batch(6)
    assert [stage.add(index) for index in (0, 1, 2)] == [""] * 3
    stage.seal()
    stage.state.fence(7)
    assert (stage.state.record.done, stage.state.record.incarnation, stage.batches) == (0b11, 7, [])
    assert forward_backward(stage.state, late).refused == "ledger was dropped since"
    _, share = stage.open_round()
    assert equal(share, expected_share(stage, [[0, 1]]))


def test_all_peers_begin_the_next_step_with_what_the_average_makes_of_the_last() -> None:
    stage = Local(stage=0)
    assert [stage.add(index) for index in range(6)] == [""] * 6
    late, (old, _) = stage.batch(7), stage.begun(6)
    stage.seal()
    roster, share = stage.open_round()
    outer = Optimizer(stage.manifest, module := dict(Local(stage=0).state.holdings.module.named_parameters()))
    stage.state.take_average(roster, share)
    stage.state.commit()
    shapes = {name: value.shape for name, value in module.items()}
    outer.update(0, {name: value / 8 for name, value in views_of(share, shapes).items()})
    assert same([value.detach() for value in module.values()], stage.parameters())
    assert same([*stage.state.module_at(1).parameters()], stage.parameters())
    with pytest.raises(WrongStateError, match="the parameters of the forward pass are gone"):
        stage.ended(old)
    assert forward(stage.state, late).shape == (*late.inputs.shape, stage.manifest.decoder.d_model), "a stage that fell behind may finish"


def test_an_evaluation_uses_what_the_step_began_with() -> None:
    stage, batch = Local(), Local().batch(0)
    before = stage.state.evaluate(0, batch.inputs, batch.labels)
    assert [stage.add(1), stage.add(2)] == ["", ""]
    stage.seal()
    assert torch.equal(stage.state.evaluate(0, batch.inputs, batch.labels), before)


def test_an_update_that_fails_half_way_costs_the_ledger_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Local()
    assert [stage.add(0), stage.add(1)] == ["", ""]

    def fails(self: Optimizer, *_rest: Any) -> None:
        next(iter(self._parameters.values())).add_(1.0)
        raise MemoryError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(Optimizer, "update", fails)
        with pytest.raises(MemoryError):
            stage.seal()
    assert (stage.state.record.done, stage.batches, stage.state.record.phase) == (0, [], Phase.ACCUMULATING)
    assert same([*stage.state.module_at(0).parameters()], stage.parameters())
    assert [stage.add(0), stage.add(1)] == ["", ""]
    stage.seal()
    assert equal(stage.open_round()[1], expected_share(stage, [[0, 1]]))


def test_a_download_forgets_the_moments_of_updates_that_led_elsewhere() -> None:
    stage, given = Local(), Local().state
    assert [stage.add(0), stage.add(1)] == ["", ""]
    stage.seal()
    stage.state.begin_joining()
    stage.state.load(given.holdings.tensors(given.record), 0, given.record.lineage, [])
    stage.state.serve()
    assert [stage.add(2), stage.add(3)] == ["", ""]
    stage.seal()
    assert equal(stage.open_round()[1], expected_share(stage, [[2, 3]]))


def test_without_memory_for_an_open_batch_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Local()

    def full(self: Accumulator) -> Accumulator:
        raise MemoryError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(Accumulator, "another", full)
        with pytest.raises(MemoryError):
            stage.add(0)
    assert (stage.state.record.done, stage.batches) == (0, [])
    assert stage.add(0) == ""
