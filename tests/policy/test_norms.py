"""The whole model's gradient norm: known to nobody too early, the same for everybody, and never waited for in vain."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.step.acts import Act, Commit, Reload, SkipStep, Wait
from peerd.policy.step.norms import clip_factor, combine, norm_by_most, norm_of_step, told_by
from peerd.policy.step.roster import lineage_after
from peerd.policy.step.situation import OwnState, Situation, StepRules
from peerd.policy.step.stepping import decide, looks_lost
from peerd.table.record import AverageId, Lineage, PeerRecord, Phase, StepNorm
from tests.strategies import FULL, NUM_MICROBATCHES, member, view_of

RULES = StepRules(num_stages=2, num_microbatches=NUM_MICROBATCHES, ttl_s=3.0, averaging_s=1.5, shares_norms=True)
norms = st.just(0.0) | st.floats(1e-30, 1e30)


def averaged(name: str, norm: float = 3.0, **fields: object) -> PeerRecord:
    """AVERAGED, as peers of a run that shares norms are."""
    return member(name, **{"phase": Phase.AVERAGED, "average_id": AverageId(b"m"), "done": FULL, "gradient_norm": norm, **fields})


def finished(name: str, step: int, norm: float | None, **fields: object) -> PeerRecord:
    """At the step after `step`; telling its norm or, where that is None, not any more."""
    return member(name, step=step + 1, norms=(StepNorm(step, norm),) if norm is not None else (), **fields)


def decided(mine: PeerRecord, *others: PeerRecord, lost_since_s: float | None = None) -> Act:
    return decide(Situation(OwnState(record=mine, lost_since_s=lost_since_s), view_of(mine, *others), 100.0, RULES))


@given(st.lists(norms, min_size=1, max_size=5))
def test_the_whole_is_no_shorter_than_its_parts_and_is_a_float32(parts: list[float]) -> None:
    whole = combine(parts)
    assert whole >= max(parts) * (1 - 1e-6)
    assert whole == combine([whole])


def test_a_part_that_overflowed_makes_the_whole_infinite() -> None:
    assert combine([1.0, math.inf, 2.0]) == combine([1e200, 1e200]) == combine([3.5e38]) == math.inf
    assert combine([3.0, 4.0]) == 5.0


@given(norms, st.floats(1e-3, 1e3))
def test_what_is_clipped_is_as_long_as_allowed_and_nothing_grows(norm: float, most: float) -> None:
    factor = clip_factor(norm, most)
    assert 0 < factor <= 1
    assert norm * factor <= most * (1 + 1e-9)
    assert clip_factor(norm, 0.0) == 1.0


# Who knows it when


def test_it_is_known_once_every_stage_has_averaged() -> None:
    mine, other = averaged("p1", 3.0), averaged("p2", 4.0, stage=1)
    assert norm_of_step(mine, view_of(mine), 2) is None
    assert norm_of_step(mine, view_of(mine, other), 2) == norm_of_step(other, view_of(other, mine), 2) == 5.0
    assert decided(mine, other) == Commit("every stage has averaged", norm=5.0)


def test_of_two_averages_of_a_stage_the_one_with_the_smaller_id_counts() -> None:
    mine, small, large = averaged("p1"), averaged("p2", 4.0, stage=1, average_id=b"a"), averaged("p3", 9.0, stage=1, average_id=b"b")
    assert norm_of_step(mine, view_of(mine, small, large), 2) == 5.0


def test_what_a_mate_applied_counts_more_than_what_others_did_and_than_what_i_would_make() -> None:
    mine, other = averaged("p1"), averaged("p2", 4.0, stage=1)
    mate, stranger = finished("p3", 0, 7.0), finished("p4", 0, 6.0, stage=1)
    assert norm_of_step(mine, view_of(mine, other, stranger, mate), 2) == 7.0
    assert norm_of_step(mine, view_of(mine, other, stranger), 2) == 6.0
    assert told_by(mate, 1) is None


def test_a_joiner_tells_nothing() -> None:
    mine, joiner = averaged("p1"), finished("p2", 0, 7.0, stage=1, phase=Phase.JOINING)
    assert norm_of_step(mine, view_of(mine, joiner), 2) is None


# Where averages are certified, no single peer's word decides


def three(norm: float, false: float) -> list[PeerRecord]:
    """Another stage of three that has averaged. The first one tells a false norm."""
    return [averaged(f"p{number}", false if number == 2 else norm, stage=1) for number in (2, 3, 4)]


@pytest.mark.parametrize("false", [0.0, 1e30])
def test_hole_52_of_three_that_tell_the_norm_of_a_stage_one_may_lie(false: float) -> None:
    mine, others = averaged("p1", 3.0), three(4.0, false)
    assert norm_of_step(mine, view_of(mine, *others), 2) != 5.0
    assert norm_by_most(mine, view_of(mine, *others), 2) == 5.0


def test_hole_52_one_that_tells_its_norm_before_the_others_is_waited_for_until_that_is_late() -> None:
    mine, (liar, honest, last) = averaged("p1", 3.0), three(4.0, 0.0)
    view = view_of(mine, liar, honest, replace(last, phase=Phase.ACCUMULATING, average_id=AverageId(b""), gradient_norm=None))
    assert norm_by_most(mine, view, 2) is None
    assert norm_by_most(mine, view, 2, is_late=True) is not None


@pytest.mark.parametrize("stage", [0, 1])
def test_hole_52_one_that_has_finished_the_step_and_tells_another_norm_than_the_averages_make_is_not_believed(stage: int) -> None:
    mine, liar = averaged("p1", 3.0), finished("p9", 0, 1.0, stage=stage)
    assert norm_by_most(mine, view_of(mine, *three(4.0, 0.0), liar), 2) == 5.0


def test_hole_52_of_those_that_have_finished_the_step_most_are_believed_where_the_other_stage_has_gone_on() -> None:
    mine, liar = averaged("p1", 3.0), finished("p9", 0, 1.0, lineage=lineage_after(Lineage(), AverageId(b"m"), 5.0))
    ahead = [finished(f"p{number}", 0, 5.0 if number > 2 else 1.0, stage=1) for number in (2, 3, 4)]
    assert norm_by_most(mine, view_of(mine, liar, *ahead), 2) == 5.0
    assert norm_by_most(mine, view_of(mine, liar), 2) is None, "its lineage has another norm than it tells"


# The step rules with norms


def test_a_stage_left_behind_commits_with_the_norm_that_the_others_applied() -> None:
    assert decided(averaged("p1"), finished("p2", 0, 6.0, stage=1)) == Commit("every stage has averaged", norm=6.0)


def test_an_averaged_peer_commits_behind_its_mate_with_the_mates_norm() -> None:
    assert decided(averaged("p1"), finished("p2", 0, 6.0)) == Commit("a stage mate has committed this step", norm=6.0)


def test_a_mate_ahead_who_does_not_tell_the_norm_any_more_gives_its_state() -> None:
    assert isinstance(decided(averaged("p1"), finished("p2", 4, 6.0)), Reload)


def test_nobody_commits_without_the_norm_and_a_step_whose_norm_is_lost_is_given_up() -> None:
    mine, ahead = averaged("p1"), finished("p2", 1, None, stage=1)
    now = Situation(OwnState(record=mine), view_of(mine, ahead), 0.0, RULES)
    assert isinstance(decided(mine, ahead), Wait)
    assert looks_lost(now)
    assert isinstance(decided(mine, ahead, lost_since_s=100 - 2 * RULES.ttl_s), Wait)
    assert isinstance(decided(mine, ahead, lost_since_s=100 - 3 * RULES.ttl_s), SkipStep)
    assert not looks_lost(replace(now, rules=replace(RULES, shares_norms=False))), "without norms it just commits"


def test_waiting_for_a_stage_that_has_not_averaged_is_not_being_lost() -> None:
    mine = averaged("p1")
    assert not looks_lost(Situation(OwnState(record=mine), view_of(mine, member("p2", stage=1)), 0.0, RULES))


@given(st.floats(0, 100), st.floats(0, 100), st.binary(max_size=4))
def test_parameters_that_applied_unlike_norms_have_unlike_lineages(one: float, other: float, average: bytes) -> None:
    after = [lineage_after(Lineage(), AverageId(average), norm) for norm in (one, other, None)]
    assert (after[0] == after[1]) == (one.hex() == other.hex())
    assert after[2] == lineage_after(Lineage(), AverageId(average)) != after[0]


@pytest.mark.parametrize("norm", [0.0, 0.1, 1e-30, math.inf])
def test_an_infinite_norm_has_a_lineage_too(norm: float) -> None:
    assert lineage_after(Lineage(), AverageId(b"a"), norm) == lineage_after(Lineage(), AverageId(b"a"), norm)
