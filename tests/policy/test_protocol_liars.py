"""The step protocol with a peer that lies in its record or joins no round: the run goes on exactly, and nobody gives up too much."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from peerd.table.record import PeerId, Phase
from tests.policy.model_faults import HONEST, Fault, Kind, Scenario, draw
from tests.policy.model_peer import AVERAGING_S
from tests.policy.protocol_model import Outcome, World
from tests.some_seeds import some

FOR_S = 60.0
STANDS_S = 100.0
"""A run that has not ended by then stands. It takes some 30 s."""
NUM_STAGES = (1, 2, pytest.param(3, marks=pytest.mark.slow))
"""A liar without any other stage, and with one: a third one shows nothing else, and takes the longest."""
ROUND_LIARS = (Kind.SILENT, Kind.ABSORBED, Kind.FRAME, Kind.STINGY, Kind.TRICKLE, Kind.TEAR, Kind.MISJUDGE, Kind.LAG)


def lied_to(
    kind: Kind, seed: int, num_stages: int = 2, for_s: float = FOR_S, off: frozenset[str] = frozenset(), limit_s: float = 300.0
) -> Outcome:
    """A run of three peers a stage, one of which lies from the first second on; none does for 0 s."""
    faults = (Fault(1.0, kind, name="p1", lasts_s=for_s),) if for_s else ()
    scenario = Scenario(seed=seed, num_stages=num_stages, peers_per_stage=3, last_step=12, faults=faults, off=off)
    return _run(replace(scenario, limit_s=limit_s))


def lasts_three_times_as_long(kind: Kind, seed: int, num_stages: int, for_s: float, off: str) -> bool:
    """Whether a lie makes a run as long as that, or stops it, where a rule is switched off."""
    honest_s = lied_to(kind, seed, num_stages, for_s=0.0, off=frozenset({off})).ended_at_s
    return lied_to(kind, seed, num_stages, for_s=for_s, off=frozenset({off}), limit_s=3 * honest_s + 1).ended_at_s > 3 * honest_s


@cache
def _run(scenario: Scenario) -> Outcome:
    """Many kinds of lies are compared with one honest run."""
    return World(scenario).run()


@pytest.mark.parametrize("num_stages", NUM_STAGES)
def test_a_claimed_step_stops_no_run_and_costs_no_step(num_stages: int) -> None:
    for seed in range(2):
        outcome = lied_to(Kind.BOAST, seed, num_stages)
        assert outcome.problems == ()
        assert outcome.counts["inexact"] == 0
        assert outcome.ended_at_s < FOR_S / 2


def test_hole_85_microbatches_that_a_peer_makes_up_under_the_right_names_are_computed_by_nobody() -> None:
    for seed in range(3):
        outcome = lied_to(Kind.INJECT, seed, 2 + seed % 2)
        assert outcome.problems == ()
        assert outcome.counts["inexact"] == 0
        assert outcome.counts["made up"] > 0
    assert "was made up" in lied_to(Kind.INJECT, 0, off=frozenset({"callers"})).violations[0]


def inflated(seed: int, num_stages: int = 2, off: frozenset[str] = frozenset(), for_s: float = FOR_S) -> Outcome:
    """A run of four peers a stage, one of which puts a thousand times its part into each average."""
    faults = (Fault(1.0, Kind.INFLATE, name="p1", lasts_s=for_s),) if for_s else ()
    return _run(Scenario(seed=seed, num_stages=num_stages, peers_per_stage=4, last_step=12, num_microbatches=8, faults=faults, off=off))


def test_a_part_that_is_too_large_is_in_no_average_and_its_peer_is_soon_left_out() -> None:
    for seed in range(3):
        outcome, honest_s = inflated(seed, 1 + seed % 2), inflated(seed, 1 + seed % 2, for_s=0.0).ended_at_s
        assert outcome.problems == ()
        assert outcome.counts["averages with a part too large"] == outcome.counts["inexact"] == 0
        assert 2 <= outcome.counts["too large"] <= 12, "each of its mates finds it in two steps, then it is left out of eight"
        assert outcome.ended_at_s < 2 * honest_s
    assert inflated(0, off=frozenset({"size"})).counts["averages with a part too large"] > 0


def test_hole_32_a_claim_that_nobody_proves_stops_a_run_of_one_stage_where_it_is_not_doubted() -> None:
    """Where who was late is remembered, too, a run goes on: what the boaster owns is missing in the step that it claims to be past."""
    off = frozenset({"doubt claims", "remember the late"})
    assert lied_to(Kind.BOAST, 0, num_stages=1, off=off, limit_s=FOR_S + 1).ended_at_s > FOR_S


def reloads(off: frozenset[str] = frozenset()) -> list[int]:
    """In each of five runs of one stage with short lies: no other stage shows that the claim is wrong."""
    counts = [lied_to(Kind.BOAST, seed, num_stages=1, for_s=8.0, off=off).counts for seed in range(5)]
    return [each["reloads"] - each["reloads of p1"] for each in counts]  # the liar itself falls behind and catches up


def test_hole_30_a_peer_that_claims_a_later_state_and_gives_none_costs_hardly_a_ledger() -> None:
    """In seed 4 a peer that missed the average reloads several times; no ledger but its own is lost."""
    assert sum(count > 0 for count in reloads()) <= 1


def test_hole_30_without_the_header_first_mates_give_their_ledgers_up_for_nothing() -> None:
    assert sum(reloads(frozenset({"header first"}))) > 10


@pytest.mark.parametrize(
    ("num_stages", "num_runs"), [(1, 8), (2, 2), pytest.param(1, 16, marks=pytest.mark.slow), pytest.param(3, 2, marks=pytest.mark.slow)]
)
def test_accusations_of_everybody_slow_a_run_down_by_less_than_half(num_stages: int, num_runs: int) -> None:
    """Of the short runs of one stage some take twice as long, and most no longer at all."""
    honest, lied = (sum(run_of(seed, num_stages, lies).ended_at_s for seed in range(num_runs)) for lies in (False, True))
    assert lied < 1.5 * honest


def run_of(seed: int, num_stages: int, lies: bool) -> Outcome:
    outcome = lied_to(Kind.ACCUSE, seed, num_stages, for_s=FOR_S if lies else 0.0)
    assert outcome.problems == ()
    assert outcome.counts["inexact"] == 0
    return outcome


def test_accusations_stop_a_run_whose_peers_do_not_ask_the_accused() -> None:
    assert lasts_three_times_as_long(Kind.ACCUSE, 0, 2, FOR_S, off="ask the accused")


def two_runs_s(kind: Kind, num_stages: int, for_s: float) -> float:
    """The time of two runs to which a peer lies in this way for so long."""
    ended_s = 0.0
    for seed in range(2):
        outcome = lied_to(kind, seed, num_stages, for_s=for_s)
        assert outcome.problems == ()
        assert outcome.counts["inexact"] == 0
        ended_s += outcome.ended_at_s
    return ended_s


@pytest.mark.parametrize("num_stages", NUM_STAGES)
def test_hole_35_a_peer_that_says_two_things_under_one_version_slows_a_run_down_by_less_than_half(num_stages: int) -> None:
    assert two_runs_s(Kind.CONTRADICT, num_stages, 1e3) < 1.5 * two_runs_s(Kind.CONTRADICT, num_stages, 0.0)


def test_hole_35_such_a_peer_makes_a_run_three_times_as_long_where_it_goes_on_counting() -> None:
    assert lasts_three_times_as_long(Kind.CONTRADICT, 0, 2, 1e3, off="condemn")


def silenced(seed: int, num_stages: int, off: frozenset[str] = frozenset(), limit_s: float = 300.0) -> Outcome:
    return lied_to(Kind.SILENT, seed, num_stages, for_s=1e3, off=off, limit_s=limit_s)


def test_hole_33_if_only_the_leader_could_propose_a_mute_one_would_stop_it() -> None:
    assert "stalled" in silenced(0, 2, frozenset({"take turns", "sideline"}), STANDS_S).stalled


@pytest.mark.parametrize("num_stages", [1, 2])
def test_holes_33_and_36_a_member_that_joins_no_round_and_proposes_none_costs_a_few_rounds_and_no_more(num_stages: int) -> None:
    for seed in range(3):
        honest, outcome = lied_to(Kind.SILENT, seed, num_stages, for_s=0.0), silenced(seed, num_stages)
        assert outcome.problems == ()
        assert outcome.counts["inexact"] == 0
        assert outcome.counts["sidelined"] >= 2
        assert outcome.ended_at_s < 1.5 * honest.ended_at_s + 10 * AVERAGING_S
    twice_s = 2 * outcome.ended_at_s
    assert silenced(0, num_stages, frozenset({"sideline"}), twice_s + 1).ended_at_s > twice_s


@pytest.mark.parametrize("num_stages", [1, 2])
def test_hole_36_a_member_that_says_for_ever_that_it_is_in_a_round_does_not_stop_its_stage(num_stages: int) -> None:
    for seed in range(2):
        outcome = lied_to(Kind.ABSORBED, seed, num_stages, for_s=1e3)
        assert outcome.problems == ()
        assert outcome.counts["inexact"] == 0
        assert outcome.ended_at_s < 60.0
    assert lied_to(Kind.ABSORBED, 0, num_stages, for_s=1e3, off=frozenset({"sideline"}), limit_s=STANDS_S).stalled


def test_hole_36_a_member_that_joins_rounds_again_after_a_while_comes_back() -> None:
    """As one does whose link was bad for a while, in which nothing that it sent arrived."""
    world = World(Scenario(seed=1, peers_per_stage=3, last_step=10_000, faults=(Fault(1.0, Kind.SILENT, name="p1", lasts_s=20.0),)))
    absent, *mates = (world.peers[PeerId(name)] for name in ("p1", "p3", "p5"))
    world.run(until=lambda: all(mate.live().sidelined(1) == {absent.name} for mate in mates))
    assert world.now < 21.0
    world.run(until=lambda: world.now > 21.0 and absent.record.phase is Phase.AVERAGING)
    assert world.now < 120.0
    joined = world.counts["averages"]
    world.run(until=lambda: world.counts["averages"] > joined + 60)
    assert not any(mate.record.sidelined for mate in mates)
    assert world.counts["sidelined"] <= 4


@pytest.mark.parametrize("seed", some(2, 3))
@pytest.mark.parametrize("num_stages", [1, 2])
def test_hole_36_a_liar_that_asks_all_but_one_and_leaves_all_others_out_makes_nobody_else_do_so(num_stages: int, seed: int) -> None:
    outcome = lied_to(Kind.FRAME, seed, num_stages, for_s=1e3)
    assert outcome.problems == ()
    assert outcome.counts["inexact"] == 0
    assert outcome.counts["failed rounds"] > 0
    assert outcome.counts["sidelined"] == outcome.counts["p1 sidelines"]


@pytest.mark.parametrize("kind", [Kind.STINGY, Kind.TRICKLE, Kind.TEAR])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_hole_40_a_member_that_sends_next_to_nothing_in_rounds_is_left_out_and_nobody_else_is(kind: Kind, num_stages: int) -> None:
    for seed in range(2):
        honest, outcome = (lied_to(kind, seed, num_stages, for_s=for_s) for for_s in (0.0, 1e3))
        assert outcome.problems == ()
        assert outcome.counts["inexact"] == 0
        assert outcome.counts["voids"] == outcome.counts["voids of p1"]
        assert outcome.counts["sidelined"] >= 2
        assert outcome.ended_at_s < 1.5 * honest.ended_at_s + 12 * AVERAGING_S


@pytest.mark.parametrize("kind", [Kind.STINGY, Kind.TEAR])
def test_hole_40_where_nobody_judges_such_a_member_stops_its_stage(kind: Kind) -> None:
    assert lied_to(kind, 0, 1, for_s=1e3, off=frozenset({"judge"}), limit_s=STANDS_S).stalled


def slow_rounds(kind: Kind, num: int, seed: int, for_s: float = 1e3, off: frozenset[str] = frozenset()) -> Outcome:
    """A run of one stage whose peers need seconds to send an accumulator, so that each judge's turn comes."""
    drips = [Fault(0.5, Kind.DRIP, name=f"p{number}", lasts_s=1e4) for number in range(num)]
    faults = (*drips, Fault(1.0, kind, name="p1", lasts_s=for_s)) if for_s else tuple(drips)
    limit_s = 200.0 if "give up" in off else 600.0
    return _run(Scenario(seed=seed, num_stages=1, peers_per_stage=num, last_step=8, limit_s=limit_s, faults=faults, off=off))


