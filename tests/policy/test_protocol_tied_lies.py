"""The step protocol with a peer that lies about a weight that two stages hold: nobody applies what it makes up, and the run goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.policy.model_faults import HONEST, Fault, Kind, Scenario, draw
from tests.policy.protocol_model import Outcome, World
from tests.some_seeds import some


def mistied(seed: int, liar: str, *, num_stages: int = 2, certifies: bool = True, off: frozenset[str] = frozenset()) -> Outcome:
    faults = (Fault(1.0, Kind.MISTIE, name=liar, lasts_s=1e3),)
    scenario = Scenario(seed=seed, num_stages=num_stages, peers_per_stage=3, last_step=12, faults=faults, off=off, limit_s=120.0)
    return World(replace(scenario, certifies=certifies, ties_stages=True)).run()


@pytest.mark.parametrize("seed", some(2, 6))
@pytest.mark.parametrize("liar", ["p0", "p1"])
def test_hole_67_what_one_peer_tells_of_a_tied_weight_is_applied_by_nobody(liar: str, seed: int) -> None:
    """The invariants I2 and I6 hold: both ends apply the whole step to the weight, and the copies are the same."""
    outcome = mistied(seed, liar)
    assert outcome.problems == ()
    assert outcome.counts["inexact"] == outcome.counts["bans"] == 0
    assert outcome.counts["copies replaced"] == 0


def test_hole_67_without_certificates_it_would_be() -> None:
    assert any(mistied(seed, "p1", certifies=False).problems for seed in range(4))


def test_hole_67_one_source_of_the_gradients_is_not_enough() -> None:
    assert any("I6" in problem for seed in range(8) for problem in mistied(seed, "p1", off=frozenset({"confirm tied"})).problems)


@pytest.mark.parametrize("seed", some(2, 8))
def test_honest_runs_that_tie_stages_and_certify_survive_all_kinds_of_faults_exactly(seed: int) -> None:
    scenario = replace(draw(7000 + seed, HONEST, certifies=True), ties_stages=True, peers_per_stage=3 + seed % 2)
    outcome = World(scenario).run()
    assert outcome.problems == ()
    assert outcome.counts["bans"] == 0
