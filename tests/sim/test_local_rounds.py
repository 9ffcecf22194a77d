"""`scripts/bench home --part local` and `scripts/bench local_steps`: what they train, and what their tables say."""

from __future__ import annotations

import pytest

from peerd.config.manifest import Manifest, TrainConfig, WireConfig
from scripts.benchmarks._local import HEAD, PER_STAGE, UPDATES, local_of, manifest_of, parameters_of, width_of
from scripts.benchmarks.local_steps import MARKS, SMALLEST, SWARMS, Cell, Size, Swarm, loss_after, seconds_in, step_in_s, table_of

SIZE = Size(d_model=16, layers=2, replicas=4, local_batch=1, tokens=262_144)
SYNCHRONOUS, LOCAL = Cell(rate=2e-3), Cell(rate=2e-3, updates=8, outer_rate=1.0, codec="int8")


@pytest.mark.parametrize("millions", [2, 5, 25])
def test_a_stage_has_at_least_so_many_parameters_in_layers_that_are_no_wider_than_they_must_be(millions: int) -> None:
    width = width_of(millions)
    assert parameters_of(manifest_of(width - HEAD)) < 1e6 * millions <= parameters_of(manifest_of(width))


def test_the_run_beside_local_steps_is_a_new_one() -> None:
    plain, new = manifest_of(width_of(25)), Manifest()
    assert plain.wire == WireConfig() == new.wire
    assert plain.train.microbatches_per_step == TrainConfig().microbatches_per_step
    assert plain.swarm.announce_period_s == new.swarm.announce_period_s
    local = local_of(plain)
    assert local.train.microbatches_per_step == PER_STAGE * UPDATES * local.train.local_batch
    assert local.model == plain.model


def told(*losses: float) -> dict[str, object]:
    return {"losses": [[SIZE.tokens * number / MARKS, loss] for number, loss in enumerate(losses)]}


def test_a_row_says_how_far_it_is_behind_and_how_much_sooner_it_is_there() -> None:
    falling = [3.0 - number / MARKS for number in range(MARKS + 1)]
    worst = Cell(rate=9.0, updates=8, outer_rate=1.0)
    known = {SYNCHRONOUS: told(*falling), LOCAL: told(*falling[:-1], 2.1), worst: told(*[9.0] * (MARKS + 1))}
    first, second, third = table_of(SIZE, known, target=0.75)
    assert [first["behind"], second["behind"]] == [0.0, pytest.approx(0.05)]
    for swarm in SWARMS:
        whole_s, local_s = (step_in_s(swarm, SIZE, 8 * is_local, "int8", "int8", is_local) for is_local in (False, True))
        least_s = step_in_s(swarm, SIZE, 0, "int8", SMALLEST, False)
        assert first[swarm]["sooner"] == 1.0
        assert second[swarm]["sooner"] == pytest.approx(8 * whole_s / local_s)
        assert second[swarm]["at_least"] == pytest.approx(8 * min(whole_s, least_s) / local_s)
        assert third[swarm]["sooner"] is None


def test_the_time_of_the_own_swarm_is_that_of_its_own_lines() -> None:
    """A stage of four peers sends averages of its own few parameters; at home size they are 130 million."""
    assert step_in_s("own", SIZE, 0, "int8", "int8", False) < step_in_s("home", SIZE, 0, "int8", "int8", False) / 10


@pytest.mark.parametrize("swarm", SWARMS)
def test_a_synchronous_beginning_takes_the_time_of_synchronous_steps(swarm: Swarm) -> None:
    cell = Cell(rate=2e-3, updates=8, outer_rate=1.0, codec="sparse:64", after=0.25)
    steps, per_step = SIZE.manifest(cell).train.steps, SIZE.manifest(cell).tokens_per_step
    exact, local = (step_in_s(swarm, SIZE, 8, "int8", codec, codec != "int8") for codec in ("int8", "sparse:64"))
    assert exact > local
    assert seconds_in(swarm, SIZE, cell, steps * per_step) == pytest.approx(steps * (0.25 * exact + 0.75 * local))


def test_a_loss_between_evaluations_is_on_the_line_between_them() -> None:
    assert loss_after([(0.0, 4.0), (10.0, 2.0), (20.0, 1.0)], 15.0) == 1.5
