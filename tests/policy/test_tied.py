"""A weight that two stages hold: both finish a step with one sum, whoever gives it, and unlike copies do not stay."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.step.acts import Act, Commit, CopyTied, FetchTied, Reload, Serve, SkipStep, Wait
from peerd.policy.step.roster import lineage_after, lineage_skipped
from peerd.policy.step.situation import OwnState, Situation, StepRules
from peerd.policy.step.stepping import decide, looks_lost
from peerd.policy.step.tied import (
    TiedSource,
    better_copy,
    history_after,
    lineage_replaced,
    other_end,
    sum_by_most,
    sum_id,
    sum_of_step,
    witnesses,
)
from peerd.table.record import NO_AVERAGE, AverageId, Lineage, PeerId, PeerRecord, Phase, TiedSum
from tests.strategies import FULL, NUM_MICROBATCHES, average_ids, member, view_of

RULES = StepRules(num_stages=3, num_microbatches=NUM_MICROBATCHES, ttl_s=3.0, averaging_s=1.5, ties_stages=True)
FIRST, LAST = AverageId(b"first"), AverageId(b"last")
SUM = sum_id(FIRST, LAST)
FETCHING = "the tied weight's gradients are to be summed over both stages"
ids = st.binary(min_size=1, max_size=4).map(AverageId)


def averaged(name: str, stage: int, **fields: object) -> PeerRecord:
    known = {"phase": Phase.AVERAGED, "average_id": FIRST if stage == 0 else LAST, "done": FULL, "stage": stage}
    return member(name, **(known | fields))


def finished(name: str, stage: int, told: AverageId | None, **fields: object) -> PeerRecord:
    """At step 1; telling the sum it finished step 0 with or, where that is None, not any more."""
    return member(name, stage=stage, step=1, tied_sums=(TiedSum(0, told),) if told is not None else (), **fields)


def decided(mine: PeerRecord, *others: PeerRecord, **own: object) -> Act:
    return decide(Situation(OwnState(record=mine, **own), view_of(mine, *others), 100.0, RULES))  # type: ignore[arg-type]


def peer_asked(act: Act) -> PeerId:
    assert isinstance(act, FetchTied)
    return act.peer


MIDDLE = averaged("m", 1, average_id=AverageId(b"m"))


def test_the_first_and_the_last_of_several_stages_hold_the_weight() -> None:
    assert [other_end(stage, 3) for stage in range(3)] == [2, None, 0]
    assert other_end(0, 1) is None


@given(ids, ids, ids, ids)
def test_a_sum_has_one_name_and_the_order_counts(first: AverageId, last: AverageId, other_first: AverageId, other_last: AverageId) -> None:
    assert (sum_id(first, last) == sum_id(other_first, other_last)) == ((first, last) == (other_first, other_last))


# Which sum, and who has it


@given(average_ids, average_ids)
def test_both_stages_want_the_same_sum_before_anybody_has_finished(one: AverageId, other: AverageId) -> None:
    first, last = averaged("p1", 0, average_id=one), averaged("p2", 2, average_id=other)
    wanted = [sum_of_step(mine, view_of(first, last), 3) for mine in (first, last)]
    assert wanted[0] is not None
    assert wanted[1] is not None
    assert wanted[0].id == wanted[1].id == sum_id(one, other)
    assert (wanted[0].sources, wanted[1].sources) == ((TiedSource(last.peer, other),), (TiedSource(first.peer, one),))


def test_of_two_averages_of_the_other_stage_the_one_with_the_smaller_id_counts() -> None:
    mine, small, large = averaged("p1", 0), averaged("p2", 2, average_id=b"a"), averaged("p3", 2, average_id=b"b")
    wanted = sum_of_step(mine, view_of(mine, small, large), 3)
    assert wanted is not None
    assert (wanted.id, [source.peer for source in wanted.sources]) == (sum_id(FIRST, AverageId(b"a")), ["p2"])


def test_what_was_applied_is_a_fact_a_mates_first_and_then_the_other_stages() -> None:
    mine, other = averaged("p1", 0), averaged("p2", 2)
    mate, stranger = finished("p3", 0, AverageId(b"x")), finished("p4", 2, AverageId(b"y"))
    for others, expected in (((other, stranger, mate), b"x"), ((other, stranger), b"y"), ((other,), SUM)):
        wanted = sum_of_step(mine, view_of(mine, *others), 3)
        assert wanted is not None
        assert wanted.id == expected


def test_a_mate_who_holds_the_sum_gives_it_too_and_a_joiner_gives_nothing() -> None:
    mine, mate = averaged("p1", 0), averaged("p3", 0, tied_sum=SUM)
    joiner = finished("p5", 2, SUM, phase=Phase.JOINING)
    wanted = sum_of_step(mine, view_of(mine, mate, averaged("p2", 2), joiner), 3)
    assert wanted is not None
    assert set(wanted.sources) == {TiedSource(PeerId("p3"), SUM), TiedSource(PeerId("p2"), LAST)}


def test_where_the_other_stage_has_forgotten_what_it_applied_a_sum_that_we_hold_is_taken() -> None:
    mine, ahead = averaged("p1", 0), finished("p2", 2, None)
    assert sum_of_step(mine, view_of(mine, ahead), 3) is None
    mate = averaged("p3", 0, tied_sum=SUM)
    wanted = sum_of_step(mine, view_of(mine, mate, ahead), 3)
    assert wanted is not None
    assert wanted.sources == (TiedSource(PeerId("p3"), SUM),)


def test_peers_of_a_large_stage_do_not_all_ask_the_same_one() -> None:
    others = [averaged(f"q{n}", 2) for n in range(4)]
    asked = {peer_asked(decided(averaged(f"p{n}", 0), *others)) for n in range(20)}
    assert len(asked) > 2


# The step rules


def test_the_sum_is_fetched_as_soon_as_both_ends_have_averaged_and_then_the_step_is_finished() -> None:
    mine, other = averaged("p1", 0), averaged("p2", 2)
    assert decided(mine, other, member("m", stage=1)) == FetchTied(FETCHING, other.peer, 0, wanted=SUM, given=LAST)
    held = replace(mine, tied_sum=SUM)
    assert isinstance(decided(held, other, member("m", stage=1)), Wait)
    assert decided(held, other, MIDDLE) == Commit("every stage has averaged", tied_sum=SUM)


def test_a_stage_in_between_waits_for_no_sum() -> None:
    assert decided(MIDDLE, averaged("p1", 0), averaged("p2", 2)) == Commit("every stage has averaged", tied_sum=None)


def test_a_sum_of_another_average_than_is_wanted_now_is_not_applied() -> None:
    mine = averaged("p1", 0, tied_sum=SUM)
    other = averaged("p2", 2, average_id=b"a")
    wanted = sum_id(FIRST, other.average_id)
    assert decided(mine, other, MIDDLE) == FetchTied(FETCHING, other.peer, 0, wanted=wanted, given=other.average_id)


def test_who_does_not_give_it_is_not_asked_at_once_again() -> None:
    mine, others = averaged("p1", 0), [averaged("p2", 2), averaged("p3", 2), MIDDLE]
    first = peer_asked(decided(mine, *others))
    second = peer_asked(decided(mine, *others, unanswered=frozenset({(first, 0)})))
    assert {first, second} == {"p2", "p3"}
    waiting = decided(mine, *others, refused=frozenset({("p2", 0), ("p3", 0)}))
    assert waiting == Wait("the tied weight's gradients are not summed over both stages yet")


def test_who_is_left_behind_finishes_with_what_the_others_applied() -> None:
    mine = averaged("p1", 0)
    applied = AverageId(b"x")
    assert decided(mine, finished("p3", 0, applied)) == FetchTied(FETCHING, PeerId("p3"), 0, wanted=applied, given=applied)
    assert isinstance(decided(replace(mine, tied_sum=applied), finished("p3", 0, applied)), Commit)
    assert isinstance(decided(mine, finished("p3", 0, applied), refused=frozenset({("p3", 0)})), Reload)
    assert isinstance(decided(mine, finished("p3", 0, None)), Reload)


def test_a_step_whose_sum_nobody_knows_any_more_is_given_up() -> None:
    mine, ahead = averaged("p1", 0), (finished("p2", 2, None), member("m", stage=1, step=1))
    now = Situation(OwnState(record=mine), view_of(mine, *ahead), 0.0, RULES)
    assert looks_lost(now)
    assert isinstance(decided(mine, *ahead, lost_since_s=100 - 40.0), SkipStep)
    assert not looks_lost(replace(now, own=OwnState(record=replace(mine, tied_sum=SUM))))


# Copies that differ


def test_the_copy_with_the_worse_history_is_replaced_and_only_at_the_same_step() -> None:
    better, worse = Lineage(0, b"z"), Lineage(1, b"a")
    mine, other = member("p1", tied=worse), member("p2", stage=2, tied=better)
    assert decided(mine, other) == CopyTied("the other stage's copy of the tied weight has the better history", other.peer, stage=2)
    assert not isinstance(decided(mine, other, refused=frozenset({("p2", 0)})), CopyTied)
    assert not isinstance(decided(other, mine), CopyTied)
    assert better_copy(mine, view_of(mine, replace(other, step=1)), 3) is None
    assert better_copy(replace(mine, tied=better), view_of(mine, other), 3) is None


@given(st.lists(st.builds(Lineage, st.integers(0, 1), st.sampled_from([b"a", b"b", b"c"])), min_size=4, max_size=4))
def test_unlike_copies_become_one_however_they_are_spread(copies: list[Lineage]) -> None:
    """Two peers of each end at one step, each doing in turn what the rules say: replace its copy, or reload from a mate."""
    peers = {f"p{n}": member(f"p{n}", stage=0 if n < 2 else 2, tied=copy, lineage=Lineage(0, copy.chain)) for n, copy in enumerate(copies)}
    for _ in range(8):
        for name, mine in peers.items():
            found = decided(mine, *(other for other in peers.values() if other.peer != name))
            match found:
                case CopyTied(peer=donor):
                    copied = peers[donor].tied
                    peers[name] = replace(mine, tied=copied, lineage=lineage_replaced(mine.lineage, copied))
                case Reload(peer=donor):
                    peers[name] = replace(mine, tied=peers[donor].tied, lineage=peers[donor].lineage)
    assert len({peer.tied for peer in peers.values()}) == 1
    assert len({peer.lineage for peer in peers.values() if peer.stage == 0}) == 1


@given(ids, ids, st.none() | st.floats(0, 100), st.none() | st.floats(0, 100))
def test_histories_tell_unlike_sums_and_norms_apart(one: AverageId, other: AverageId, norm: float | None, other_norm: float | None) -> None:
    same = (one, norm and norm.hex()) == (other, other_norm and other_norm.hex())
    assert (history_after(Lineage(), one, norm) == history_after(Lineage(), other, other_norm)) == same
    with_sum, without = lineage_after(Lineage(), FIRST, norm, one), lineage_after(Lineage(), FIRST, norm)
    assert with_sum != without
    assert history_after(Lineage(), one, norm) < lineage_skipped(Lineage(), 0), "a step that was given up makes a worse copy"


def test_a_run_that_ties_nothing_goes_by_lineage_alone() -> None:
    small, large = member("p1", lineage=Lineage(0, b"a")), member("p2", lineage=Lineage(0, b"b"))
    assert small.worth < large.worth
    assert small.tied_sum == NO_AVERAGE


def test_a_joiner_that_loaded_a_step_whose_sum_died_takes_the_state_of_a_mate_that_is_with_the_other_end() -> None:
    joiner = replace(member("a", stage=0, step=1), phase=Phase.JOINING)
    mate, middle, end = member("b", stage=0), member("c", stage=1), member("d", stage=2)
    act = decided(joiner, mate, middle, end)
    assert isinstance(act, Reload)
    assert act.peer == mate.peer
    assert isinstance(decided(joiner, mate, middle, replace(end, step=1)), Serve), "the other end needs that step no more"


def test_where_the_run_certifies_one_peer_alone_decides_no_sum_and_no_copy() -> None:
    """A liar ahead of all tells a sum of its own; one at the other end tells an average of its own, and a better history."""
    mine = replace(averaged("mine", 0), average_id=AverageId(b"mine"))
    honest = [replace(averaged(f"h{n}", 2), average_id=AverageId(b"true"), tied=Lineage(0, b"x")) for n in range(2)]
    liars = [replace(averaged("liar", 2), average_id=AverageId(b"false"), tied=Lineage(0, b""))]
    ahead = member("ahead", stage=2, step=mine.step + 1, tied_sums=(TiedSum(mine.step, AverageId(b"odd")),), lineage=Lineage(0, b""))
    right = sum_id(AverageId(b"mine"), AverageId(b"true"))
    wanted = sum_by_most(mine, view_of(mine, *honest, *liars, ahead), 3)
    assert wanted is not None
    assert wanted.id == right
    assert {source.peer for source in wanted.sources} == {"h0", "h1"}
    assert witnesses(wanted, wanted.sources[0], view_of(mine, *honest, *liars), certifies=True) == ((wanted.sources[1].peer,), 2)
    assert witnesses(wanted, wanted.sources[0], view_of(mine, *honest[:1], *liars), certifies=True)[1] == 1, "of two nobody can say"
    assert sum_by_most(mine, view_of(mine, honest[0], *liars), 3) is None, "not most of that stage"
    assert better_copy(replace(mine, tied=Lineage(0, b"x")), view_of(mine, *honest, *liars), 3, certifies=True) is None
