"""An evaluation is complete or given up, retried while peers hold the parameters, and done once by one trainer."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
import torch

from peerd.config.manifest import Manifest
from peerd.errors import PeerGoneError, RemoteError, WrongStateError
from peerd.models.blocks import describe_entry
from peerd.models.stages import input_of, labels_shape
from peerd.swarm.membership import Membership
from peerd.table.record import Evaluation, PeerId, PeerRecord
from peerd.table.view import LiveView
from peerd.train import evaluator
from peerd.train.evaluator import Evaluator
from peerd.train.samples import Samples
from peerd.wire.dispatch import Dispatcher
from peerd.wire.messages import Call, CallResult
from peerd.wire.tensors import decode
from tests.strategies import member, view_of
from tests.tiny_run import corpus_of, tiny_manifest

MANIFEST = tiny_manifest(2, 0.1, evaluate_every_steps=4, evaluation_microbatches=3, steps=10)


@dataclass
class Swarm:
    """A table, and peers that answer an evaluation with its index as the loss, or with the errors that are left."""

    records: list[PeerRecord] = field(default_factory=lambda: [member("me", trains=True, step=5), member("b", stage=1, step=5)])
    errors: Sequence[RemoteError] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)

    num_announced: int = 0

    def live(self) -> LiveView:
        return view_of(*self.records)

    def announce(self) -> None:
        self.num_announced += 1

    async def changed(self, timeout_s: float) -> bool:
        await asyncio.sleep(0)
        return True

    async def send(self, call: Call, _on_forwarded: Callable[[int, PeerId], None]) -> CallResult:
        self.calls.append(call)
        if self.errors:
            error, *self.errors = self.errors
            raise error
        return CallResult(gradient=None, downstream_s=0.0, records=(), loss=float(call.index))


async def evaluated(swarm: Swarm, cache: Path, until: Callable[[Evaluator], bool], manifest: Manifest = MANIFEST) -> Evaluator:
    """An evaluator that has run until a condition holds."""
    made = Evaluator(manifest, corpus_of(manifest, cache), cast(Membership, swarm), cast(Dispatcher, swarm), swarm.announce)
    running = asyncio.ensure_future(made.run())
    async with asyncio.timeout(20):
        while not until(made):  # noqa: ASYNC110 - the conditions are many, and none has an event of its own
            await asyncio.sleep(0.01)
    running.cancel()
    return made


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluator, "FAILURE_PAUSE_S", 0.0)


async def test_the_due_step_is_evaluated_once_with_its_own_step_and_nothing_to_accumulate(tmp_path: Path) -> None:
    swarm = Swarm()
    made = await evaluated(swarm, tmp_path, lambda each: each.newest is not None)
    assert (made.newest, swarm.num_announced) == (Evaluation(4, 1.0), 1)
    assert sorted(call.index for call in swarm.calls) == [0, 1, 2]
    assert {(call.step, call.evaluation, call.accumulate, call.stage) for call in swarm.calls} == {(4, True, frozenset(), 0)}


async def test_what_fails_is_sent_again_and_counts_once(tmp_path: Path) -> None:
    swarm = Swarm(errors=[PeerGoneError("gone")] * 7)
    made = await evaluated(swarm, tmp_path, lambda each: each.newest is not None)
    assert made.newest == Evaluation(4, 1.0)
    assert len(swarm.calls) == 10


async def test_an_evaluation_whose_parameters_are_gone_is_given_up_and_the_next_one_made(tmp_path: Path) -> None:
    swarm = Swarm(errors=[WrongStateError("nobody holds them")] * 3 * evaluator.MAX_REFUSALS)
    made = await evaluated(swarm, tmp_path, lambda _each: not swarm.errors)
    assert made.newest is None
    swarm.records = [member("me", trains=True, step=8), member("b", stage=1, step=8)]
    made = await evaluated(swarm, tmp_path, lambda each: each.newest is not None)
    assert made.newest == Evaluation(8, 1.0)


async def test_what_another_has_told_is_not_evaluated_again_nor_finished(tmp_path: Path) -> None:
    swarm = Swarm(errors=[PeerGoneError("gone")] * 10**4)
    told = member("b", stage=1, step=5, evaluation=Evaluation(4, 2.5))

    def somebody_told(_each: Evaluator) -> bool:
        if swarm.calls:
            swarm.records = [member("me", trains=True, step=5), told]
        return bool(swarm.calls)

    made = await evaluated(swarm, tmp_path, somebody_told)
    asked = len(swarm.calls)
    made = await evaluated(swarm, tmp_path, lambda each: each._step_to_evaluate() is None)
    assert made.newest is None
    assert len(swarm.calls) == asked


async def test_the_end_of_the_run_is_evaluated(tmp_path: Path) -> None:
    swarm = Swarm(records=[member("me", trains=True, step=10), member("b", stage=1, step=10)])
    made = await evaluated(swarm, tmp_path, lambda each: each.newest is not None)
    assert made.newest is not None
    assert made.newest.step == 10


class Falsifying(Swarm):
    """The last stage has three peers, and one of them falsifies the loss of what passes through it."""

    async def send(self, call: Call, on_forwarded: Callable[[int, PeerId], None]) -> CallResult:
        result = await super().send(call, on_forwarded)
        for stage, peer in call.path.items():
            on_forwarded(stage, peer)
        assert result.loss is not None
        return dataclasses.replace(result, loss=1.0 + result.loss * (100.0 if call.path.get(1) == "c" else 1.0))


CERTIFIED = dataclasses.replace(MANIFEST, swarm=dataclasses.replace(MANIFEST.swarm, trust="on"))


async def test_a_loss_that_one_way_alone_gives_is_not_believed_where_peers_may_lie(tmp_path: Path) -> None:
    trainers = [member("me", trains=True, step=5), member("a", step=5), *(member(name, stage=1, step=5) for name in "bcd")]
    swarm = Falsifying(records=trainers)
    made = await evaluated(swarm, tmp_path, lambda each: each.newest is not None, CERTIFIED)
    assert made.newest == Evaluation(4, 2.0)
    asked = Counter(call.index for call in swarm.calls)
    assert min(asked.values()) >= 2, "each microbatch goes two ways"
    for index in asked:
        assert len({tuple(sorted(call.path.items())) for call in swarm.calls if call.index == index}) == asked[index]


async def test_an_evaluation_is_given_up_if_no_two_ways_agree(tmp_path: Path) -> None:
    swarm = Falsifying(records=[member("me", trains=True, step=5), *(member(name, stage=1, step=5) for name in "bc")])
    made = await evaluated(swarm, tmp_path, lambda each: each._given_up == 4, CERTIFIED)
    assert made.newest is None
    assert "ways" in made._refusal


def test_samples_of_a_list_of_blocks_go_out_as_what_its_first_stage_takes() -> None:
    manifest = dataclasses.replace(tiny_manifest(2, evaluate_every_steps=4, evaluation_fraction=0.1), model=describe_entry("resnet"))
    swarm = Swarm()
    call = Evaluator(manifest, Samples(manifest), cast(Membership, swarm), cast(Dispatcher, swarm), swarm.announce)._call_for(4, 1, {})
    call.inputs.check(*input_of(manifest, 0, manifest.train.sequence_length))
    call.labels.check("int32", labels_shape(manifest, manifest.train.sequence_length))
    expected = Samples(manifest).evaluation_microbatch(1)
    assert torch.equal(decode(call.inputs, torch.device("cpu")), expected[0])
    assert torch.equal(decode(call.labels, torch.device("cpu")).long(), expected[1])