@pytest.mark.parametrize("seed", some(1, 3))
@pytest.mark.parametrize("num", [2, 3, 5])
def test_rounds_that_take_several_averaging_times_come_together_and_nobody_is_left_out(num: int, seed: int) -> None:
    outcome = slow_rounds(Kind.STINGY, num, seed, for_s=0.0)
    assert outcome.problems == ()
    assert outcome.counts["voids"] == outcome.counts["sidelined"] == outcome.counts["inexact"] == 0
    assert outcome.ended_at_s > 8 * AVERAGING_S


@pytest.mark.parametrize("seed", some(1, 2))
@pytest.mark.parametrize("num", [3, 5])
def test_hole_40_a_judge_that_closes_every_round_that_it_may_does_not_stop_its_stage(num: int, seed: int) -> None:
    """It leaves others out of each step that it may judge, and hardly anybody else leaves any out of further ones."""
    honest, outcome = (slow_rounds(Kind.MISJUDGE, num, seed, for_s) for for_s in (0.0, 1e3))
    assert outcome.problems == ()
    assert outcome.counts["inexact"] == 0
    assert outcome.counts["voids"] > 0
    assert outcome.counts["sidelined"] <= outcome.counts["p1 sidelines"] + 1
    assert outcome.ended_at_s < 4 * honest.ended_at_s


