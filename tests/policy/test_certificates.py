"""Rule 18 (certify): which averages count, and what a peer believes of one that a mate gives it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.step import acts
from peerd.policy.step.certificates import (
    Distrust,
    SignedSlice,
    apart_from_most,
    average_id_of,
    can_count,
    is_confirmed,
    is_upheld,
    needs_confirming,
    told_twice,
    voters,
    why_distrust,
    why_distrust_section,
    why_unproven,
    words_on,
)
from peerd.policy.step.certifying import ahead_alone, holding_alone, telling_early
from peerd.policy.step.roster import Roster, RosterEntry, lineage_after
from peerd.policy.step.situation import OwnState, Situation, StepRules
from peerd.policy.step.stepping import decide
from peerd.table.record import NO_AVERAGE, AverageId, Lineage, PeerId, PeerRecord, Phase, Void
from peerd.table.view import LiveView

NUM_MICROBATCHES = 4
RULES = StepRules(num_stages=1, num_microbatches=NUM_MICROBATCHES, ttl_s=3.0, averaging_s=1.5, certifies=True)
ME, ONE, OTHER = AverageId(b"mine"), AverageId(b"a"), AverageId(b"z")


def peer(name: str, average_id: AverageId = NO_AVERAGE, step: int = 3, **fields: object) -> PeerRecord:
    phase = Phase.AVERAGED if average_id else Phase.ACCUMULATING
    record = PeerRecord(peer=PeerId(name), step=step, phase=phase, average_id=average_id, done=1)
    return replace(record, **fields)  # type: ignore[arg-type]


def view(*records: PeerRecord) -> LiveView:
    return LiveView(me=records[0].peer, records=tuple(sorted(records, key=lambda r: r.peer)))


def situation(mine: PeerRecord, *mates: PeerRecord, rules: StepRules = RULES, **own: object) -> Situation:
    return Situation(OwnState(record=mine, **own), view(mine, *mates), 100.0, rules)  # type: ignore[arg-type]


def applied(average_id: AverageId) -> Lineage:
    return lineage_after(Lineage(), average_id)


def roster(*names: str, step: int = 3) -> Roster:
    return Roster(0, step, 0, PeerId(names[0]), tuple(RosterEntry(PeerId(name), 0, 0, 1) for name in names))


def slices(**roots: bytes) -> tuple[SignedSlice, ...]:
    return tuple(SignedSlice(PeerId(name), root, b"signed") for name, root in roots.items())


# What an average is


def test_the_id_of_an_average_covers_the_numbers_of_each_slice() -> None:
    made = roster("a", "b")
    ids = {average_id_of(made, slices(a=b"1", b=other)) for other in (b"2", b"3")}
    assert len(ids) == 2
    assert average_id_of(made, ()) == made.average_id


def test_two_slices_of_one_reducer_prove_that_it_lies_and_nobody_else_is_named() -> None:
    one, other = slices(a=b"1", b=b"2"), slices(a=b"1", b=b"3")
    pair = told_twice(one, other)
    assert pair is not None
    assert {each.reducer for each in pair} == {"b"}
    assert told_twice(one, one) is None
    assert told_twice(one, slices(c=b"4")) is None


# When it counts


def test_an_average_counts_once_more_than_half_of_the_voters_hold_it() -> None:
    mine, alike, lacking = peer("a", ME), peer("b", ME), peer("c")
    assert words_on(mine, view(mine, alike, lacking)).certify(ME)
    assert not words_on(mine, view(mine, peer("b"), lacking)).certify(ME)
    assert not words_on(mine, view(mine, alike, lacking, peer("d"))).certify(ME)


def test_a_mate_that_has_gone_on_with_it_holds_it_as_well() -> None:
    mine, lacking = peer("a", ME), peer("c")
    assert words_on(mine, view(mine, lacking, peer("b", step=4, lineage=applied(ME)))).certify(ME)
    assert not words_on(mine, view(mine, lacking, peer("b", step=4, lineage=applied(ONE)))).certify(ME)


def test_a_newcomer_that_holds_nothing_has_no_word_and_still_makes_a_stage_of_three() -> None:
    mine, liar, newcomer = peer("a"), peer("b", ONE), peer("c", done=0)
    assert newcomer not in voters(mine, view(mine, liar, newcomer))
    assert not words_on(mine, view(mine, liar, newcomer)).certify(ONE)


def test_of_two_one_is_believed_unless_the_other_holds_another_average() -> None:
    mine = peer("a", ME)
    assert words_on(mine, view(mine, peer("b"))).certify(ME)
    assert not words_on(mine, view(mine, peer("b", ONE))).certify(ME)
    assert words_on(mine, view(mine, peer("b", ONE))).certify(ME, is_late=True)


def test_a_stage_of_which_only_two_are_heard_is_no_stage_of_two() -> None:
    """A liar would be believed by whoever hears nobody else for a moment."""
    mine, liar = peer("a"), peer("b", ONE)
    silent = replace(view(mine, liar), expired=(peer("c"),))
    suspected = replace(view(mine, liar), suspected=(peer("c"),))
    assert words_on(mine, view(mine, liar)).certify(ONE)
    assert not words_on(mine, silent).certify(ONE)
    assert not words_on(mine, suspected).certify(ONE)
    holder = replace(mine, phase=Phase.AVERAGED, average_id=ME)
    waits = replace(view(holder, peer("b")), expired=(peer("c"),))
    assert not words_on(holder, waits).certify(ME)
    assert words_on(holder, waits).certify(ME, is_late=True)


@pytest.mark.parametrize("how", ["voids", "sidelined"])
def test_hole_59_those_that_a_minority_left_out_still_count_where_an_average_is_to_be_believed(how: str) -> None:
    """Two of five leave two others out, and are more than half of those that are left."""
    names = (PeerId("c"), PeerId("d"))
    sidelined, voids = (names, ()) if how == "sidelined" else ((), tuple(Void(name, 0, 3) for name in names))
    liars, out = [peer(name, ONE, sidelined=sidelined, voids=voids) for name in "ab"], [peer(name) for name in names]
    mine = peer("me", sidelined=sidelined)  # where an honest one says so, too
    live = view(mine, *liars, *out)
    assert {m.peer for m in live.members(0, 3)} == {"a", "b", "me"}
    assert not words_on(mine, live).certify(ONE)
    elsewhere = replace(live, me=PeerId("z"), records=(*live.records, peer("z", stage=1)))
    assert why_unproven(elsewhere, 0, 3) != ""
    holder = peer("me", ONE, sidelined=sidelined)
    assert words_on(holder, view(holder, *liars, *out)).certify(ONE), "half of all hold it, one that is honest among them"


def test_an_average_with_a_refuted_slice_stands_where_most_of_its_members_hold_this_copy() -> None:
    mine, alike, unlike = peer("a", ME), peer("b", ME), peer("c", ONE)
    made = roster("a", "b", "liar")
    assert is_upheld(ME, made, mine, view(mine, alike, unlike))
    assert not is_upheld(ME, roster("a", "c", "liar"), mine, view(mine, unlike))


def test_the_average_of_another_stage_counts_once_more_than_half_of_it_have_the_same() -> None:
    mine = peer("a", ME)
    others = [peer(name, average_id, stage=1) for name, average_id in (("b", ONE), ("c", ONE), ("d", OTHER))]
    assert why_unproven(view(mine, *others), 1, 3) == ""
    assert why_unproven(view(mine, others[0], peer("c", stage=1), others[2]), 1, 3) != ""
    assert why_unproven(view(mine, others[2], peer("c", stage=1), peer("b", step=4, stage=1)), 1, 3) == ""


# What a peer does


def test_a_peer_commits_only_what_counts() -> None:
    mine = peer("a", ME)
    assert isinstance(decide(situation(mine, peer("b", ME), peer("c", ME))), acts.Commit)
    lonely = decide(situation(mine, peer("b", ONE), peer("c", ONE)))
    assert isinstance(lonely, acts.FetchAverage)  # that of the others
    assert not isinstance(decide(situation(mine, peer("b", ONE), peer("c", OTHER), joined=frozenset({ME}))), acts.Commit)


def test_hole_53_an_average_that_does_not_count_is_asked_for_and_not_again_and_again() -> None:
    mine, mate, holder = peer("a", done=2), peer("b", done=4), peer("c", ONE)
    assert decide(situation(mine, mate, holder)) == acts.FetchAverage("a stage mate has the average", holder.peer, 3)
    told = frozenset({(holder.peer, ONE)})
    assert not isinstance(decide(situation(mine, mate, holder, unbelieved=told)), acts.FetchAverage)
    assert isinstance(decide(situation(mine, peer("b", ONE), holder, unbelieved=told)), acts.FetchAverage)  # it counts by now
    accusers = (replace(each, sidelined=(holder.peer,)) for each in (mine, mate))
    assert not isinstance(decide(situation(*accusers, holder)), acts.FetchAverage)


def test_hole_53_of_mates_that_are_ahead_those_that_are_left_out_are_asked_only_where_half_of_the_stage_is_ahead() -> None:
    mine, mate, one, other = peer("a"), peer("b"), peer("c", step=4), peer("d", step=4)
    accusers = [replace(each, sidelined=(one.peer,)) for each in (mine, mate)]
    assert isinstance(decide(situation(mine, mate, one)), acts.FetchAverage)
    assert not isinstance(decide(situation(*accusers, one)), acts.FetchAverage)
    assert isinstance(decide(situation(*accusers, one, other)), acts.FetchAverage)


def test_hole_53_who_holds_an_average_alone_is_counted_while_nobody_is_in_a_round() -> None:
    mine, mate, holder = peer("a"), peer("b"), peer("c", ONE)
    assert holding_alone(situation(mine, mate, holder)) == [holder.peer]
    assert holding_alone(situation(mine, replace(mate, phase=Phase.AVERAGING), holder)) == []
    assert holding_alone(situation(replace(mine, phase=Phase.AVERAGING), mate, holder)) == []
    assert holding_alone(situation(mine, peer("b", ONE), holder)) == []
    assert holding_alone(situation(mine, mate, holder, rules=replace(RULES, certifies=False))) == []


def test_hole_56_an_average_may_come_to_count_if_most_voters_hold_it_or_were_in_its_round_and_do_not_leave_its_holder_out() -> None:
    mine, mate, other, holder = peer("a"), peer("b"), peer("c"), peer("d", ONE)

    def may(in_round: tuple[str, ...], *voting: PeerRecord) -> bool:
        return can_count(ONE, roster(*in_round), holder.peer, mine, voting)

    assert not may(("d",), mine, mate, holder)
    assert may(("b", "d"), mine, mate, holder)
    assert not may(("a", "d"), mine, mate, holder), "this peer was in no such round"
    assert not may(("b", "d"), mine, mate, other, holder), "half of four are too few"
    assert may(("b", "c", "d"), mine, mate, other, holder)
    assert not may(("b", "c", "d"), mine, mate, replace(other, sidelined=(holder.peer,)), holder)
    assert may(("d",), mine, peer("b", ONE), holder)


def test_hole_55_who_tells_an_average_that_nobody_else_tells_is_early_and_who_tells_that_of_a_member_is_not() -> None:
    mine, mate, liar = peer("a"), peer("b"), peer("c", ONE)
    assert telling_early(situation(mine, mate, liar)) == {liar.peer}
    assert telling_early(situation(mine, peer("b", OTHER), liar)) == {mate.peer, liar.peer}
    for told in ((mine, peer("b", ONE)), (peer("a", ONE), mate)):
        assert telling_early(situation(*told, liar)) == set()
    left_out = [replace(each, sidelined=(PeerId("c"), PeerId("d"))) for each in (mine, mate, peer("e"))]
    assert telling_early(situation(*left_out, liar, peer("d", ONE))) == {PeerId("c"), PeerId("d")}, "one liar backs no other one"
    now = situation(mine, mate)
    assert telling_early(replace(now, live=replace(now.live, suspected=(liar,)))) == {liar.peer}


def test_without_certificates_all_is_as_before() -> None:
    off = replace(RULES, certifies=False)
    assert isinstance(decide(situation(peer("a", ONE), peer("b", ME), peer("c", OTHER), rules=off)), acts.Commit)


def test_a_peer_whose_average_is_refuted_gives_it_up_and_keeps_its_ledger() -> None:
    act = decide(situation(peer("a", ME), peer("b", ONE), refuted=roster("a", "b", "liar")))
    assert isinstance(act, acts.GiveUpAverage)
    upheld = situation(peer("a", ME), peer("b", ME), refuted=roster("a", "b", "liar"))
    assert isinstance(decide(upheld), acts.Commit)


def test_a_peer_whose_stage_has_finished_the_step_with_another_average_gives_its_own_up() -> None:
    ahead = [peer(name, step=4, lineage=applied(ONE)) for name in ("b", "c")]
    assert isinstance(decide(situation(peer("a", ME), *ahead)), acts.GiveUpAverage)


def test_one_mate_that_is_ahead_of_three_costs_nobody_its_ledger() -> None:
    """In a run of one stage there is no other witness (`are_ahead`)."""
    two_stages = replace(RULES, num_stages=2)
    liar, mate, other_stage = peer("b", step=5), peer("c"), peer("d", stage=1)
    assert not isinstance(decide(situation(peer("a"), liar, mate, other_stage, rules=two_stages)), acts.Reload)
    assert isinstance(decide(situation(peer("a"), liar, mate, replace(other_stage, step=4), rules=two_stages)), acts.Reload)


def test_the_better_lineage_is_that_of_most_and_not_the_smallest() -> None:
    lineage = Lineage(0, b"m")
    mine, mate, liar = peer("a", lineage=lineage), peer("b", lineage=lineage), peer("c", lineage=Lineage(0, b"a"))
    assert not isinstance(decide(situation(mine, mate, liar)), acts.Reload)
    act = decide(situation(liar, mine, mate))
    assert isinstance(act, acts.Reload)


# What a peer believes


@pytest.mark.parametrize(
    ("is_signed", "is_counted", "joined", "refuted", "is_lie"),
    [
        (False, True, True, False, True),
        (True, True, False, False, True),
        (True, True, True, False, None),
        (True, False, True, False, None),
        (True, False, True, True, False),
        (True, False, False, False, True),
    ],
)
def test_what_a_peer_takes_from_a_mate(is_signed: bool, is_counted: bool, joined: bool, refuted: bool, is_lie: bool | None) -> None:
    made, mine = roster("a", "b", "c"), peer("a")
    ids = frozenset({made.average_id})
    found = why_distrust(made, is_signed, mine, is_counted, ids if joined else frozenset(), ids if refuted else frozenset())
    assert (None if found is None else found.is_lie) == is_lie


def test_a_round_of_an_older_ledger_is_not_believed_and_nobody_is_blamed() -> None:
    found = why_distrust(roster("a", "b", "c"), True, peer("a", ledger_no=7), False, frozenset(), frozenset())
    assert isinstance(found, Distrust)
    assert not found.is_lie


# Groups


def test_what_comes_of_a_group_or_of_a_section_is_confirmed_and_what_comes_of_a_stage_shows_in_records() -> None:
    whole = replace(roster("a", "b"), entries=(RosterEntry(PeerId("a"), 0, 0, 0b0011), RosterEntry(PeerId("b"), 0, 0, 0b1100)))
    assert not needs_confirming(whole, NUM_MICROBATCHES)
    assert needs_confirming(replace(whole, num_sections=2), NUM_MICROBATCHES)
    assert needs_confirming(roster("a"), NUM_MICROBATCHES)


@given(st.lists(st.sampled_from([ONE, OTHER, None]), min_size=1, max_size=9))
def test_a_round_is_confirmed_by_more_than_half_of_its_members_and_by_nobody_else(words: list[AverageId | None]) -> None:
    names = [f"p{number}" for number in range(len(words) + 1)]
    told = {PeerId(name): word for name, word in zip(names, [ONE, *words], strict=True) if word is not None}
    told |= {PeerId("stranger"): ONE, PeerId("another"): ONE}
    agreeing, silent = 1 + words.count(ONE), words.count(None)
    found = is_confirmed(ONE, told, roster(*names))
    assert found is (True if 2 * agreeing > len(names) else None if 2 * (agreeing + silent) > len(names) else False)


def test_a_section_is_taken_with_most_of_its_makers_signatures_and_the_sum_of_this_peers_group_signed_by_a_member_of_it() -> None:
    entries = tuple(RosterEntry(PeerId(name), 0, 0, done) for name, done in (("a", 0b0011), ("b", 0b0100), ("c", 0b1000)))
    made = replace(roster("a", "b", "c"), entries=entries, num_sections=2)
    mine, group = peer("x", done=0b0011, group=ONE), {PeerId("x"), PeerId("a")}

    def reason(taker: PeerRecord = mine, made: Roster = made, confirmed_by: str = "ab", is_certified: bool = True) -> Distrust | None:
        return why_distrust_section(made, is_certified, set(map(PeerId, confirmed_by)), taker, group, NUM_MICROBATCHES)

    assert reason() is None
    assert reason(peer("x", done=0b0100)) is None, "it holds no group's sum"
    for lie in (reason(is_certified=False), reason(made=replace(made, entries=entries[:2])), reason(made=replace(made, num_sections=1))):
        assert lie is not None
        assert lie.is_lie
    for doubt in (reason(confirmed_by="bc"), reason(peer("x", done=0b0111, group=ONE)), reason(peer("x", done=0b0100, group=ONE))):
        assert doubt is not None
        assert not doubt.is_lie


def test_hole_50_few_that_are_ahead_are_not_followed_unless_another_stage_has_seen_the_step_finished() -> None:
    mine, alike, ahead = peer("me"), peer("a"), peer("b", step=4)
    assert ahead_alone(situation(mine, alike, ahead)) == ["b"]
    assert ahead_alone(situation(mine, ahead)) == [], "of two nobody can say"
    assert ahead_alone(situation(mine, alike, ahead, peer("c", step=4))) == []
    assert ahead_alone(situation(replace(mine, phase=Phase.JOINING), alike, ahead)) == []
    assert ahead_alone(situation(mine, alike, ahead, rules=replace(RULES, certifies=False))) == []
    two = replace(RULES, num_stages=2)
    assert ahead_alone(situation(mine, alike, ahead, peer("d", step=4, stage=1), rules=two)) == []
    assert ahead_alone(situation(mine, alike, ahead, peer("d", step=3, stage=1), rules=two)) == ["b"]


def test_hole_50_a_joiner_goes_by_the_step_that_half_have_reached_and_by_the_lineage_that_most_have_there() -> None:
    astray = Lineage(0, b"astray")
    three = [peer("a"), peer("b"), peer("c")]
    assert apart_from_most([*three, peer("x", step=9)]) == {"x"}
    assert apart_from_most([*three, peer("x", step=9), peer("y", step=9)]) == {"x", "y"}
    assert apart_from_most([*three, *(peer(name, step=4) for name in "xyz")]) == frozenset(), "half of them have reached it"
    assert apart_from_most([*three, peer("x", lineage=astray)]) == {"x"}
    assert apart_from_most([peer("a"), peer("b", lineage=astray), peer("c", step=2)]) == frozenset(), "one of each lineage"
    assert apart_from_most([peer("a"), peer("x", step=9)]) == frozenset(), "of two nobody can say"
    mine = peer("me", step=0, phase=Phase.JOINING)
    act = decide(situation(mine, *three, peer("x", step=9), has_start=True))
    assert isinstance(act, acts.Reload | acts.FetchAverage)
    assert act.peer != "x"
