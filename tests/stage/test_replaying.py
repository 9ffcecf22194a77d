"""Replays of rule 20 (audit): honest work passes on any device and through any codec, and each lie shows far above the tolerance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from peerd.config.codec import Codec, parse_codec
from peerd.config.manifest import Manifest
from peerd.errors import WrongStateError
from peerd.policy.step.auditing import AuditWord, DeviceKind, Precision, tolerance
from peerd.policy.step.roster import Roster, entry_of
from peerd.stage.microbatches import backward, forward, forward_backward
from peerd.stage.replaying import ToldPass, deviation, deviation_of, largest, replay_part, replay_pass, sent_alike
from peerd.stage.results import HeldMicrobatch, Ticket
from peerd.stage.state import StageState
from peerd.table.record import PeerId, PeerRecord
from peerd.wire import codecs
from peerd.wire.messages import TensorBytes
from peerd.wire.receipts import tensor_hash
from peerd.wire.tensors import decode, encode
from tests.strategies import view_of
from tests.tiny_run import tiny_manifest

CPU = torch.device("cpu")
STAGES = [0, 1, 2]


@dataclass(frozen=True)
class Work:
    """One microbatch: what its peer got, and what it gave, as it travelled."""

    got: ToldPass
    output: TensorBytes | None = None
    gradient: TensorBytes | None = None


def off(state: StageState, work: Work) -> float:
    """The larger deviation of what was given from what `state` makes of what was got."""
    found = replay_pass(state, work.got)
    assert (found.output is None, found.gradient is None) == (work.output is None, work.gradient is None)
    pairs = ((work.output, found.output), (work.gradient, found.gradient))
    return max(deviation_of(told, own) for told, own in pairs if told is not None and own is not None)


def part_off(state: StageState, works: list[Work], told: Tensor, start: int = 0, enough: float = -1.0) -> float:
    return replay_part(state, [work.got for work in works], told, start, enough=enough)


EXACT, COARSE = DeviceKind("cpu", Precision.FLOAT32), DeviceKind("cpu", Precision.BFLOAT16)


@dataclass
class Worker:
    """A peer of one stage of three, which keeps what it got and gave, and then finishes its step alone."""

    stage: int
    manifest: Manifest
    codec: Codec

    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        self.state = StageState(self.manifest, PeerRecord(peer=PeerId("me"), stage=self.stage), CPU, lambda: view_of(self.state.record))
        self.state.serve()
        self.told = [self._work(index) for index in range(self.manifest.train.microbatches_per_step)]
        self.part = self.state.accumulator.flat.clone()

    def finish(self) -> None:
        """Commit the step. Its parameters are the previous ones then."""
        entry = entry_of(self.state.record)
        roster = Roster(self.stage, self.state.record.step, 0, entry.peer, (entry,))
        reason, copy = self.state.open_round(roster)
        assert reason == ""
        assert copy is not None
        self.state.take_average(roster, copy)
        self.state.commit(self.state.record.gradient_norm)

    def _work(self, index: int) -> Work:
        train, record = self.manifest.train, self.state.record
        chance, rows = torch.Generator().manual_seed(index), (train.microbatch_size, train.sequence_length)
        labels = torch.randint(0, self.manifest.model.vocab_size, rows, generator=chance)
        width = (*rows, self.manifest.decoder.d_model)
        inputs = labels if self.stage == 0 else codecs.through(self.codec, torch.randn(width, generator=chance))
        batch = HeldMicrobatch(Ticket(0, index, (record.incarnation, record.ledger_no), True), inputs.clone(), labels)
        sent = encode(labels.int()) if self.stage == 0 else encode(inputs, self.codec)
        told = ToldPass(step=0, index=index, inputs=sent)
        if self.stage == self.manifest.train.num_stages - 1:
            outcome = forward_backward(self.state, batch)
            assert outcome.gradient is not None
            return Work(replace(told, labels=encode(labels.int())), gradient=encode(outcome.gradient, self.codec))
        output = forward(self.state, batch).clone()
        below = codecs.through(self.codec, torch.randn(width, generator=chance) / 100)
        outcome = backward(self.state, batch, below.clone())
        assert outcome.refused == ""
        gradient = None if outcome.gradient is None else encode(outcome.gradient, self.codec)
        return Work(replace(told, output_gradient=encode(below, self.codec)), encode(output, self.codec), gradient)


def worker_of(stage: int, codec: str = "none", **train: Any) -> Worker:
    return Worker(stage, tiny_manifest(3, **train), parse_codec(codec))


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("train", [{}, {"dropout": 0.2}, {"precision": "bfloat16"}, {"precision": "float16"}], ids=str)
def test_the_same_machine_finds_the_same_bits_also_when_the_step_is_over(stage: int, train: dict[str, Any]) -> None:
    worker = worker_of(stage, **train)
    before = worker.state.accumulator.flat.clone()
    assert [off(worker.state, told) for told in worker.told] == [0.0] * len(worker.told)
    assert part_off(worker.state, worker.told, worker.part) == 0.0
    assert torch.equal(worker.state.accumulator.flat, before), "a replay changes nothing"
    worker.finish()
    assert [off(worker.state, told) for told in worker.told] == [0.0] * len(worker.told)
    assert part_off(worker.state, worker.told, worker.part) == 0.0


LIES: list[Callable[[Tensor], Tensor]] = [
    lambda right: 100 * right,
    lambda right: -right,
    torch.zeros_like,
    lambda right: right.norm() / right.numel() ** 0.5 * torch.randn_like(right),
]
QUANTA = {"none": 0.0, "float16": 1e-3, "bfloat16": 8e-3, "int8": 0.03, "int6": 0.1, "int4": 0.5}
"""The step of each codec, relative to a usual value."""


def on_another_machine(worker: Worker) -> StageState:
    """Its state, with parameters that are off by as much as another order of sums makes results differ."""
    chance = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in worker.state.holdings.module.parameters():
            parameter.mul_(1 + 1e-7 * torch.randn(parameter.shape, generator=chance))
    return worker.state


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("codec", QUANTA)
def test_honest_work_passes_on_another_machine_through_each_codec(stage: int, codec: str) -> None:
    worker = worker_of(stage, codec)
    state, bound = on_another_machine(worker), tolerance(EXACT, EXACT, QUANTA[codec])
    assert all(not AuditWord(off(state, told), bound).differs for told in worker.told)
    assert not AuditWord(part_off(state, worker.told, worker.part), bound).differs


@pytest.mark.parametrize("stage", STAGES)
def test_float32_and_bfloat16_find_each_other_honest(stage: int) -> None:
    worker, auditor = worker_of(stage), worker_of(stage, precision="bfloat16")
    found = [*(off(auditor.state, told) for told in worker.told), part_off(auditor.state, worker.told, worker.part)]
    assert max(found) > tolerance(EXACT, EXACT)
    assert not any(AuditWord(each, tolerance(EXACT, COARSE)).differs for each in found)


@pytest.mark.parametrize("codec", QUANTA)
@pytest.mark.parametrize("lie", LIES)
def test_false_activations_and_gradients_show_far_above_the_tolerance(lie: Callable[[Tensor], Tensor], codec: str) -> None:
    torch.manual_seed(2)
    worker, bound = worker_of(1, codec), tolerance(COARSE, COARSE, QUANTA[codec])
    told = worker.told[0]
    assert told.output is not None
    assert told.gradient is not None
    output, gradient = (encode(lie(_values(value)), worker.codec) for value in (told.output, told.gradient))
    for false in (replace(told, output=output), replace(told, gradient=gradient)):
        assert AuditWord(off(worker.state, false), bound).accuses


def _values(value: TensorBytes | None) -> Tensor:
    assert value is not None
    return decode(value, CPU)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("factor", [-1.0, -10.0, 1000.0, 0.0])
def test_a_false_part_shows_far_above_the_tolerance(stage: int, factor: float) -> None:
    worker = worker_of(stage)
    found = part_off(worker.state, worker.told, factor * worker.part)
    assert found == pytest.approx(abs(factor - 1.0), rel=1e-3)
    assert AuditWord(found, tolerance(COARSE, COARSE)).accuses


@pytest.mark.parametrize(("stage", "precision", "place"), [(2, "float32", -1), (2, "float16", -3), (0, "float16", -2), (0, "float32", -1)])
@pytest.mark.parametrize("told", [1e3, -1.0, math.nan])
def test_a_false_loss_and_a_false_number_of_overflows_show(stage: int, precision: str, place: int, told: float) -> None:
    """By the loss people judge the run; a step of which a gradient overflows is not applied."""
    worker = worker_of(stage, precision=precision)
    false = worker.part.clone()
    false[place] = told
    for start in (0, len(false) - worker.state.accumulator.num_exact, len(false) + place):
        for enough in (-1.0, tolerance(COARSE, COARSE)):
            found = part_off(worker.state, worker.told, false[start:], start, enough)
            assert math.isnan(found) or AuditWord(found, tolerance(COARSE, COARSE)).accuses


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("train", [{}, {"accumulate": "float64"}], ids=str)
def test_of_an_honest_part_only_the_gradients_of_its_chunk_are_computed(
    stage: int, train: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, computed = worker_of(stage, **train), list[int]()
    backward = worker.state.holdings.passes.backward

    def counted(output: Tensor, wanted: list[Tensor], gradient: Tensor | None, late: bool) -> list[Tensor]:
        computed.append(sum(each.numel() for each in wanted))
        return backward(output, wanted, gradient, late)

    monkeypatch.setattr(worker.state.holdings.passes, "backward", counted)
    part, got, num_exact = worker.part, [work.got for work in worker.told], worker.state.accumulator.num_exact
    whole = len(part) - num_exact
    ends = [0, *accumulate(shape.numel() for shape in worker.state.accumulator.shapes)]
    chunks = [(0, 1), (ends[1] - 1, ends[1] + 1), (ends[1], ends[2]), (ends[-2] + 1, whole + num_exact), (3, whole)]
    for start, end in chunks:
        computed.clear()
        assert replay_part(worker.state, got, part[start:end], start, enough=0.0) == 0.0
        before, after = max(each for each in ends if each <= start), min(each for each in ends if each >= min(end, whole))
        assert computed == [after - before] * len(got)
        false = 1 + part[start:end]
        assert replay_part(worker.state, got, false, start, enough=1e-4) == replay_part(worker.state, got, false, start) > 1e-4
        assert computed[-len(got) :] == [whole] * len(got), "what is off is measured from its share of the whole"


def test_a_part_that_leaves_a_microbatch_out_shows() -> None:
    worker = worker_of(1)
    assert AuditWord(part_off(worker.state, worker.told[1:], worker.part), tolerance(EXACT, EXACT)).accuses


def test_what_is_no_number_is_the_largest_deviation_wherever_it_stands() -> None:
    for found in ([0.1, math.nan], [math.nan, 0.1]):
        assert math.isnan(largest(found))
    assert (largest([0.1, math.inf, 0.2]), largest([])) == (math.inf, 0.0)


def test_what_has_another_shape_or_is_no_number_is_wrong_without_an_error() -> None:
    worker = worker_of(1)
    told = worker.told[0]
    assert off(worker.state, replace(told, output=encode(torch.zeros(3)))) == math.inf
    assert AuditWord(off(worker.state, replace(told, output=encode(torch.full_like(_values(told.output), torch.nan)))), 0.1).differs
    assert deviation(torch.zeros(2), torch.zeros(2)) == 0.0
    assert deviation(torch.ones(2), torch.zeros(2)) == math.inf


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("codec", QUANTA)
def test_what_the_same_machine_finds_travels_as_the_same_bytes(stage: int, codec: str) -> None:
    worker = worker_of(stage, codec)
    for told in worker.told:
        found = replay_pass(worker.state, told.got)
        own = [None if each is None else sent_alike(each, worker.codec) for each in (found.output, found.gradient)]
        assert list(map(tensor_hash, own)) == [tensor_hash(told.output), tensor_hash(told.gradient)]


def test_what_is_not_finite_is_nobodys_right_result() -> None:
    assert sent_alike(torch.tensor([1.0, torch.nan]), parse_codec("none")) is None
    assert sent_alike(torch.tensor([1.0, torch.inf]), parse_codec("int8")) is None


def test_without_the_gradient_of_the_output_there_is_no_gradient_of_the_inputs() -> None:
    worker = worker_of(1)
    found = replay_pass(worker.state, replace(worker.told[0].got, output_gradient=None))
    assert found.gradient is None
    assert found.output is not None


def test_a_step_whose_parameters_are_gone_cannot_be_replayed() -> None:
    worker = worker_of(1)
    with pytest.raises(WrongStateError):
        replay_pass(worker.state, replace(worker.told[0].got, step=5))