def test_hole_42_members_that_never_hear_that_their_round_is_closed_end_it_themselves() -> None:
    """No word of a close gets through, and the three judges are not all members."""
    lost = frozenset({"tell of closes"})
    assert slow_rounds(Kind.STINGY, 6, 1, off=lost).problems == ()
    assert slow_rounds(Kind.STINGY, 6, 1, off=lost | {"give up"}).stalled


@pytest.mark.parametrize("seed", some(1, 3))
@pytest.mark.parametrize("kind", ROUND_LIARS)
def test_runs_with_a_liar_in_their_rounds_survive_all_kinds_of_faults_exactly(kind: Kind, seed: int) -> None:
    assert disturbed(kind, seed).problems == ()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(4))
def test_two_hundred_runs_with_a_liar_in_their_rounds_are_exact(block: int) -> None:
    for seed in range(100 * block, 100 * (block + 1)):
        assert disturbed(ROUND_LIARS[seed % len(ROUND_LIARS)], 5000 + seed).problems == (), seed


def disturbed(kind: Kind, seed: int) -> Outcome:
    """A run with random faults of all kinds, with one peer that lies for a while."""
    drawn = draw(seed, HONEST, delayed=seed % 3 == 0)
    lie = Fault(1.0, kind, name=f"p{seed % 4}", lasts_s=20.0 + 20.0 * (seed % 2))
    return World(replace(drawn, faults=(*drawn.faults, lie), peers_per_stage=3)).run()


