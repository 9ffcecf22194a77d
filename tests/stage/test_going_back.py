"""A peer gives its state up, because the run goes back to a checkpoint: it holds the first weights then, as its record says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from peerd.errors import WrongStateError
from peerd.stage.holdings import Holdings
from peerd.stage.results import HeldAverage
from peerd.table.record import Lineage, PeerId, PeerRecord, Phase
from tests.stage.test_state import CPU, Stage
from tests.tiny_run import tiny_manifest


def tensors_of(stage: Stage) -> dict[str, Tensor]:
    return stage.state.holdings.tensors(stage.state.record)


def are_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def finish_step(stage: Stage) -> HeldAverage:
    stage.average()
    return stage.state.commit()


def test_hole_70_averages_since_the_first_step_lead_a_peer_that_went_back_to_the_very_state_of_its_stage() -> None:
    stage = Stage()
    first = tensors_of(stage)
    averages = [finish_step(stage) for _ in range(3)]
    then, now = tensors_of(stage), stage.state.record
    finish_step(stage)
    generation = stage.state.holdings.generation
    stage.state.give_up_state(0)
    record = stage.state.record
    assert (record.phase, record.step, record.lineage) == (Phase.JOINING, 0, Lineage())
    assert are_equal(tensors_of(stage), first)
    assert (stage.state.history, stage.state.holdings.generation) == ([], generation + 1)
    for average in averages:
        stage.state.catch_up(average)
    assert (stage.state.record.step, stage.state.record.lineage) == (now.step, now.lineage)
    assert are_equal(tensors_of(stage), then)
    assert [entry.step for entry in stage.state.history] == [0, 1, 2]


def test_a_joiner_applies_no_average_of_another_step_or_another_lineage() -> None:
    stage = Stage()
    average = finish_step(stage)
    stage.state.give_up_state(0)
    before = tensors_of(stage)
    other = replace(average, lineage=Lineage(0, b"given up"))
    later = replace(average, roster=replace(average.roster, step=1))
    for wrong in (other, later):
        with pytest.raises(WrongStateError):
            stage.state.catch_up(wrong)
    assert stage.state.record.step == 0
    assert are_equal(tensors_of(stage), before)


@pytest.mark.parametrize("train", [{}, {"delayed_updates": True}, {"optimizer_bits": 8}, {"precision": "float16"}])
def test_what_began_anew_is_what_has_just_begun(train: dict[str, Any]) -> None:
    manifest, record = tiny_manifest(2, **train), PeerRecord(peer=PeerId("me"), stage=1)
    holdings, fresh = (Holdings(manifest, 1, CPU) for _ in range(2))
    with torch.no_grad():
        for module in {holdings.module, holdings.newest}:
            for parameter in module.parameters():
                parameter.add_(1.0)
        for value in holdings.optimizer.tensors().values():
            value.add_(1)
    holdings.advance(lambda: None)
    holdings.passes.finish_step(float("inf"))
    assert not are_equal(holdings.tensors(record), fresh.tensors(record))
    holdings.begin_anew()
    assert holdings.previous is None
    assert are_equal(holdings.tensors(record), fresh.tensors(record))
    assert holdings.passes.loss_scale == fresh.passes.loss_scale
