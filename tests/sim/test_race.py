"""`scripts/bench race`: what is made of curves and simulated steps, and that a training goes on as if it had not been stopped."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from functools import partial
from pathlib import Path

import pytest

from peerd.cli.new_link import chosen_for
from peerd.planner.contenders import BASE, CONTENDERS, NUM_REPLICAS, KeptChoices
from peerd.planner.race_results import RacedLine, parsed, race_results
from peerd.reference import train_reference
from peerd.sim.home_lines import HomePeers
from peerd.sim.network import BYTES_PER_MBIT
from scripts.benchmarks._race import BETWEEN, LINKS, HomeSize, Link, update_s
from scripts.benchmarks._race_lines import Race, lines_on, reaches_at
from scripts.benchmarks._race_results import write
from scripts.benchmarks._race_training import Cell, Losses, Size, Tuning, train
from scripts.benchmarks.race import known_in
from tests.tiny_run import corpus_of

HOME = HomeSize(d_model=256, layers=4, stages=2, sequence_length=128, microbatches=8)
SIZE = Size(d_model=16, layers=2, stages=2, sequences=2, sequence_length=16, updates=32, tokenizer="bytes")
RACE = Race(
    size=SIZE,
    rows=("dense float32", "int8", "Muon", "local steps"),
    links=(Link(20, 60),),
    seeds=2,
    rates=(1e-3, 2e-3),
    muon_rates=(1e-2,),
    outer=((0.7, 0.9), (1.0, 0.0)),
    target=0.5,
    home=HOME,
)
FALLING: Losses = [(0, 5.0), (10, 3.0), (20, 2.0)]
PLAIN = Tuning(2e-3)
NEAR = 1.1


@pytest.mark.parametrize(("target", "updates"), [(5.0, 0), (4.0, 5), (3.0, 10), (2.5, 15), (2.0, 20), (1.9, math.inf)])
def test_the_target_is_reached_between_two_evaluations(target: float, updates: float) -> None:
    assert reaches_at(FALLING, target) == updates


def test_fewer_bytes_take_no_more_time_on_a_slow_link() -> None:
    slow = Link(20, 60)
    order = ["dense float32", "int8", "subspace 1/8", "subspace, local"]
    times = [update_s(HOME, CONTENDERS[name], slow) for name in order]
    assert times == sorted(times, reverse=True)
    assert times[0] > 2 * times[1]
    assert update_s(HOME, CONTENDERS["int8"], Link(200, 60)) < times[1]


@pytest.mark.parametrize("line", race_results().lines, ids=lambda line: f"{line.mbit_per_s:g} Mbit/s")
def test_peerd_new_chooses_for_a_line_what_was_first_in_the_race(line: RacedLine) -> None:
    """Only rows that may be first are simulated, and float32."""
    size, results = HomeSize(), race_results()
    times = dict(sorted(line.time_s.items(), key=lambda item: item[1]))
    first, *others = times
    near = [row for row in others if times[row] <= NEAR * times[first]]
    rows = tuple(row for row in results.rows if row.row in (*near, first, BASE))
    peers = HomePeers(bytes_per_s=line.mbit_per_s * BYTES_PER_MBIT, round_trip_s=line.round_trip_ms / 1000, flops=size.flops)
    best = chosen_for(size.run, peers, KeptChoices(), dataclasses.replace(results, rows=rows)).ranked[0]
    is_profile = Link(line.mbit_per_s, line.round_trip_ms) in LINKS
    assert times[best.row] <= (1 if is_profile else 1.1) * times[first]


def test_auto_is_the_codec_that_the_policy_takes_and_then_that_codecs_row() -> None:
    assert HOME.on(CONTENDERS["auto"], Link(1e6, 1)).codec == "none"
    found = HOME.on(CONTENDERS["auto"], Link(20, 60))
    assert found == dataclasses.replace(CONTENDERS["int8"], codec=found.codec)
    assert found.codec not in ("none", "auto")


@pytest.mark.parametrize("name", list(CONTENDERS))
def test_every_row_is_a_run_at_both_sizes_with_equal_data(name: str) -> None:
    row = HOME.on(CONTENDERS[name], LINKS[-1])
    small, large = SIZE.manifest(Cell(row, 1, PLAIN)), HOME.manifest(row)
    assert small.train.steps * row.updates_per_step * row.batch == SIZE.updates
    assert small.train.steps % small.train.evaluate_every_steps == 0
    assert small.boundary_bytes * CONTENDERS[name].narrower in (0, 4 * small.tokens_per_microbatch * SIZE.d_model)
    assert large.train.microbatches_per_step == HOME.microbatches * row.updates_per_step * row.batch


@pytest.mark.parametrize("name", ["int8", "all"])
def test_a_training_that_was_stopped_goes_on_to_the_same_losses(name: str, tmp_path: Path) -> None:
    manifest = SIZE.manifest(Cell(CONTENDERS[name], 0, Tuning(2e-3, 0.7, 0.9)))
    corpus, part = corpus_of(manifest, tmp_path), tmp_path / "race.json.part"
    at_once = train(manifest, corpus)
    assert at_once is not None
    assert at_once[0][0] == 0
    assert at_once[-1][0] == SIZE.updates
    for stopped_after in (1, 2):
        chances = itertools.chain(itertools.repeat(True, stopped_after), itertools.repeat(False))
        assert train(manifest, corpus, part, partial(next, chances)) is None
    assert train(manifest, corpus, part) == at_once
    other = SIZE.manifest(Cell(CONTENDERS[name], 1, Tuning(2e-3, 0.7, 0.9)))
    assert train(other, corpus, part, lambda: False) is None, "the file of another training is not taken for this one's"


@pytest.mark.parametrize("name", ["local steps", "all"])
def test_a_training_with_local_steps_is_the_references(name: str, tmp_path: Path) -> None:
    manifest = SIZE.manifest(Cell(CONTENDERS[name], 0, Tuning(2e-3, 0.7, 0.9)))
    corpus = corpus_of(manifest, tmp_path)
    found = train_reference(manifest, corpus, manifest.train.steps, num_replicas=NUM_REPLICAS).evaluations
    assert train(manifest, corpus) == [(8 * each.step, each.loss) for each in found]


def test_a_synchronous_training_without_a_codec_is_the_references(tmp_path: Path) -> None:
    manifest = SIZE.manifest(Cell(CONTENDERS["dense float32"], 0, PLAIN))
    corpus = corpus_of(manifest, tmp_path)
    found = train_reference(manifest, corpus, manifest.train.steps).evaluations
    losses = train(manifest, corpus)
    assert losses is not None
    assert [loss for _, loss in losses] == pytest.approx([each.loss for each in found], rel=1e-4)


def test_each_row_tries_its_tunings_with_seed_0_and_the_best_goes_on() -> None:
    known, seen = dict[Cell, Losses](), list[Cell]()
    while (cell := RACE.next_cell(known)) is not None:
        seen.append(cell)
        known[cell] = [(0, 5.0), (10, 3.0 + cell.tuning.rate - cell.tuning.outer_rate)]
    first = [cell for cell in seen if cell.seed == 0]
    assert len(first) == 2 + 2 + 1 + 2 * 2
    assert seen[: len(first)] == first
    assert len({cell.row for cell in first[:4]}) == 4, "all rows once before any twice"
    best = {cell.row: cell.tuning for cell in seen[len(first) :]}
    assert [cell.seed for cell in seen[len(first) :]] == [1] * 4
    assert best[CONTENDERS["int8"]] == Tuning(1e-3)
    assert best[CONTENDERS["Muon"]] == Tuning(1e-2)
    assert best[CONTENDERS["local steps"]] == Tuning(1e-3, 1.0, 0.0)


def test_a_race_that_was_stopped_goes_on_and_its_table_has_what_is_there(tmp_path: Path) -> None:
    state = tmp_path / "race.json"
    rows = {
        Cell(CONTENDERS["dense float32"], 0, PLAIN): FALLING,
        Cell(CONTENDERS["int8"], 0, PLAIN): [(0, 5.0), (10, 3.5), (20, 1.5)],
        Cell(CONTENDERS["int8"], 0, Tuning(1e-3)): [(0, 5.0), (10, 4.5), (20, 4.0)],
    }
    told = [{"size": dataclasses.asdict(SIZE), **dataclasses.asdict(cell), "losses": losses} for cell, losses in rows.items()]
    other = {**told[0], "size": {**dataclasses.asdict(SIZE), "updates": 256}, "seed": 1}
    state.write_text("".join(json.dumps(each) + "\n" for each in (*told, other)))
    known = known_in(state, SIZE)
    assert known == rows
    dense, int8, muon, local = lines_on(RACE, Link(20, 60), known)
    assert (dense.updates, int8.updates) == (10, 12.5)
    assert (int8.tuning, int8.seeds) == (PLAIN, 1)
    assert int8.time_s == 12.5 * int8.update_s
    assert int8.sooner_than_int8 == 1
    assert dense.sooner_than_int8 == pytest.approx(int8.time_s / (10 * dense.update_s))
    assert (muon.loss, muon.updates, muon.time_s, muon.sooner_than_int8) == (None, None, None, None)
    assert (local.tuning, local.seeds) == (None, 0)
    assert known_in(tmp_path / "none", SIZE) == known_in(None, SIZE) == {}
    assert int8.sooner_by_seed == (1,)


def test_the_written_results_are_those_that_peerd_new_reads(tmp_path: Path) -> None:
    known = {
        Cell(CONTENDERS["dense float32"], 0, PLAIN): FALLING,
        Cell(CONTENDERS["int8"], 0, Tuning(1e-3)): [(0, 5.0), (10, 3.5), (20, 1.5)],
        Cell(CONTENDERS["local steps"], 0, Tuning(1e-3, 1.0, 0.5)): [(0, 5.0), (10, 4.5), (20, 4.0)],
    }
    race = dataclasses.replace(RACE, outer=((1.0, 0.5),))
    write(tmp_path / "race.toml", SIZE, {link: lines_on(race, link, known) for link in (Link(20, 60), BETWEEN)})
    found = parsed((tmp_path / "race.toml").read_text())
    dense, int8, local = found.rows
    assert (dense.updates, dense.loss, dense.learning_rate) == (1, 0, 1)
    assert (int8.updates, int8.loss, int8.learning_rate) == (1.25, -0.5, 0.5)
    assert (local.updates, local.loss, local.outer_learning_rate, local.outer_momentum) == (math.inf, 2.0, 1.0, 0.5)
    assert [line.mbit_per_s for line in found.lines] == [20, 50]
    assert found.lines[0].time_s["int8"] == pytest.approx(12.5 * update_s(HOME, CONTENDERS["int8"], Link(20, 60)), rel=1e-4)
    assert (found.lines[0].time_s["local steps"], found.seeds) == (math.inf, 1)
