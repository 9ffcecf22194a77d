"""Large stages in the protocol model: averages in two levels are as exact as in one, and a death makes its own group average again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peerd.policy.step.groups import groups_of
from peerd.table.record import PeerId, Phase
from tests.policy.model_faults import HONEST, Fault, Kind, Scenario, Survivor, draw
from tests.policy.protocol_model import Outcome, World, run
from tests.some_seeds import some


@pytest.mark.parametrize("seed", some(2, 3))
def test_a_run_in_groups_without_faults_finishes_every_step_exactly(seed: int) -> None:
    outcome = run(replace(draw(seed, (), group_size=2), num_stages=1 + seed % 2))
    assert outcome.problems == ()
    assert outcome.counts["fences"] == outcome.counts["inexact"] == outcome.counts["condemned"] == 0
    assert outcome.counts["sums of groups"] > 0


@pytest.mark.parametrize("seed", some(2, 4))
def test_a_run_in_groups_survives_all_kinds_of_faults_exactly(seed: int) -> None:
    outcome = run(replace(draw(1000 + seed, HONEST, delayed=seed == 3, group_size=2), num_stages=1 + seed % 2))
    assert outcome.problems == ()
    assert outcome.counts["inexact"] == outcome.counts["condemned"] == 0
    assert outcome.counts["sums of groups"] > 0


@pytest.mark.parametrize("kind", [Kind.SILENT, Kind.ABSORBED, Kind.STINGY])
def test_a_run_in_groups_survives_a_liar_exactly(kind: Kind) -> None:
    outcome = run(replace(draw(41, (kind,), group_size=2), num_stages=1))
    assert outcome.problems == ()
    assert outcome.counts["inexact"] == 0


def test_a_death_in_a_groups_round_makes_no_other_group_average_again() -> None:
    scenario = Scenario(seed=3, num_stages=1, peers_per_stage=12, num_microbatches=24, last_step=2, group_size=4, survivor=Survivor.ANY)
    world = World(scenario)
    slow, *_ = sorted(groups_of([peer.record for peer in world.peers.values()], 4).values(), key=len, reverse=True)
    for record in slow:
        world.strike(Fault(0, Kind.DRIP, name=record.peer, lasts_s=20.0))
    names = [record.peer for record in slow]
    others = [peer for name, peer in world.peers.items() if name not in names]

    def is_half_way() -> bool:
        return all(peer.record.group for peer in others) and any(world.peers[name].record.phase is Phase.AVERAGING for name in names)

    world.run(until=is_half_way)
    assert is_half_way()
    held, step = {peer.name: peer.record.group for peer in others}, others[0].record.step
    world.strike(Fault(0, Kind.KILL, name=next(name for name in names if world.peers[name].record.phase is Phase.AVERAGING)))
    seen: set[tuple[PeerId, bytes]] = set()

    def is_averaged() -> bool:
        seen.update((peer.name, peer.record.group) for peer in others if peer.record.step == step and peer.record.group)
        return any(peer.record.phase is Phase.AVERAGED for peer in world.peers.values())

    world.run(until=is_averaged)
    assert seen == set(held.items())
    assert world.run().problems == ()


@pytest.mark.parametrize("seed", [4, pytest.param(9, marks=pytest.mark.slow)])
def test_a_run_that_averages_by_sections_is_exact_under_all_kinds_of_faults(seed: int) -> None:
    outcome = run(replace(draw(2000 + seed, HONEST, group_size=3), num_stages=1, num_sections=3))
    assert outcome.problems == ()
    assert outcome.counts["inexact"] == 0
    assert outcome.counts["averages by sections"] > 0
    assert outcome.counts["sections fetched"] > 0


def test_a_death_in_a_round_for_a_section_makes_no_group_average_again() -> None:
    scenario = Scenario(seed=5, num_stages=1, peers_per_stage=12, num_microbatches=24, last_step=2, group_size=4, num_sections=2)
    world = World(replace(scenario, survivor=Survivor.ANY))

    def in_round_of_section() -> list[PeerId]:
        rounds = {name: peer.rounds.current for name, peer in world.peers.items()}
        return [name for name, current in rounds.items() if current is not None and current.roster.num_sections > 1]

    world.run(until=lambda: bool(in_round_of_section()))
    groups = {peer.record.group for peer in world.peers.values()} - {b""}
    world.strike(Fault(0, Kind.KILL, name=in_round_of_section()[0]))
    seen: set[bytes] = set()

    def is_averaged() -> bool:
        seen.update(peer.record.group for peer in world.peers.values() if peer.alive and peer.record.step == 0)
        return any(peer.record.phase is Phase.AVERAGED for peer in world.peers.values())

    world.run(until=is_averaged)
    assert seen - {b""} <= groups
    assert world.run().problems == ()


def lied_to_in_groups(kind: Kind, seed: int, off: frozenset[str] = frozenset()) -> Outcome:
    """Two stages of seven peers or more, in groups of three with certified averages. One peer lies from the first second on."""
    faults = (Fault(1.0, kind, name=PeerId("p1"), lasts_s=1e3),)
    scenario = Scenario(seed=seed, num_stages=2, peers_per_stage=7 + seed % 4, num_microbatches=18, last_step=6, faults=faults, off=off)
    return run(replace(scenario, limit_s=200.0, certifies=True, group_size=3, num_sections=3))


OTHER_LIES = (pytest.param(kind, marks=pytest.mark.slow) for kind in (Kind.FORGE, Kind.MISNAME))
LIES_IN_GROUPS = (Kind.FORK, Kind.FABRICATE, Kind.RETICENT, *OTHER_LIES)


@pytest.mark.parametrize("kind", LIES_IN_GROUPS)
def test_numbers_that_a_peer_makes_up_in_groups_are_applied_by_nobody_else_and_stop_no_run(kind: Kind) -> None:
    outcome = lied_to_in_groups(kind, 0)
    assert outcome.problems == ()
    assert outcome.counts["inexact"] == 0
    assert outcome.counts["averages by sections"] > 0


@pytest.mark.parametrize(("kind", "off"), [(Kind.FORK, "confirm"), (Kind.FABRICATE, "certificates")])
def test_hole_49_without_words_and_signatures_of_most_members_they_are(kind: Kind, off: str) -> None:
    assert lied_to_in_groups(kind, 0, frozenset({off})).problems


def test_hole_51_a_judge_ends_rounds_without_a_member_that_does_not_say_what_came_of_them() -> None:
    """In groups of two its word is needed. Without the rule each round with it stands until rule 4 (close) gives it up."""
    faults = (Fault(1.0, Kind.RETICENT, name=PeerId("p1"), lasts_s=1e3),)
    scenario = Scenario(seed=1, num_stages=1, peers_per_stage=5, num_microbatches=10, last_step=3, faults=faults, limit_s=60.0)
    in_pairs = replace(scenario, certifies=True, group_size=2, num_sections=2)
    found, without = run(in_pairs), run(replace(in_pairs, off=frozenset({"mute"})))
    assert found.problems == without.problems == ()
    assert found.counts["voids"] > without.counts["voids"] == 0
    assert found.ended_at_s < without.ended_at_s / 2


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 40))])
def test_certified_groups_survive_all_kinds_of_faults_exactly_and_blame_nobody(seed: int) -> None:
    scenario = draw(seed, HONEST, delayed=seed % 3 == 2, group_size=3, certifies=True)
    outcome = run(replace(scenario, num_stages=1 + seed % 2, num_sections=3))
    assert outcome.problems == ()
    assert outcome.counts["inexact"] == outcome.counts["convicted"] == outcome.counts["bans"] == 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", [Kind.FORK, Kind.FABRICATE, Kind.FORGE, Kind.MISNAME, Kind.RETICENT])
def test_thirty_seeds_of_each_lie_in_groups_end_exactly(kind: Kind) -> None:
    for seed in range(30):
        outcome = lied_to_in_groups(kind, seed)
        assert outcome.problems == (), seed
        assert outcome.counts["inexact"] == 0, seed


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("delayed", [False, True], ids=["plain", "delayed"])
@pytest.mark.parametrize("block", range(5))
def test_five_hundred_runs_in_groups_are_exact_and_none_gets_stuck(block: int, delayed: bool) -> None:
    for seed in range(30_000 + 50 * block, 30_000 + 50 * (block + 1)):
        outcome = run(draw(seed, HONEST, delayed=delayed, group_size=2 + seed % 2))
        assert outcome.problems == (), seed
