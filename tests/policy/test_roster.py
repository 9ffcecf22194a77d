"""Rosters: only exact ones are ever composed or joined, and an average's id names all of its content."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.hashing import peer_rank
from peerd.policy.step.roster import (
    MOST_CHUNKS,
    MOST_EXPECTED_S,
    WHOLE,
    Roster,
    RosterEntry,
    compose,
    cut_links,
    entry_of,
    leader_of,
    lineage_after,
    lineage_skipped,
    turns,
    unreached_mates,
    whom_to_void,
    why_inexact,
    why_never,
    why_not_adopt,
    why_refuse,
)
from peerd.table.record import AverageId, Lineage, PeerId, PeerRecord, Phase, Void
from peerd.table.view import LiveView
from tests.strategies import FULL, NUM_MICROBATCHES, ledgers, lineages, live_views, member, view_of

entries = st.builds(RosterEntry, st.sampled_from([PeerId("a"), PeerId("b"), PeerId("c")]), st.integers(0, 1), st.integers(0, 1), ledgers)
rosters = st.builds(
    Roster,
    st.integers(0, 1),
    st.integers(0, 2),
    st.integers(0, 2),
    st.sampled_from([PeerId("a"), PeerId("b")]),
    st.lists(entries, max_size=3).map(tuple),
    st.sampled_from([(), ("none",), ("int8", "none")]),
    st.sampled_from([(), (1,), (WHOLE, 0)]),
    st.integers(1, 2),
    st.sampled_from([0.0, 1.0]),
)


@st.composite
def partitions(draw: st.DrawFn) -> list[PeerRecord]:
    """Members of one stage that hold each microbatch exactly once between them."""
    owner = draw(st.lists(st.integers(0, 2), min_size=NUM_MICROBATCHES, max_size=NUM_MICROBATCHES))
    bits = [sum(1 << index for index, peer in enumerate(owner) if peer == number) for number in range(3)]
    return [member(f"p{number}", done=done, ledger_no=draw(st.integers(0, 3))) for number, done in enumerate(bits)]


def composed(members: list[PeerRecord], ranks: int = 1) -> list[Roster]:
    found = [compose(mine, view_of(mine, *(m for m in members if m is not mine)), NUM_MICROBATCHES, 0, ranks) for mine in members]
    return [roster for roster in found if roster is not None]


@given(live_views(), st.integers(0, 3))
def test_a_composed_roster_is_exact_whatever_the_view(live: LiveView, attempt: int) -> None:
    assert live.mine is not None
    roster = compose(live.mine, live, NUM_MICROBATCHES, attempt)
    if roster is not None:
        assert why_inexact(roster.entries, NUM_MICROBATCHES) is None
        assert sum(entry.done for entry in roster.entries) == FULL
        assert roster.leader == live.me
        assert {live.find(peer).lineage for peer in roster.peers} == {live.mine.lineage}  # type: ignore[union-attr]
        assert why_refuse(live.mine, roster, NUM_MICROBATCHES) is None


@given(st.lists(entries, max_size=4))
def test_a_roster_is_exact_when_and_only_when_each_microbatch_is_counted_once(found: list[RosterEntry]) -> None:
    counted = [index for entry in found for index in range(NUM_MICROBATCHES + 1) if entry.done >> index & 1]
    well_formed = bool(found) and [e.peer for e in found] == sorted({e.peer for e in found})
    assert (why_inexact(found, NUM_MICROBATCHES) is None) == (well_formed and sorted(counted) == list(range(NUM_MICROBATCHES)))


@given(partitions())
def test_of_members_who_see_the_same_exactly_one_proposes_and_all_join(members: list[PeerRecord]) -> None:
    (roster,) = composed(members)
    assert all(why_refuse(m, roster, NUM_MICROBATCHES) is None for m in members)


@given(partitions())
def test_hole_33_each_member_may_propose_when_its_turn_has_come_and_any_of_the_rosters_is_joined_by_all(members: list[PeerRecord]) -> None:
    order = turns(members)
    for ranks in range(1, len(members) + 1):
        found = composed(members, ranks)
        assert {roster.leader for roster in found} == set(order[:ranks])
        assert all(why_refuse(m, roster, NUM_MICROBATCHES) is None for m in members for roster in found)


@given(rosters, rosters)
def test_two_rosters_share_an_average_id_only_when_they_are_equal(one: Roster, other: Roster) -> None:
    assert (one.average_id == other.average_id) == (one == other)


@given(partitions(), st.sampled_from(["incarnation", "ledger_no", "done", "step", "stage"]))
def test_holes_1_and_2_a_member_whose_ledger_is_not_exactly_the_rosters_refuses(members: list[PeerRecord], changed: str) -> None:
    (roster,) = composed(members)
    for mine in members:
        value = getattr(mine, changed)
        assert why_refuse(replace(mine, **{changed: value ^ 1}), roster, NUM_MICROBATCHES) is not None
        assert why_never(replace(mine, **{changed: value ^ 1}), roster, NUM_MICROBATCHES) is not None


@given(partitions(), st.sampled_from(Phase))
def test_a_roster_that_fits_is_refused_for_good_in_no_phase(members: list[PeerRecord], phase: Phase) -> None:
    """A member that still closes the round before may join by the time its thread comes to that."""
    (roster,) = composed(members)
    for mine in members:
        assert why_never(replace(mine, phase=phase), roster, NUM_MICROBATCHES) is None
        assert (why_refuse(replace(mine, phase=phase), roster, NUM_MICROBATCHES) is None) == (phase is Phase.ACCUMULATING)


def test_hole_1_a_roster_of_those_left_is_not_exact_while_their_ledgers_do_not_cover_the_step() -> None:
    left = member("p1")
    assert compose(left, view_of(left), NUM_MICROBATCHES, 0) is None


def test_hole_7_ledgers_that_meet_make_no_roster() -> None:
    one, other = member("p1", done=FULL), member("p2", done=1)
    assert composed([one, other]) == []


def test_hole_20_peers_of_another_lineage_are_in_no_roster() -> None:
    """Two exact averages of step 0 both came into being; gradients of step 1 were computed with both."""
    one, other = member("p1", step=1, done=FULL - 1, lineage=Lineage(0, b"a")), member("p2", step=1, done=1, lineage=Lineage(0, b"b"))
    assert composed([one, other]) == []
    assert len(composed([one, replace(other, lineage=one.lineage)])) == 1


def test_hole_20_an_average_made_by_parameters_of_another_lineage_is_not_adopted() -> None:
    mine = member("p1", step=1, lineage=Lineage(0, b"a"))
    assert why_not_adopt(mine, 1, Lineage(0, b"a")) is None
    assert why_not_adopt(mine, 1, Lineage(0, b"b")) is not None
    assert why_not_adopt(mine, 0, Lineage(0, b"a")) == "this peer is at step 1"


def test_hole_19_of_two_that_cannot_reach_each_other_the_leader_leaves_out_one_after_two_rounds() -> None:
    names = [PeerId("a"), PeerId("b"), PeerId("c")]
    roster = Roster(0, 4, 0, names[0], tuple(RosterEntry(name, 1, 0, 0) for name in names))
    assert whom_to_void(roster, {}) is None
    assert whom_to_void(roster, {names[1]: 1, names[2]: 1}) is None
    void = whom_to_void(roster, {names[1]: 2, names[2]: 2})
    assert void in (Void(names[1], 1, 4), Void(names[2], 1, 4))
    assert whom_to_void(roster, {names[0]: 9}) is None
    assert whom_to_void(roster, {names[1]: 3, names[2]: 2}) == Void(names[1], 1, 4)


def test_a_member_that_averages_is_proposed_to_by_nobody() -> None:
    one, other = member("p1", done=FULL), member("p2", phase=Phase.AVERAGING)
    assert composed([one, other]) == []


def test_a_leaving_peer_knows_that_it_does_not_lead_though_its_step_state_does_not_say_so() -> None:
    published = [member("a", done=FULL), member("b")]
    leader, other = sorted(published, key=lambda r: peer_rank(r.peer, 0, 0))
    live = view_of(replace(leader, leaving=True), other)
    assert compose(leader, live, NUM_MICROBATCHES, 0) is None
    assert compose(other, replace(live, me=other.peer), NUM_MICROBATCHES, 0) is not None


def test_a_leaving_peer_gives_its_ledger_but_does_not_lead() -> None:
    leaving = [member(f"p{n}", done=1 << n, leaving=True) for n in range(5)]
    (roster,) = composed([*leaving, member("p9", done=FULL & ~0b11111)])
    assert roster.leader == "p9"
    assert len(roster.entries) == 6


@given(lineages, st.binary(max_size=3), st.binary(max_size=3))
def test_lineages_agree_when_and_only_when_the_same_averages_were_applied(lineage: Lineage, one: bytes, other: bytes) -> None:
    assert (lineage_after(lineage, AverageId(one)) == lineage_after(lineage, AverageId(other))) == (one == other)
    assert lineage_skipped(lineage, 3) > lineage_after(lineage, AverageId(one))


def test_an_entry_names_the_ledger_and_spells_it_out() -> None:
    assert entry_of(member("p", incarnation=2, ledger_no=3, done=5)) == RosterEntry(PeerId("p"), 2, 3, 5)


def test_hole_22_a_member_that_can_call_all_others_leads_and_dead_links_are_known() -> None:
    names = [PeerId(f"p{number}") for number in range(3)]
    ledgers = (0b1, 0b10, FULL & ~0b11)
    for cut in names[1:]:
        members = [member(name, done=done, unreached=(names[0],) if name == cut else ()) for name, done in zip(names, ledgers, strict=True)]
        leader = leader_of(members)
        assert leader != cut
        views = [(m, view_of(m, *[other for other in members if other is not m])) for m in members]
        (roster,) = filter(None, (compose(mine, view, NUM_MICROBATCHES, 0) for mine, view in views))
        assert roster.leader == leader
        assert roster.peers == tuple(names), "all of them reduce, whoever calls whom"
    one, other = member("p1", unreached=(PeerId("p2"),)), member("p2", unreached=(PeerId("p1"),))
    assert unreached_mates(view_of(one, other), 0) == {"p1": {"p2": None}, "p2": {"p1": None}}
    assert cut_links(view_of(one, other), 0) == (("p1", "p2"), ("p2", "p1"))
    assert cut_links(view_of(one, replace(other, unreached=())), 0) == (), "one end alone proves nothing"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_chunks": 0}, "number of chunks"),
        ({"num_chunks": MOST_CHUNKS + 1}, "number of chunks"),
        ({"expected_s": -1.0}, "time that it expects"),
        ({"expected_s": math.nan}, "time that it expects"),
        ({"expected_s": 2 * MOST_EXPECTED_S}, "time that it expects"),
        ({"shares": (WHOLE,)}, "shares"),
        ({"shares": (WHOLE, 1)}, "shares"),
        ({"shares": (WHOLE + 1, -1)}, "shares"),
        ({"codecs": ("none",)}, "one codec for each member"),
    ],
)
def test_what_a_leader_chooses_is_refused_for_ever_where_it_makes_no_round(changes: dict[str, Any], words: str) -> None:
    one, other = member("p1", done=1), member("p2", done=FULL & ~1)
    roster = Roster(0, 0, 0, one.peer, (entry_of(one), entry_of(other)))
    sound = replace(roster, shares=(WHOLE, 0), codecs=("none", "int8"), num_chunks=MOST_CHUNKS, expected_s=MOST_EXPECTED_S)
    assert why_never(one, roster, NUM_MICROBATCHES) is None
    assert why_never(one, sound, NUM_MICROBATCHES) is None
    assert words in (why_never(one, replace(roster, **changes), NUM_MICROBATCHES) or "")
