"""The step protocol when the organiser bans peers: T9 (access). Each peer hears of it at another time, and the run goes on exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.policy.model_faults import HONEST, Fault, Kind, Scenario, draw
from tests.policy.protocol_model import Outcome, run
from tests.some_seeds import some

UNHEARD_S = 200.0
"""For as long as that the banned peer does not hear of it, and goes on."""


@pytest.mark.parametrize("seed", some(4, 40))
def test_a_run_survives_bans_exactly(seed: int) -> None:
    assert run(draw(seed, (Kind.BAN,))).problems == ()


@pytest.mark.parametrize("seed", some(4, 40))
def test_a_run_survives_bans_among_all_other_faults_exactly(seed: int) -> None:
    assert run(draw(seed, (*HONEST, Kind.BAN, Kind.BAN, Kind.BAN), delayed=seed % 2 == 1)).problems == ()


@pytest.mark.parametrize("seed", some(3, 10))
def test_certified_averages_survive_bans_exactly(seed: int) -> None:
    assert run(draw(seed, (Kind.BAN, Kind.SUSPECT, Kind.SLEEP), certifies=True)).problems == ()


def test_a_ban_and_mates_that_slept_cost_no_step_of_a_tied_weight() -> None:
    """Two peers in turn pause as their mates wake, one of them before the other end has applied its sum."""
    outcome = run(draw(1659, (*HONEST, *(Kind.BAN,) * 4), delayed=True))
    assert outcome.problems == ()
    assert outcome.counts["stale mates"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_a_thousand_runs_with_bans_are_exact_and_none_gets_stuck(block: int) -> None:
    for seed in range(1000 + 100 * block, 1100 + 100 * block):
        outcome = run(draw(seed, (*HONEST, *(Kind.BAN,) * 4), delayed=seed % 2 == 1, certifies=seed % 5 == 0))
        assert outcome.problems == (), seed


def defied(seed: int, off: frozenset[str] = frozenset()) -> Outcome:
    """A run of three peers a stage, one of which is banned and goes on as if it were not."""
    ban = Fault(1.0, Kind.BAN, name="p1", lasts_s=UNHEARD_S)
    return run(replace(Scenario(seed=seed, peers_per_stage=3, last_step=8, faults=(ban,), off=off), limit_s=100.0))


@pytest.mark.parametrize("seed", some(2, 5))
def test_a_banned_peer_that_does_not_stop_holds_nobody_up(seed: int) -> None:
    outcome = defied(seed)
    assert outcome.problems == ()
    assert outcome.counts["inexact"] == 0


def test_where_its_calls_are_refused_and_its_record_counts_the_run_takes_much_longer() -> None:
    honest_s, held_up_s = (sum(defied(seed, off).ended_at_s for seed in range(3)) for off in (frozenset[str](), frozenset({"drop banned"})))
    assert held_up_s > 1.5 * honest_s
