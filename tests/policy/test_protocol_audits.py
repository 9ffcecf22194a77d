"""The step protocol with peers that falsify their work, or their word on others' work: they are out soon, and nobody honest is.

The averages with what they falsified stand: an audit comes a step later. Not covered: receipts, which bind a peer to its inputs and
outputs.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from peerd.table.record import PeerId
from tests.policy.model_faults import HONEST, Fault, Kind, Scenario, draw
from tests.policy.model_peer import ModelPeer
from tests.policy.protocol_model import Outcome, World
from tests.some_seeds import some

LIAR, ACCOMPLICE = PeerId("p1"), PeerId("p3")
SIZES = [(1, 3), (2, 4), (1, 7)]
OUT_WITHIN_STEPS = 3
VOTELESS = 3
"""A seed with which one of the liar's three mates has added nothing to the first average."""


def lied_to(
    kinds: dict[PeerId, Kind],
    seed: int,
    num_stages: int,
    num_peers: int,
    audits: float,
    off: frozenset[str] = frozenset(),
    lost_bytes: float = 0.0,
) -> World:
    """A run in which these peers lie from the first second on. With `audits` at `num_peers` every peer computes everything again."""
    faults = tuple(Fault(1.0, kind, name=name, lasts_s=1e3) for name, kind in kinds.items())
    size = {"num_stages": num_stages, "peers_per_stage": num_peers, "num_microbatches": 3 * num_peers, "lost_bytes": lost_bytes}
    return World(Scenario(seed=seed, last_step=12, faults=faults, audits=audits, certifies=True, limit_s=120.0, off=off, **size))  # type: ignore[arg-type]


def runs_until_out(world: World, liars: set[PeerId]) -> int:
    """Run until no honest peer of their stage counts the liars any more. Returns in how many steps after the first lie."""
    stages = {world.peers[liar].record.stage for liar in liars}
    honest = [peer for peer in world.peers.values() if peer.name not in liars and peer.record.stage in stages]
    world.run(until=lambda: world.now >= 1.0)
    began = max(peer.record.step for peer in honest)
    world.run(until=lambda: all(peer.trust.audits.standing.has_lost(liar) for peer in honest for liar in liars))
    assert all(peer.trust.audits.standing.has_lost(liar) for peer in honest for liar in liars)
    return max(peer.record.step for peer in honest) - began


@pytest.mark.parametrize(("num_stages", "num_peers"), SIZES)
@pytest.mark.parametrize("kind", [Kind.FALSIFY, Kind.DENOUNCE])
def test_where_all_is_computed_again_a_liar_is_out_within_three_steps_and_the_run_goes_on(
    kind: Kind, num_stages: int, num_peers: int
) -> None:
    world = lied_to({LIAR: kind}, 0, num_stages, num_peers, audits=num_peers)
    assert runs_until_out(world, {LIAR}) <= OUT_WITHIN_STEPS
    outcome = world.run()
    assert outcome.problems == ()
    assert outcome.counts["inexact"] == 0
    assert outcome.counts["convicted"] == outcome.counts[f"convicted of {LIAR}"] >= num_peers - 1


def heard_everywhere(seed: int, off: frozenset[str] = frozenset()) -> World:
    """A run in which some peers have no microbatch of the first step, so they have no vote. It ends once all honest peers know the liar."""
    fault = Fault(0.0, Kind.FALSIFY, name=LIAR, lasts_s=1e3)
    size = {"num_stages": 2, "peers_per_stage": 4, "num_microbatches": 3 + seed % 3}
    world = World(Scenario(seed=seed, last_step=12, faults=(fault,), audits=4, certifies=True, limit_s=60.0, off=off, **size))  # type: ignore[arg-type]
    world.run(until=lambda: not unaware(world))
    return world


def unaware(world: World) -> list[ModelPeer]:
    """The honest peers by whose word the liar still stands."""
    return [peer for peer in world.peers.values() if peer.name != LIAR and not peer.trust.audits.standing.has_lost(LIAR)]


@pytest.mark.parametrize("seed", [VOTELESS, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, *range(5, 12)))])
def test_other_stages_hear_of_a_liar_where_not_all_its_mates_have_a_vote(seed: int) -> None:
    world = heard_everywhere(seed)
    assert unaware(world) == []
    assert world.run().problems == ()


def test_without_the_words_of_new_members_other_stages_never_hear_of_it() -> None:
    world = heard_everywhere(VOTELESS, frozenset({"new members confirm"}))
    assert {peer.record.stage for peer in unaware(world)} == {0}
    assert world.peers[LIAR].record.stage == 1


@pytest.mark.parametrize("kind", [Kind.SHIELD, Kind.EQUIVOCATE])
def test_an_accomplice_that_calls_wrong_work_right_falls_with_the_liar(kind: Kind) -> None:
    world = lied_to({LIAR: Kind.FALSIFY, ACCOMPLICE: kind}, 0, 1, 7, audits=7)
    assert runs_until_out(world, {LIAR, ACCOMPLICE}) <= OUT_WITHIN_STEPS
    assert world.run().problems == ()


def test_two_framers_of_seven_convict_nobody() -> None:
    world = lied_to({LIAR: Kind.DENOUNCE, ACCOMPLICE: Kind.DENOUNCE}, 0, 1, 7, audits=7)
    assert runs_until_out(world, {LIAR, ACCOMPLICE}) <= OUT_WITHIN_STEPS
    assert world.run().problems == ()