def test_hole_39_a_member_that_says_for_ever_that_it_lacks_the_average_costs_each_step_an_averaging_time() -> None:
    """Or a quarter of a step's time, where that is longer."""
    for num_stages in (1, 2):
        honest, outcome = (lied_to(Kind.LAG, 0, num_stages, for_s=for_s) for for_s in (0.0, 1e3))
        assert outcome.problems == ()
        assert outcome.counts["inexact"] == 0
        assert outcome.ended_at_s < 1.5 * honest.ended_at_s + 12 * AVERAGING_S
    assert lied_to(Kind.LAG, 0, for_s=1e3, off=frozenset({"wait for the late"}), limit_s=STANDS_S).stalled


def withheld(for_s: float = 1e3, off: frozenset[str] = frozenset()) -> float:
    """How long two runs take together of which a trainer launches nothing of its own."""
    ended_s = 0.0
    for seed in range(2):
        outcome = lied_to(Kind.WITHHOLD, seed, for_s=for_s, off=off)
        assert outcome.problems == ()
        assert outcome.counts["inexact"] == 0
        ended_s += outcome.ended_at_s
    return ended_s


def test_hole_34_a_trainer_that_launches_nothing_of_its_own_makes_one_step_wait_and_not_each() -> None:
    assert withheld() < withheld(0.0) + 2 * 2 * Scenario(seed=0).takeover_s


