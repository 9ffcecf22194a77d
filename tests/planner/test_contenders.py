"""Which ways to train go with a run, and which of them is first at a loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

from peerd.config.manifest import Manifest, ModelConfig, StartConfig, TrainConfig
from peerd.config.model_kinds import BlocksConfig
from peerd.planner.contenders import BASE, CONTENDERS, LOCAL_UPDATES, KeptChoices, RaceRow, ranked
from peerd.planner.race_results import race_results

RUN = Manifest(model=ModelConfig(d_model=64, num_layers=4), train=TrainConfig(microbatches_per_step=8))
NARROW = {name for name, each in CONTENDERS.items() if each.narrower}


def _seconds(run: Manifest) -> float:
    """A line on which only what crosses boundaries counts."""
    return run.boundary_bytes / 1e3


def _measured(updates: Mapping[str, float], rate: float = 1.0) -> list[RaceRow]:
    return [
        RaceRow(row=row, updates=number, loss=0.0, learning_rate=rate, outer_learning_rate=1.0, outer_momentum=0.5)
        for row, number in updates.items()
    ]


def test_the_product_of_updates_and_their_time_decides() -> None:
    found = ranked(RUN, _seconds, _measured({"dense float32": 1.0, "subspace 1/8": 7.9, "subspace 1/4": 4.1, "int8": math.inf}))
    assert [each.row for each in found] == ["subspace 1/8", "dense float32", "subspace 1/4"]
    assert found[0].time == pytest.approx(7.9 * found[0].update_s)
    assert found[0].manifest.decoder.boundary_rank == 8


def test_what_is_named_stays() -> None:
    results = _measured({"int8": 1.0, "Muon": 0.5, "twice the batch": 0.25}, rate=2.0)
    assert [each.row for each in ranked(RUN, _seconds, results)] == ["twice the batch", "Muon", "int8"]
    found = ranked(RUN, _seconds, results, KeptChoices(optimizer="adamw", microbatches=True, learning_rate=True))
    assert [each.row for each in found] == ["int8"]
    assert found[0].manifest.train == CONTENDERS["int8"].applied(RUN).train
    assert ranked(RUN, _seconds, results, KeptChoices(optimizer="sgd")) == []


def test_a_run_gets_the_rates_with_which_its_row_was_measured() -> None:
    results = _measured({"int8": 1.0, "local steps": 1.0}, rate=2.0)
    found = {each.row: each.manifest.train for each in ranked(RUN, _seconds, results)}
    assert found["int8"].learning_rate == found["local steps"].learning_rate == 2 * RUN.train.learning_rate
    assert (found["local steps"].outer_learning_rate, found["local steps"].outer_momentum) == (1.0, 0.5)
    assert found["int8"].outer_momentum == RUN.train.outer_momentum
    assert (found["int8"].warmup_steps, found["local steps"].warmup_steps) == (20, 3)


def test_seconds_are_those_of_an_update_whatever_a_step_has() -> None:
    results = _measured(dict.fromkeys(("int8", "local steps", "twice the batch"), 1.0))
    found = {each.row: each.update_s for each in ranked(RUN, lambda run: float(run.train.microbatches_per_step), results)}
    assert found == {"int8": 8.0, "local steps": 8.0, "twice the batch": 16.0}


def test_what_does_not_go_with_the_run_does_not_take_part() -> None:
    results = _measured(dict.fromkeys(CONTENDERS, 1.0))
    assert {each.row for each in ranked(RUN, _seconds, results)} == set(CONTENDERS)
    begun = replace(RUN, start=StartConfig(state="start.safetensors"))
    assert {each.row for each in ranked(begun, _seconds, results)} == set(CONTENDERS) - NARROW
    blocks = replace(RUN, model=BlocksConfig(entry="resnet", input_shape=(3, 8, 8), shapes=((4,), (4,), (2,)), num_labels=2))
    assert {each.row for each in ranked(blocks, _seconds, results)} <= set(CONTENDERS) - NARROW
    tied = replace(RUN, model=ModelConfig(d_model=64, num_layers=4, tie_word_embeddings=True))
    odd = replace(RUN, train=replace(RUN.train, microbatches_per_step=9))
    assert {each.row for each in ranked(odd, _seconds, results)} == {name for name, each in CONTENDERS.items() if each.batch != 0.5}
    assert not {each.row for each in ranked(tied, _seconds, results)} & {name for name, each in CONTENDERS.items() if each.is_local}


def test_a_step_with_local_updates_has_as_many_microbatches_for_each() -> None:
    run = CONTENDERS["local steps"].applied(RUN)
    assert run.train.microbatches_per_step == 8 * LOCAL_UPDATES
    assert run.train.local_batch == 4
    assert CONTENDERS["int8"].applied(run).train.local_batch == 0


def test_the_measured_rows_are_contenders_by_their_base() -> None:
    results = race_results()
    rows = {each.row: each for each in results.rows}
    assert set(rows) <= set(CONTENDERS)
    assert (rows[BASE].updates, rows[BASE].learning_rate, rows[BASE].loss) == (1, 1, 0)
    assert all(CONTENDERS[name].codec != "auto" for name in rows)
    assert all(set(rows) <= set(line.time_s) for line in results.lines)
    assert results.command.startswith("scripts/bench race")
