"""The whole step protocol over links that are dead, in one direction or in both, and with calls that end under the callee."""

from __future__ import annotations

from functools import cache

import pytest

from tests.policy.model_faults import Fault, Kind, Scenario
from tests.policy.protocol_model import Outcome, World, run
from tests.policy.test_protocol import scripted
from tests.some_seeds import some


@cache
def never_reach_each_other(kind: Kind, seed: int, off: frozenset[str] = frozenset()) -> Outcome:
    """p1 and p3 of stage 1 are cut off from each other for ever, or p3 alone hears nothing of p1; p5 reaches both."""
    cut = Fault(0.4, kind, name="p1", other=0.5, lasts_s=1e4)
    return run(Scenario(seed=seed, peers_per_stage=3, last_step=5, limit_s=100.0, faults=(cut,), off=off))


@pytest.mark.parametrize("kind", [Kind.CUT, Kind.ONE_WAY])
@pytest.mark.parametrize("seed", [0, 2])
def test_hole_41_what_does_not_pass_between_two_members_goes_through_a_mate(seed: int, kind: Kind) -> None:
    outcome = never_reach_each_other(kind, seed)
    assert outcome.problems == ()
    assert outcome.counts["failed rounds"] == outcome.counts["voids"] == outcome.counts["inexact"] == 0
    assert outcome.counts["carried"] > 0
    assert never_reach_each_other(kind, seed, frozenset({"carry"})).counts["voids"] > 2


@pytest.mark.parametrize("kind", [Kind.CUT, Kind.ONE_WAY])
@pytest.mark.parametrize("seed", [10, 16])
def test_hole_43_a_member_that_two_mates_reach_is_not_suspected_by_the_one_that_does_not(seed: int, kind: Kind) -> None:
    """p1 and p7 of four mates."""

    def outcome(off: frozenset[str] = frozenset()) -> Outcome:
        cut = Fault(0.4, kind, name="p1", other=0.9, lasts_s=1e4)
        return run(Scenario(seed=seed, peers_per_stage=4, last_step=6, limit_s=100.0, faults=(cut,), off=off))

    found = outcome()
    assert found.problems == ()
    assert found.counts["voids"] == found.counts["suspicions"] == 0
    assert found.counts["carried"] > 0
    assert outcome(frozenset({"witnesses"})).counts["suspicions"] > 0


@pytest.mark.parametrize("kind", [Kind.CUT, Kind.ONE_WAY])
@pytest.mark.parametrize("seed", [13, 22])
def test_a_leader_that_gets_no_answer_gives_up_leaves_out_nobody_and_the_next_one_leads(seed: int, kind: Kind) -> None:
    cut = Fault(0.4, kind, name="p1", other=0.9, lasts_s=1e4)
    found = run(Scenario(seed=seed, peers_per_stage=4, last_step=6, limit_s=100.0, faults=(cut,)))
    assert found.problems == ()
    assert found.counts["voids"] == found.counts["inexact"] == 0


@pytest.mark.parametrize("kind", [Kind.CUT, Kind.ONE_WAY])
@pytest.mark.parametrize("seed", some(1, 2))
def test_hole_19_two_members_that_never_reach_each_other_do_not_stop_their_stage(seed: int, kind: Kind) -> None:
    """Not even before the link is known, and where no mate carries."""
    for off in ({"carry"}, {"go around"}, {"carry", "go around"}):
        assert never_reach_each_other(kind, seed, frozenset(off)).problems == (), off
    assert never_reach_each_other(kind, seed, frozenset({"carry", "void", "sideline"})).stalled


def cannot_call(caller: str, callee: float, off: frozenset[str] = frozenset(), delayed: bool = False) -> World:
    """`caller` cannot call that one of four peers for ever; the other can call it."""
    return scripted(Fault(0.4, Kind.NO_CALLS, name=caller, other=callee, lasts_s=1e4), off=off, limit_s=100.0, last_step=8, delayed=delayed)


@pytest.mark.parametrize("delayed", [False, True], ids=["plain", "delayed"])
@pytest.mark.parametrize(("caller", "callee"), [("p3", 0.3), ("p1", 0.8)])
def test_hole_22_a_member_that_cannot_call_the_only_other_one_does_its_share(caller: str, callee: float, delayed: bool) -> None:
    world = cannot_call(caller, callee, delayed=delayed)
    assert world.run().problems == ()
    assert world.counts["voids"] <= 1, "rounds go around the link, once it is known"
    assert world.counts["inexact"] == 0


@pytest.mark.parametrize(("caller", "callee"), [("p3", 0.3), ("p1", 0.8)])
def test_hole_22_a_leader_that_cannot_call_the_other_member_would_leave_it_out_of_steps(caller: str, callee: float) -> None:
    """The streams of a pair can be opened by either end, but a proposal is a call: so the one leads that can call the other."""
    found, without = (cannot_call(caller, callee, off).run().counts for off in (frozenset[str](), frozenset({"go around"})))
    assert found["failed rounds"] == found["sidelined"] == 0
    assert min(without["failed rounds"], without["sidelined"]) > 0


@pytest.mark.parametrize("kind", [Kind.CUT, Kind.ONE_WAY, Kind.NO_CALLS])
def test_hole_22_where_the_only_two_of_each_stage_cannot_reach_each_other_one_of_each_goes_on(kind: Kind) -> None:
    """Those that stay behind come along once the links are there again."""
    cuts = [Fault(0.4, kind, name=name, other=other, lasts_s=60.0) for name, other in (("p0", 0.6), ("p1", 0.8))]
    world = scripted(*cuts, seed=2, last_step=5, limit_s=200.0)  # with other seeds two are at one step, each with its own average, for long
    world.run(until=lambda: world.now > 55.0)
    assert {peer.record.step for peer in world.peers.values()} >= {5}, world.describe()
    outcome = world.run()
    assert outcome.problems == ()
    assert outcome.counts["inexact"] == 0


def cancels_proposals(off: frozenset[str] = frozenset()) -> World:
    """Every call of a proposal ends while the copy is made, for five seconds."""
    faults = [Fault(0.1, Kind.CANCELLED, name=f"p{number}", lasts_s=5.0) for number in range(4)]
    return scripted(*faults, copy_s=0.5, off=off, limit_s=100.0)


def test_hole_21_proposals_that_are_cancelled_while_a_slow_copy_is_made_stop_nobody() -> None:
    outcome = cancels_proposals().run()
    assert outcome.problems == ()
    assert outcome.counts["joins that broke"] > 0
    assert outcome.counts["inexact"] == 0


def test_hole_21_a_round_that_nothing_runs_would_stay_open_for_ever() -> None:
    assert "AVERAGING" in cancels_proposals(frozenset({"close unnoted"})).run().stalled


@pytest.mark.parametrize("seed", some(1, 3))
def test_a_caller_that_one_callee_never_hears_sends_its_work_elsewhere(seed: int) -> None:
    """p0 of stage 0 hears p3 of stage 1, and p3 never hears p0."""
    cut = Fault(0.4, Kind.ONE_WAY, name="p0", other=0.8, lasts_s=1e4)
    outcome = run(Scenario(seed=seed, last_step=5, limit_s=200.0, faults=(cut,)))
    assert outcome.problems == ()
    assert outcome.counts["inexact"] == 0
