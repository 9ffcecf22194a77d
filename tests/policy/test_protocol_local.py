"""The whole step protocol with local steps: exact means, updates that can be computed again, and few ledgers lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.policy.model_faults import HONEST, Kind, Scenario, draw
from tests.policy.protocol_model import run
from tests.some_seeds import some


def local(seed: int, kinds: Sequence[Kind], off: frozenset[str] = frozenset(), local_batch: int = 2) -> Scenario:
    """A run whose peers update their own parameters after two microbatches. Neither norms nor weights are shared there."""
    drawn = draw(seed, kinds, off=off)
    return replace(
        drawn, local_batch=local_batch, num_microbatches=3 * drawn.num_microbatches, shares_norms=False, ties_stages=False, rounding=True
    )


@pytest.mark.parametrize("seed", some(1, 3))
def test_a_run_with_local_steps_finishes_every_step_exactly(seed: int) -> None:
    outcome = run(local(seed, ()))
    assert outcome.problems == ()
    assert outcome.counts["fences"] == outcome.counts["inexact"] == 0
    assert outcome.counts["sealed"] > 0
    assert outcome.counts["whole ledgers dropped"] == 0


@pytest.mark.parametrize("seed", some(3, 8))
def test_a_run_with_local_steps_survives_all_kinds_of_faults_at_once_exactly(seed: int) -> None:
    outcome = run(local(1000 + seed, HONEST, local_batch=1 + seed % 4))
    assert outcome.problems == ()
    assert outcome.counts["inexact"] == 0


@pytest.mark.parametrize("seed", some(1, 4))
def test_so_does_one_that_begins_with_averaged_gradients(seed: int) -> None:
    outcome = run(replace(local(1300 + seed, HONEST), local_after=1 + seed % 2))
    assert outcome.problems == ()
    assert outcome.counts["inexact"] == 0
    assert outcome.counts["sealed"] > 0


@pytest.mark.parametrize("seed", some(1, 3))
def test_so_does_one_whose_averages_are_certified(seed: int) -> None:
    outcome = run(replace(local(1200 + seed, HONEST, local_batch=1 + seed), certifies=True))
    assert outcome.problems == ()
    assert outcome.counts["inexact"] == 0


def test_open_batches_are_lost_and_hardly_ever_a_ledger() -> None:
    counts: Counter[str] = Counter()
    for seed in range(3):
        outcome = run(local(1100 + seed, (Kind.SUSPECT, Kind.LOSS, Kind.CUT)))
        assert outcome.problems == ()
        counts += outcome.counts
    assert counts["whole ledgers dropped"] <= counts["sealed"] / 20


def test_the_checks_notice_where_logs_do_not_travel() -> None:
    """What a dead peer did cannot be computed again then."""
    scenario = replace(local(600, (Kind.KILL, Kind.SUSPECT, Kind.JOIN), off=frozenset({"logs travel"})), limit_s=100.0)
    assert any("I8" in problem for problem in run(scenario).problems)
    assert run(replace(scenario, off=frozenset())).problems == ()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(5))
def test_hundreds_of_runs_with_local_steps_are_exact_and_none_gets_stuck(block: int) -> None:
    for seed in range(10_000 + 100 * block, 10_000 + 100 * (block + 1)):
        assert run(local(seed, HONEST, local_batch=1 + seed % 4)).problems == (), seed