@pytest.mark.parametrize("off", [frozenset(), frozenset({"coins committed before the step"})])
def test_coins_that_a_liar_chooses_after_the_step_open_no_case(off: frozenset[str]) -> None:
    world = lied_to({LIAR: Kind.DENOUNCE}, 0, 1, 4, audits=0.2, off=off)
    assert world.run().problems == ()
    assert bool(world.counts["ground cases"]) == bool(off)


@pytest.mark.parametrize("kind", [Kind.FALSIFY, Kind.DENOUNCE])
def test_in_a_stage_of_two_it_is_disputed_and_the_run_goes_on(kind: Kind) -> None:
    outcome = lied_to({LIAR: kind}, 0, 1, 2, audits=2).run()
    assert outcome.problems == ()
    assert outcome.counts["convicted"] == 0
    assert outcome.counts["cases disputed"] > 0


@pytest.mark.parametrize("lost", [0.5, 1.0])
def test_a_liar_whose_accomplices_withhold_what_it_gave_is_out_by_its_part(lost: float) -> None:
    """Its microbatches cannot be measured, but its part is the sum of what it got, which is signed."""
    world = lied_to({LIAR: Kind.FALSIFY}, 0, 1, 3, audits=3, lost_bytes=lost)
    assert runs_until_out(world, {LIAR}) <= OUT_WITHIN_STEPS
    assert world.counts["lost bytes"] > 0
    assert world.run().problems == ()


@pytest.mark.slow
def test_framers_convict_nobody_where_half_of_the_bytes_are_withheld_from_unlike_devices() -> None:
    world = lied_to({LIAR: Kind.DENOUNCE, ACCOMPLICE: Kind.DENOUNCE}, 0, 1, 7, audits=7, lost_bytes=0.5)
    outcome = world.run()
    assert outcome.problems == ()
    assert outcome.counts["lost bytes"] > 0


@pytest.mark.parametrize(("num_stages", "num_peers"), [*SIZES[:2], pytest.param(*SIZES[2], marks=pytest.mark.slow)])
def test_a_peer_that_does_not_show_what_its_part_is_made_of_is_left_out_soon_and_the_run_goes_on(num_stages: int, num_peers: int) -> None:
    world = lied_to({LIAR: Kind.CONCEAL}, 0, num_stages, num_peers, audits=num_peers)
    liar = world.peers[LIAR]
    honest = [peer for peer in world.peers.values() if peer.name != LIAR and peer.record.stage == liar.record.stage]
    world.run(until=lambda: world.now >= 1.0)
    began = max(peer.record.step for peer in honest)
    world.run(until=lambda: all(LIAR in peer.record.sidelined for peer in honest))
    assert max(peer.record.step for peer in honest) - began <= 2 + OUT_WITHIN_STEPS
    outcome = world.run()
    assert outcome.problems == ()
    assert outcome.counts["convicted"] == outcome.counts["inexact"] == 0


def test_without_audits_a_liar_stays() -> None:
    outcome = lied_to({LIAR: Kind.FALSIFY}, 0, 2, 4, audits=0.0).run()
    assert outcome.problems == ()
    assert outcome.counts["cases"] == outcome.counts["convicted"] == 0


@pytest.mark.parametrize("seed", some(2, 6))
def test_honest_runs_with_audits_survive_all_kinds_of_faults_and_nobody_is_accused(seed: int) -> None:
    outcome = faulty(2000 + seed, delayed=seed % 2 == 1)
    assert outcome.problems == ()
    assert outcome.counts["inexact"] == outcome.counts["cases"] == outcome.counts["convicted"] == 0


def test_a_peer_that_judged_with_other_parameters_would_convict_honest_ones() -> None:
    outcome = faulty(2011, delayed=True, off=frozenset({"judge without parameters"}))
    assert any("I7" in problem for problem in outcome.problems)


def faulty(seed: int, delayed: bool, off: frozenset[str] = frozenset()) -> Outcome:
    scenario = draw(seed, HONEST, delayed=delayed, certifies=True, off=off)
    lost = 0.0 if off else 0.1
    return World(replace(scenario, peers_per_stage=3 + seed % 2, audits=4.0, lost_receipts=lost, lost_bytes=3 * lost)).run()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(4))
def test_two_hundred_honest_runs_with_audits_accuse_nobody(block: int) -> None:
    for seed in range(2000 + 50 * block, 2000 + 50 * (block + 1)):
        outcome = faulty(seed, delayed=seed % 2 == 1)
        assert outcome.problems == (), seed
        assert outcome.counts["inexact"] == outcome.counts["cases"] == 0, seed


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", [Kind.FALSIFY, Kind.DENOUNCE])
def test_in_thirty_seeds_the_liar_alone_is_convicted(kind: Kind) -> None:
    for seed in range(30):
        for num_stages, num_peers in SIZES:
            world = lied_to({LIAR: kind}, seed, num_stages, num_peers, audits=num_peers)
            assert runs_until_out(world, {LIAR}) <= OUT_WITHIN_STEPS, (seed, num_stages, num_peers)
            assert world.run().problems == (), (seed, num_stages, num_peers)
