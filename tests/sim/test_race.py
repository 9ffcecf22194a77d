"""`scripts/bench race`: what is made of curves and simulated steps. The trainings themselves are the reference's."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from scripts.benchmarks._race import LINKS, ROWS, HomeSize, Link, update_s
from scripts.benchmarks.race import Cell, Losses, Size, known_in, lines_on, reaches_at, wanted_cells

HOME = HomeSize(d_model=256, layers=4, stages=2, sequence_length=128, microbatches=8)
SIZE = Size(d_model=64, layers=4, stages=4, sequences=2, sequence_length=32, updates=128, rate=2e-3, muon_rate=1e-2, tokenizer="bytes")
FALLING: Losses = [(0, 5.0), (10, 3.0), (20, 2.0)]


@pytest.mark.parametrize(("target", "updates"), [(5.0, 0), (4.0, 5), (3.0, 10), (2.5, 15), (2.0, 20), (1.9, math.inf)])
def test_the_target_is_reached_between_two_evaluations(target: float, updates: float) -> None:
    assert reaches_at(FALLING, target) == updates


def test_fewer_bytes_take_no_more_time_on_a_slow_link() -> None:
    slow = Link(20, 60)
    order = ["dense float32", "int8", "subspace 1/8", "subspace, local"]
    times = [update_s(HOME, ROWS[name], slow) for name in order]
    assert times == sorted(times, reverse=True)
    assert times[0] > 2 * times[1]
    assert update_s(HOME, ROWS["int8"], Link(200, 60)) < times[1]


def test_auto_is_the_codec_that_the_policy_takes_and_then_that_codecs_row() -> None:
    assert HOME.on(ROWS["auto"], Link(1e6, 1)).codec == "none"
    found = HOME.on(ROWS["auto"], Link(20, 60))
    assert found == dataclasses.replace(ROWS["int8"], codec=found.codec)
    assert found.codec not in ("none", "auto")


@pytest.mark.parametrize("name", list(ROWS))
def test_every_row_is_a_run_at_both_sizes_with_equal_data(name: str) -> None:
    row = HOME.on(ROWS[name], LINKS[-1])
    small, large = SIZE.manifest(row, seed=1), HOME.manifest(row)
    assert small.train.steps * row.updates_per_step == SIZE.updates
    assert small.train.steps % small.train.evaluate_every_steps == 0
    assert small.boundary_bytes * ROWS[name].narrower in (0, 4 * small.tokens_per_microbatch * SIZE.d_model)
    assert large.train.microbatches_per_step == HOME.microbatches * row.updates_per_step


def test_a_race_that_was_stopped_goes_on_and_its_table_has_what_is_there(tmp_path: Path) -> None:
    cells = wanted_cells(HOME, ["dense float32", "int8", "auto"], 2)
    assert [cell.seed for cell in cells] == sorted(cell.seed for cell in cells)
    assert len(set(cells)) == len(cells)
    state = tmp_path / "race.json"
    rows = {"dense float32": FALLING, "int8": [(0, 5.0), (10, 3.5), (20, 1.5)]}
    told = [
        {"size": dataclasses.asdict(SIZE), "row": dataclasses.asdict(ROWS[name]), "seed": 0, "losses": losses}
        for name, losses in rows.items()
    ]
    other = {**told[0], "size": {**dataclasses.asdict(SIZE), "updates": 256}, "seed": 1}
    state.write_text("".join(json.dumps(each) + "\n" for each in (*told, other)))
    known = known_in(state, SIZE)
    assert known == {Cell(ROWS[name], 0): losses for name, losses in rows.items()}
    dense, int8, muon = lines_on(Link(20, 60), HOME, ["dense float32", "int8", "Muon"], known, 2, 0.5)
    assert (dense.updates, int8.updates) == (10, 12.5)
    assert int8.time_s == 12.5 * int8.update_s
    assert int8.sooner_than_int8 == 1
    assert dense.sooner_than_int8 == pytest.approx(int8.time_s / (10 * dense.update_s))
    assert (muon.loss, muon.updates, muon.time_s, muon.sooner_than_int8) == (None, None, None, None)
    assert known_in(tmp_path / "none", SIZE) == known_in(None, SIZE) == {}
