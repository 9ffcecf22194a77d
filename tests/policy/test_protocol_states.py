"""The step protocol with donors that give made-up states: a joiner ends with the parameters of its stage, or does not serve.

The invariant I2 shows it: of one lineage there is one history.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from peerd.table.record import PeerId, Phase
from tests.policy.model_faults import HONEST, Fault, Kind, Scenario, draw
from tests.policy.protocol_model import Outcome, World
from tests.some_seeds import some

LIAR = "p1"
JOINS = tuple(Fault(at_s, Kind.JOIN) for at_s in (3.0, 6.0, 9.0, 12.0))


def misgiven(seed: int, num_stages: int, num_peers: int, *, off: frozenset[str] = frozenset(), delay: float = -4.0) -> Outcome:
    """A run in which one peer gives made-up states from the first second on, and four others join."""
    faults = (Fault(1.0, Kind.MISGIVE, name=LIAR, lasts_s=1e3), *JOINS)
    scenario = Scenario(seed=seed, num_stages=num_stages, peers_per_stage=num_peers, last_step=16, faults=faults, off=off, limit_s=150.0)
    return World(replace(scenario, certifies=True, delay=delay)).run()


@pytest.mark.parametrize("seed", some(2, 6))
@pytest.mark.parametrize(("num_stages", "num_peers"), [(1, 3), (2, 4)])
def test_hole_66_nobody_serves_with_a_state_that_its_donor_made_up(num_stages: int, num_peers: int, seed: int) -> None:
    outcome = misgiven(seed, num_stages, num_peers)
    assert outcome.problems == ()
    assert outcome.counts["inexact"] == outcome.counts["bans"] == 0


def test_hole_66_without_the_proof_some_would() -> None:
    assert any("I2" in problem for seed in range(6) for problem in misgiven(seed, 1, 3, off=frozenset({"prove"})).problems)


def test_hole_66_the_liar_was_asked_and_its_state_was_given_up() -> None:
    assert sum(misgiven(seed, 1, 3).counts["states given up"] for seed in range(6)) > 0


@pytest.mark.parametrize("delay", [-5.0, -2.0])
def test_a_proof_holds_nobody_up_whether_steps_are_short_or_long(delay: float) -> None:
    """Joiners serve no later than without: mates tell the states of whatever steps they are at."""

    def joined_s(off: frozenset[str]) -> float:
        faults = (Fault(3.0, Kind.JOIN),)
        scenario = Scenario(seed=1, num_stages=1, peers_per_stage=3, last_step=10_000, faults=faults, off=off, certifies=True, delay=delay)
        world = World(scenario)
        world.run(until=lambda: "p3" in world.peers and world.peers[PeerId("p3")].record.phase is not Phase.JOINING)
        assert world.violations == []
        return world.now

    assert joined_s(frozenset()) < joined_s(frozenset({"prove"})) + 1.0


@pytest.mark.parametrize("seed", some(2, 6))
def test_runs_with_such_a_donor_survive_all_kinds_of_faults_exactly(seed: int) -> None:
    assert disturbed(9000 + seed).problems == ()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(4))
def test_two_hundred_runs_with_such_a_donor_are_exact(block: int) -> None:
    for seed in range(9000 + 50 * block, 9000 + 50 * (block + 1)):
        assert disturbed(seed).problems == (), seed


def disturbed(seed: int) -> Outcome:
    """A run with random faults of all kinds, in which one peer gives made-up states for a while."""
    drawn = draw(seed, HONEST, delayed=seed % 3 == 0, certifies=True)
    lie = Fault(1.0, Kind.MISGIVE, name=f"p{seed % 4}", lasts_s=20.0 + 20.0 * (seed % 2))
    return World(replace(drawn, faults=(*drawn.faults, lie), peers_per_stage=3)).run()
