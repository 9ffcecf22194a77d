"""Which ways to train go with a run, and which of them is first at a loss."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from peerd.config.manifest import Manifest, ModelConfig, StartConfig, TrainConfig
from peerd.config.model_kinds import BlocksConfig
from peerd.planner.contenders import CONTENDERS, LOCAL_UPDATES, UPDATES, ranked

RUN = Manifest(model=ModelConfig(d_model=64, num_layers=4), train=TrainConfig(microbatches_per_step=8))
NARROW = {name for name, each in CONTENDERS.items() if each.narrower}


def _seconds(run: Manifest) -> float:
    """A line on which only what crosses boundaries counts."""
    return run.boundary_bytes / 1e3


def test_the_product_of_updates_and_their_time_decides() -> None:
    found = ranked(RUN, _seconds, {"dense float32": 1.0, "subspace 1/8": 7.9, "subspace 1/4": 4.1, "int8": math.inf})
    assert [each.row for each in found] == ["subspace 1/8", "dense float32", "subspace 1/4"]
    assert found[0].time == pytest.approx(7.9 * found[0].update_s)
    assert found[0].manifest.decoder.boundary_rank == 8


def test_a_named_optimizer_stays() -> None:
    updates = {"int8": 1.0, "Muon": 0.5}
    assert [each.row for each in ranked(RUN, _seconds, updates)] == ["Muon", "int8"]
    assert [each.row for each in ranked(RUN, _seconds, updates, "adamw")] == ["int8"]
    assert ranked(RUN, _seconds, updates, "sgd") == []


def test_what_does_not_go_with_the_run_does_not_take_part() -> None:
    updates = dict.fromkeys(CONTENDERS, 1.0)
    assert {each.row for each in ranked(RUN, _seconds, updates)} == set(CONTENDERS)
    begun = replace(RUN, start=StartConfig(state="start.safetensors"))
    assert {each.row for each in ranked(begun, _seconds, updates)} == set(CONTENDERS) - NARROW
    blocks = replace(RUN, model=BlocksConfig(entry="resnet", input_shape=(3, 8, 8), shapes=((4,), (4,), (2,)), num_labels=2))
    assert {each.row for each in ranked(blocks, _seconds, updates)} <= set(CONTENDERS) - NARROW
    tied = replace(RUN, model=ModelConfig(d_model=64, num_layers=4, tie_word_embeddings=True))
    assert not {each.row for each in ranked(tied, _seconds, updates)} & {name for name, each in CONTENDERS.items() if each.is_local}


def test_a_step_with_local_updates_has_as_many_microbatches_for_each() -> None:
    run = CONTENDERS["local steps"].applied(RUN)
    assert run.train.microbatches_per_step == 8 * LOCAL_UPDATES
    assert run.train.local_batch == 4
    assert CONTENDERS["int8"].applied(run).train.local_batch == 0


def test_what_was_measured_is_a_contender() -> None:
    assert set(UPDATES) <= set(CONTENDERS)
    assert UPDATES.get("dense float32", 1.0) == 1.0
    assert all(CONTENDERS[name].codec != "auto" for name in UPDATES)
