"""The step protocol with donors that give made-up states: a joiner ends with the parameters of its stage, or does not serve.

The invariant I2 shows it: of one lineage there is one history.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from peerd.policy.hashing import turn_of
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
    assert any(misgiven(seed, 1, 3).counts["states given up"] for seed in range(6))


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


def joins_in_a_long_step(off: frozenset[str] = frozenset()) -> World:
    """All of the first stage sleep, so the step goes on, and a joiner fetches the parameters of the one before, first of the liar."""
    world = World(Scenario(seed=1, peers_per_stage=3, last_step=1000, certifies=True, off=off))
    world.run(until=lambda: min(peer.record.step for peer in world.peers.values()) == 6)
    for name in ("p0", "p2", "p4"):
        world.peers[PeerId(name)].awake_at = world.now + 60.0
    joiner = next(name for name in map("q{}".format, range(100)) if min(["p1", "p3", "p5"], key=lambda mate: turn_of(name, mate)) == LIAR)
    world.add(joiner, 1).join(1)
    world.run(until=lambda: world.peers[PeerId(joiner)].recovery.lacks_previous)
    world.strike(Fault(0, Kind.MISGIVE, name=LIAR, lasts_s=1e3))
    world.run(until=lambda: world.peers[PeerId(joiner)].record.phase is Phase.ACCUMULATING)
    assert world.peers[PeerId(joiner)].previous is not None
    return world


def test_hole_66_the_parameters_of_the_step_before_are_compared_too() -> None:
    for off, fetched, kinds in ((frozenset[str](), 2, 1), (frozenset({"prove"}), 1, 2)):
        world = joins_in_a_long_step(off)
        assert world.counts["previous fetched"] == fetched
        assert len({peer.previous for peer in world.peers.values() if peer.record.stage == 1 and peer.alive}) == kinds


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


def goes_back_with_old_averages(off: frozenset[str] = frozenset()) -> World:
    """Stage 1 dies at step 5 and comes back with step 3 on its disks. p2 has lost its own disk, so p0 alone brings stage 0 back to step 3.

    p0 keeps the averages of all steps before, so they lead from the first weights to its step.
    """
    world = World(Scenario(seed=1, last_step=8, off=off, limit_s=120.0))
    world.rules = replace(world.rules, averages_in_state=9)
    of_stage = [peer for peer in world.peers.values() if peer.record.stage == 1]
    world.run(until=lambda: min(peer.record.step for peer in world.peers.values()) == 5)
    world.checkpoints[PeerId("p2")].clear()
    world.peers[PeerId("p2")].change(checkpoints=())
    world.outages.restart(of_stage)
    return world


def test_hole_70_a_peer_that_went_back_applies_the_averages_of_mates_to_the_first_weights() -> None:
    world = goes_back_with_old_averages()
    outcome = world.run()
    assert outcome.problems == ()
    assert outcome.counts["stepped back"] == 2
    assert outcome.counts["inexact"] == 0
    assert outcome.counts["reloads of p2"] == 0, "it has caught up by averages alone"


def test_hole_70_it_would_apply_them_to_the_parameters_that_the_run_has_given_up() -> None:
    (problem, *_) = goes_back_with_old_averages(frozenset({"first weights"})).run().violations
    assert "the average of step 5 counts [(0, 0)" in problem


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_hole_71_where_nobody_can_say_who_lies_a_joiner_keeps_what_it_has_and_serves_once_the_liar_is_gone(seed: int) -> None:
    """One of two peers gives made-up states, and tells sketches of made-up states."""
    world = World(Scenario(seed=seed, num_stages=1, last_step=10_000, certifies=True, limit_s=500.0))
    liar, honest, false = world.peers[PeerId(LIAR)], world.peers[PeerId("p0")], world.thetas.made_up
    liar.lies.state = lambda found: replace(found, theta=false(found.theta), previous=None)  # type: ignore[method-assign]
    liar.recovery.proving.tell = lambda _previous: (liar.record.step, false(liar.theta))  # type: ignore[method-assign, assignment]
    world.run(until=lambda: honest.record.step >= 10)
    joiner = world.add(f"q{seed}", 0)
    joiner.join(0)
    came_s = world.now
    world.run(until=lambda: world.now >= came_s + 60.0)
    assert joiner.record.phase is Phase.JOINING
    assert world.counts["downloads"] <= 2, "it had seven in this time when it gave up what nobody can judge"
    assert "(p0, p1) hold unlike states" in joiner.recovery.proving.disputed
    assert honest.record.step - joiner.record.step <= 1, "it keeps up with its stage meanwhile"
    world.strike(Fault(0, Kind.KILL, name=LIAR))
    world.run(until=lambda: joiner.record.phase is Phase.ACCUMULATING or world.now >= came_s + 120.0)
    assert (joiner.record.phase, world.violations) == (Phase.ACCUMULATING, [])
    assert joiner.recovery.proving.disputed == ""


def moves_to_the_liar(seed: int, off: frozenset[str] = frozenset()) -> World:
    """A peer of the first stage moves to the last one, where one of three gives made-up states."""
    world = World(Scenario(seed=seed, peers_per_stage=3, last_step=10_000, certifies=True, off=off, limit_s=150.0))
    mover = PeerId("p0")
    world.strike(Fault(0, Kind.MISGIVE, name=LIAR, lasts_s=1e3))
    world.run(until=lambda: world.peers[mover].record.step >= 8)
    world.peers[mover].leave(1)
    world.run(until=lambda: (moved := world.peers[mover].record).stage == 1 and moved.phase is Phase.ACCUMULATING)
    return world


def test_hole_66_a_peer_that_moves_to_another_stage_is_a_joiner_there_and_proves_its_state() -> None:
    worlds = [moves_to_the_liar(seed) for seed in range(4)]
    assert [world.violations for world in worlds] == [[]] * 4
    assert all(world.peers[PeerId("p0")].record.stage == 1 for world in worlds)
    assert sum(world.counts["states given up"] for world in worlds) > 0


def test_hole_66_without_the_proof_it_would_serve_with_what_the_liar_gave() -> None:
    assert any("I2" in problem for seed in range(4) for problem in moves_to_the_liar(seed, frozenset({"prove"})).violations)