def test_hole_34_if_nobody_remembered_who_was_late_most_steps_would_wait() -> None:
    assert withheld(off=frozenset({"remember the late"})) > withheld(0.0) + 2 * 4 * Scenario(seed=0).takeover_s


def test_hole_61_a_trainer_that_launches_its_own_one_by_one_makes_one_step_wait_and_not_each() -> None:
    honest, outcome = (lied_to(Kind.DRIBBLE, 0, for_s=for_s) for for_s in (0.0, 1e3))
    assert outcome.problems == ()
    assert outcome.ended_at_s < honest.ended_at_s + 2 * Scenario(seed=0).takeover_s
    assert lied_to(Kind.DRIBBLE, 0, for_s=1e3, off=frozenset({"few"})).ended_at_s > 2.5 * honest.ended_at_s


@pytest.mark.parametrize("num_stages", [1, 2])
def test_hole_60_a_peer_that_voids_all_others_in_each_step_does_not_stop_its_stage(num_stages: int) -> None:
    outcome = lied_to(Kind.VOID, 0, num_stages, for_s=1e3)
    assert outcome.problems == ()
    assert outcome.counts["inexact"] == 0


def test_hole_63_a_member_that_says_again_and_again_that_it_is_in_a_round_is_of_little_harm() -> None:
    honest, outcome = (lied_to(Kind.FLAP, 0, for_s=for_s) for for_s in (0.0, 1e3))
    assert outcome.problems == ()
    assert outcome.ended_at_s < 2.5 * honest.ended_at_s


def test_hole_65_a_member_that_proposes_nothing_makes_a_few_steps_wait_and_not_each_that_it_leads() -> None:
    def ended_s(for_s: float, *off: str) -> float:
        faults = (Fault(1.0, Kind.MUTE, name="p1", lasts_s=for_s),) if for_s else ()
        outcome = World(Scenario(seed=0, num_stages=1, peers_per_stage=3, last_step=24, faults=faults, off=frozenset(off))).run()
        assert outcome.problems == ()
        return outcome.ended_at_s

    assert ended_s(1e3) < ended_s(0.0) + 3 * 2 * AVERAGING_S
    assert ended_s(1e3, "remember the mute") > ended_s(0.0) + 6 * 2 * AVERAGING_S


def test_hole_64_a_mute_leader_that_seems_to_be_in_a_round_for_moments_stops_no_run() -> None:
    outcome = lied_to(Kind.BLINK, 1, for_s=1e3)
    assert outcome.problems == ()
    assert outcome.ended_at_s < 60.0


@pytest.mark.parametrize(("num_peers", "num_liars"), [(5, 2), pytest.param(9, 3, marks=pytest.mark.slow)])
def test_hole_58_a_minority_that_says_that_all_others_are_to_be_left_out_costs_no_time(num_peers: int, num_liars: int) -> None:
    def run(for_s: float) -> Outcome:
        faults = tuple(Fault(1.0, Kind.CONSPIRE, name=f"p{number}", lasts_s=for_s) for number in range(1, 1 + num_liars))
        return World(Scenario(seed=0, num_stages=1, peers_per_stage=num_peers, last_step=12, faults=faults if for_s else ())).run()

    honest, outcome = run(0.0), run(1e3)
    assert outcome.problems == ()
    assert outcome.ended_at_s < 1.2 * honest.ended_at_s


@pytest.mark.parametrize("num_stages", NUM_STAGES)
def test_hole_37_peers_that_are_not_there_slow_a_run_down_by_less_than_half(num_stages: int) -> None:
    assert two_runs_s(Kind.GHOSTS, num_stages, 1e3) < 1.5 * two_runs_s(Kind.GHOSTS, num_stages, 0.0)


def test_hole_37_where_strangers_count_they_make_a_run_several_times_as_long() -> None:
    assert lasts_three_times_as_long(Kind.GHOSTS, 2, 3, 1e3, off="proof")
