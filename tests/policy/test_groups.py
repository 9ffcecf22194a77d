"""Groups of a large stage: who averages with whom, and what a death costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peerd.policy.route.admission import able_to_compute
from peerd.policy.step.acts import DropSums, FetchSection
from peerd.policy.step.asides import sums_to_drop
from peerd.policy.step.groups import STEPS_TOGETHER, Levels, SectionMakers, alone_in_rounds, by_sum, groups_of, mates_to_tell, sections_held
from peerd.policy.step.ledger import at_next_step, full, holders, makers, may_accumulate, this_dropped, with_sum
from peerd.policy.step.roster import Credit, Roster, compose, turns, union_of, whole_of, why_inexact, why_never, why_refuse
from peerd.policy.step.sections import section_to_fetch
from peerd.policy.step.situation import OwnState, Situation, StepRules
from peerd.policy.step.stepping import decide
from peerd.policy.swarm.spreading import partners
from peerd.table.record import AverageId, PeerId, PeerRecord, Phase
from peerd.table.view import LiveView
from peerd.wire.rosters import roster_from, roster_to

SIZE = 4
NUM_MEMBERS = 12
NUM_MICROBATCHES = NUM_MEMBERS
RULES = StepRules(num_stages=1, num_microbatches=NUM_MICROBATCHES, ttl_s=3.0, averaging_s=1.5, group_size=SIZE)


def stage_of(num_members: int = NUM_MEMBERS) -> list[PeerRecord]:
    """Each holds one microbatch."""
    names = sorted(PeerId(f"p{number:03d}") for number in range(num_members))
    return [PeerRecord(peer=name, phase=Phase.ACCUMULATING, ledger_no=1, done=1 << number) for number, name in enumerate(names)]


def view_of(members: list[PeerRecord], me: str = "p000") -> LiveView:
    return LiveView(me=PeerId(me), records=tuple(members))


def proposed(members: list[PeerRecord], size: int = SIZE, num_sections: int = 1) -> list[Roster]:
    """What all members together propose at one moment."""
    live = view_of(members)
    found = (compose(m, live, NUM_MICROBATCHES, 0, group_size=size, num_sections=num_sections) for m in members)
    return [roster for roster in found if roster is not None]


def with_sums(members: list[PeerRecord], rosters: list[Roster]) -> list[PeerRecord]:
    """The table after these rounds of groups."""
    of = {peer: roster for roster in rosters for peer in roster.peers}
    return [with_sum(m, of[m.peer].average_id, union_of(of[m.peer].entries)) if m.peer in of else m for m in members]


def all_grouped() -> list[PeerRecord]:
    members = stage_of()
    return with_sums(members, proposed(members))


def test_a_stage_of_at_most_the_groups_size_averages_in_one_round_as_without_groups() -> None:
    members = stage_of()
    assert proposed(members, NUM_MEMBERS) == proposed(members, 0)
    assert len(proposed(members, NUM_MEMBERS)) == 1


def test_the_groups_of_a_larger_stage_propose_at_one_moment_disjoint_rosters_that_cover_it() -> None:
    members = stage_of()
    rosters = proposed(members)
    assert len(rosters) == len([group for group in groups_of(members, SIZE).values() if len(group) > 1]) > 1
    peers = [peer for roster in rosters for peer in roster.peers]
    assert len(peers) == len(set(peers))
    for roster in rosters:
        joining = [m for m in members if m.peer in roster.peers]
        assert all(why_refuse(m, roster, NUM_MICROBATCHES, in_groups=True) is None for m in joining)
        assert all(why_refuse(m, roster, NUM_MICROBATCHES) == "the ledgers do not cover the step" for m in joining)


def test_one_holder_of_each_sum_makes_the_average_once_all_groups_have_theirs() -> None:
    members = all_grouped()
    (roster,) = proposed(members)
    assert why_inexact(roster.entries, NUM_MICROBATCHES) is None
    assert len(roster.entries) == len(by_sum(members)) < NUM_MEMBERS
    assert all(why_refuse(m, roster, NUM_MICROBATCHES, in_groups=True) is None for m in members if m.peer in roster.peers)


def test_the_average_tells_who_has_computed_what_and_what_members_that_died_since_have_computed_is_nobodys() -> None:
    members = all_grouped()
    (roster,) = proposed(members)
    assert roster.computed == {m.peer: m.done for m in stage_of()}
    assert all(why_refuse(m, roster, NUM_MICROBATCHES, in_groups=True) is None for m in members if m.peer in roster.peers)
    twins = {m.peer for holders in by_sum(members) if len(holders) > 1 for m in holders}
    dead = next(peer for peer in roster.peers if peer in twins)
    (again,) = proposed([m for m in members if m.peer != dead])
    assert again.computed == {m.peer: m.done for m in stage_of() if m.peer != dead}


def test_a_member_refuses_a_roster_that_credits_somebody_with_the_work_of_another_one_or_itself_with_more_than_it_has_done() -> None:
    members = all_grouped()
    (roster,) = proposed(members)
    mine = next(m for m in members if m.peer in roster.peers and m.group)
    first, second, *rest = roster.credits
    for forged, words in (
        ((second, first, *rest), "not sorted"),
        ((first, replace(second, done=second.done | first.done), *rest), "another one's"),
        ((first, replace(second, done=1 << NUM_MICROBATCHES), *rest), "another one's"),
        ((Credit(mine.peer, mine.done),), "more than it has computed"),
    ):
        assert words in (why_refuse(mine, replace(roster, credits=forged), NUM_MICROBATCHES, in_groups=True) or "")


def test_of_two_that_say_that_they_have_computed_the_same_one_is_credited() -> None:
    members = all_grouped()
    mine = next(m for m in members if m.group)
    claimed = [replace(m, own_done=m.done) if m.peer == mine.peer else m for m in members]
    (roster,) = proposed(claimed)
    assert sum(credit.done.bit_count() for credit in roster.credits) <= NUM_MICROBATCHES
    assert all(why_refuse(m, roster, NUM_MICROBATCHES, in_groups=True) is None for m in claimed if m.peer in roster.peers)


def test_where_a_group_is_still_in_its_round_nobody_proposes_the_average() -> None:
    members = stage_of()
    first, *others = proposed(members)
    table = [replace(m, phase=Phase.AVERAGING) if m.peer in first.peers else m for m in with_sums(members, others)]
    assert proposed(table) == []


def test_one_that_comes_or_goes_changes_the_group_of_no_other() -> None:
    members = stage_of(100)
    before = groups_of(members, 32)
    after = groups_of(members[1:], 32)
    assert {number: [m for m in group if m is not members[0]] for number, group in before.items()} == after
    assert set(before) == set(range(4))


def test_a_death_in_a_round_makes_its_own_group_average_again_and_no_other() -> None:
    members = stage_of()
    rosters = proposed(members)
    hit, *others = sorted(rosters, key=lambda roster: -len(roster.peers))
    dead = hit.peers[0]
    lost = next(m.done for m in members if m.peer == dead)
    left = [m for m in with_sums(members, others) if m.peer != dead]
    assert proposed(left) == []  # what it held is missing
    free = able_to_compute(view_of(left), 0, 0)
    assert not any(m.group for m in free)
    taker = next(m for m in free if m.peer in hit.peers).peer
    again = [replace(m, done=m.done | lost) if m.peer == taker else m for m in left]
    rounds = proposed(again)
    assert rounds
    is_average = len(rounds) == 1 and union_of(rounds[0].entries) == full(NUM_MICROBATCHES)
    if not is_average:  # else so few are left that they go into it themselves
        assert {peer for roster in rounds for peer in roster.peers} <= set(hit.peers)


def test_a_death_after_all_sums_stand_costs_nothing() -> None:
    members = all_grouped()
    (roster,) = proposed(members)
    twins = {m.peer for holders in by_sum(members) if len(holders) > 1 for m in holders}
    dead = next(peer for peer in roster.peers if peer in twins)
    (again,) = proposed([m for m in members if m.peer != dead])
    assert dead not in again.peers
    assert why_inexact(again.entries, NUM_MICROBATCHES) is None


def test_holders_of_one_sum_do_not_overlap_and_those_of_unlike_sums_do() -> None:
    one, other, *_ = [m for m in all_grouped() if m.group][:3]
    twin = with_sum(other, one.group, one.done)
    assert sums_to_drop(one, twin) == sums_to_drop(twin, one) == []
    unlike = replace(twin, group=AverageId(b"another round 16"))
    assert sums_to_drop(one, unlike) != sums_to_drop(unlike, one)
    liar = replace(twin, done=full(NUM_MICROBATCHES))
    assert sums_to_drop(one, liar) == [one.peer]


def test_nothing_is_added_to_the_sum_of_a_group_and_calls_of_before_do_not_count() -> None:
    mine = stage_of()[0]
    held = with_sum(mine, AverageId(b"a group's round."), 0b111)
    live = view_of([held])
    assert may_accumulate(held, live, step=0, index=5, accept_mark=(held.incarnation, held.ledger_no)) == "ledger is frozen"
    begun = at_next_step(held)
    assert (begun.group, begun.done, begun.own_done) == (b"", 0, 0)
    free = this_dropped(held)
    assert free.ledger_no > held.ledger_no > mine.ledger_no
    assert may_accumulate(free, view_of([free]), step=0, index=5, accept_mark=(mine.incarnation, mine.ledger_no)) is not None


def test_of_those_that_hold_a_groups_sum_the_one_that_has_computed_a_microbatch_is_asked_for_its_gradient() -> None:
    members = all_grouped()
    for number, member in enumerate(members):
        assert makers(members, 0, number) == {member.peer} <= holders(members, 0, number)
    assert makers(members, 1, 0) == frozenset()


def test_a_member_that_holds_a_sum_joins_no_further_group() -> None:
    members = all_grouped()
    mine = next(m for m in members if m.group)
    other = next(m for m in members if not m.done & mine.done)
    (entry,) = [entry for entry in proposed(members)[0].entries if entry.done == other.done]
    own = replace(entry, peer=mine.peer, incarnation=mine.incarnation, ledger_no=mine.ledger_no, done=mine.done)
    roster = Roster(0, 0, 0, mine.peer, tuple(sorted((own, entry))))
    if union_of(roster.entries) != full(NUM_MICROBATCHES):
        assert why_never(mine, roster, NUM_MICROBATCHES, in_groups=True) == "the ledgers do not cover the step"


def test_where_a_whole_group_dies_one_holder_of_another_sum_gives_its_copy_up_and_takes_what_is_missing() -> None:
    members = all_grouped()
    gone = max(by_sum(members), key=len)[0].group
    left = [m for m in members if m.group != gone]
    acts = {m.peer: decide(Situation(OwnState(record=m), view_of(left, m.peer), 0.0, RULES)) for m in left if m.group}
    dropping = [peer for peer, act in acts.items() if isinstance(act, DropSums)]
    assert len(dropping) == (1 if all(m.group for m in left) else 0)


@pytest.mark.parametrize("busy", [1, 2])
def test_a_member_alone_in_a_round_is_told_from_a_group_in_its_own(busy: int) -> None:
    members = stage_of()
    group = max(groups_of(members, SIZE).values(), key=len)
    names = [m.peer for m in (group[:1] if busy == 1 else group)]
    table = [replace(m, phase=Phase.AVERAGING) if m.peer in names else m for m in members]
    assert alone_in_rounds(table, SIZE) == (frozenset(names) if busy == 1 else frozenset())


def test_of_two_thousand_members_all_groups_have_about_the_same_size_and_the_leaders_are_of_all() -> None:
    members = stage_of(2000)
    groups = groups_of(members, 32)
    assert len(groups) == 64
    assert max(len(group) for group in groups.values()) < 2 * 32
    assert len({turns(group)[0] for group in groups.values()}) == 64
    assert all(len(Levels(members, 32).round_mates(group[0])) == len(group) for group in list(groups.values())[:3])


def rounds_of(members: list[PeerRecord], size: int) -> tuple[list[PeerRecord], list[Roster]]:
    """Let all groups make their sums, and holders of these all sections. Returns the table after that, and the rounds."""
    number, live = len(members), view_of(members)
    leaders = [next(m for m in group if m.peer == turns(group)[0]) for group in groups_of(members, size).values()]
    rosters = [roster for m in leaders if (roster := compose(m, live, number, 0, group_size=size)) is not None]
    assert sorted(peer for roster in rosters for peer in roster.peers) == [m.peer for m in members]
    members = with_sums(members, rosters)
    while full(size) & ~sections_held(members):
        live, makers_of, made = view_of(members), SectionMakers(by_sum(members)), list[Roster]()
        for section in range(size):
            makers = makers_of.of(section)
            leader = next(m for m in makers if m.peer == turns(makers)[0])
            roster = compose(leader, live, number, 0, group_size=size, num_sections=size)
            made += [roster] if roster is not None and roster.section == section else []
        peers = [peer for roster in made for peer in roster.peers]
        assert 0 < len(peers) == len(set(peers))
        members, rosters = with_sections(members, made), rosters + made
    return members, rosters


def test_two_thousand_members_average_by_exact_rounds_of_a_hundred_members_at_most() -> None:
    number, members = 2000, stage_of(2000)
    _, rosters = rounds_of(members, 32)
    assert all(why_inexact(roster.entries, number) is None for roster in rosters if roster.num_sections > 1)
    assert max(len(roster.entries) for roster in rosters) < 100
    assert all(roster_from(roster_to(roster)) == roster for roster in rosters[:: len(rosters) // 9])
    whole = compose(members[0], view_of(members), number, 0, ranks=number)
    assert whole is not None
    assert len(roster_from(roster_to(whole)).entries) == number, "without groups all are in one round"


def test_a_member_of_three_hundred_averages_and_shares_news_with_the_same_few_in_all_steps() -> None:
    size, contacts = 32, set[PeerId]()
    rules = replace(RULES, group_size=size, num_sections=size)
    for step in (0, 1, STEPS_TOGETHER - 1):
        before = [replace(m, step=step) for m in stage_of(300)]
        me = before[7].peer
        members, rosters = rounds_of(before, size)
        contacts.update(peer for roster in rosters if me in roster.peers for peer in roster.peers)
        mine = next(m for m in members if m.peer == me)
        while mine.sections != full(size):
            found = section_to_fetch(Situation(OwnState(record=mine), view_of(members, me), 0.0, rules))
            assert found is not None
            contacts.add(found[0])
            mine = replace(mine, sections=mine.sections | 1 << found[1])
        contacts.update(partners(me, [m.peer for m in before if m.peer != me]), (m.peer for m in mates_to_tell(before[7], before, size)))
    assert len(contacts) < 75


def test_a_group_keeps_its_members_for_a_while_and_then_has_others() -> None:
    def groups_at(step: int) -> set[frozenset[PeerId]]:
        members = [replace(m, step=step) for m in stage_of(90)]
        return {frozenset(m.peer for m in mates_to_tell(mine, members, 8)) for mine in members}

    assert groups_at(0) == groups_at(STEPS_TOGETHER - 1) != groups_at(STEPS_TOGETHER)
    assert sum(map(len, groups_at(0))) == 90
    assert mates_to_tell(stage_of(8)[0], stage_of(8), 8) == stage_of(8)


NUM_SECTIONS = 2


def with_sections(members: list[PeerRecord], rosters: list[Roster]) -> list[PeerRecord]:
    """The table after these rounds for sections."""
    made = {m.peer: sum(1 << roster.section for roster in rosters if m.peer in roster.peers) for m in members}
    return [replace(m, sections=m.sections | made[m.peer]) for m in members]


def all_sections() -> tuple[list[PeerRecord], list[Roster]]:
    """A stage whose sections are all made, and the rounds that made them."""
    members, made = all_grouped(), list[Roster]()
    while rosters := proposed(members, num_sections=NUM_SECTIONS):
        members, made = with_sections(members, rosters), made + rosters
    return members, sorted(made, key=lambda roster: roster.section)


def test_holders_of_all_sums_make_the_sections_of_the_average_at_one_moment_each_exactly() -> None:
    members = all_grouped()
    rosters = proposed(members, num_sections=NUM_SECTIONS)
    assert rosters
    peers = [peer for roster in rosters for peer in roster.peers]
    assert len(peers) == len(set(peers))
    for roster in rosters:
        assert why_inexact(roster.entries, NUM_MICROBATCHES) is None
        joining = [m for m in members if m.peer in roster.peers]
        assert all(why_refuse(m, roster, NUM_MICROBATCHES, in_groups=True, num_sections=NUM_SECTIONS) is None for m in joining)
        for in_groups, number in ((True, 1), (True, 3), (False, NUM_SECTIONS)):
            assert "sections" in (why_never(joining[0], roster, NUM_MICROBATCHES, in_groups, number) or "")
    _, made = all_sections()
    assert [roster.section for roster in made] == list(range(NUM_SECTIONS))


@pytest.mark.parametrize("step", range(3))
def test_no_member_is_wanted_for_two_sections_at_one_moment_and_all_are_made_in_a_few_turns(step: int) -> None:
    members = [replace(m, done=1 << number, step=step) for number, m in enumerate(stage_of(90))]
    live = view_of(members)
    rosters = [compose(m, live, 90, 0, group_size=8) for m in members]
    members = with_sums(members, [roster for roster in rosters if roster is not None])
    sizes, turns_taken = [len(holders) for holders in by_sum(members)], 0
    while True:
        live = view_of(members)
        found = [roster for m in members if (roster := compose(m, live, 90, 0, group_size=8, num_sections=8)) is not None]
        if not found:
            break
        peers = [peer for roster in found for peer in roster.peers]
        assert len(peers) == len(set(peers))
        members, turns_taken = with_sections(members, found), turns_taken + 1
    assert all(sum(m.sections >> number & 1 for m in members) == len(sizes) for number in range(8))
    assert turns_taken <= -(-8 // min(sizes)) + 1


def test_the_average_of_all_sections_is_named_by_their_rounds_and_told_by_the_first() -> None:
    _, made = all_sections()
    whole = whole_of(made)
    assert (whole.entries, whole.computed) == (made[-1].entries, made[0].computed)
    assert whole.rounds == tuple(roster.average_id for roster in made)
    assert whole_of([made[0], replace(made[1], attempt=9)]).average_id != whole.average_id
    assert whole_of([replace(made[0], parts=()), *made[1:]]).average_id == whole.average_id
    assert len({roster.average_id for roster in (whole, *made)}) == NUM_SECTIONS + 1


def test_a_section_that_one_member_alone_says_it_holds_is_made_again() -> None:
    members, made = all_sections()
    keeper = made[0].peers[0]
    left = [m if m.peer == keeper else replace(m, sections=m.sections & ~1) for m in members]
    assert [roster.section for roster in proposed(left, num_sections=NUM_SECTIONS)] == [0]


def test_members_gather_sections_from_their_own_group_first_and_no_donor_serves_them_all() -> None:
    members, _ = all_sections()
    rules = replace(RULES, num_sections=NUM_SECTIONS)
    acts = {m.peer: decide(Situation(OwnState(record=m), view_of(members, m.peer), 0.0, rules)) for m in members}
    for mine in members:
        act = acts[mine.peer]
        if mine.sections == full(NUM_SECTIONS):
            assert not isinstance(act, FetchSection)
            continue
        assert isinstance(act, FetchSection)
        donor = next(m for m in members if m.peer == act.peer)
        assert donor.sections >> act.section & 1
        assert not mine.sections >> act.section & 1
        near = [m for m in members if m.group == mine.group != b"" and m.sections >> act.section & 1]
        assert donor in near or not near


def test_a_member_fetches_each_section_once_and_two_at_a_time() -> None:
    members = [replace(m, sections=full(4)) for m in all_grouped()]
    mine = replace(members[0], sections=0)
    rules, view = replace(RULES, num_sections=4), view_of([mine, *members[1:]], mine.peer)
    fetching = frozenset[tuple[PeerId, int]]()
    for _ in range(2):
        act = decide(Situation(OwnState(record=mine, fetching=fetching), view, 0.0, rules))
        assert isinstance(act, FetchSection)
        assert act.section not in [section for _, section in fetching]
        fetching |= {(act.peer, act.section)}
    assert not isinstance(decide(Situation(OwnState(record=mine, fetching=fetching), view, 0.0, rules)), FetchSection)
    refused = frozenset((m.peer, 0) for m in members)
    assert not isinstance(decide(Situation(OwnState(record=mine, refused=refused), view, 0.0, rules)), FetchSection)


def test_sections_go_with_the_ledger_and_with_the_step() -> None:
    mine = all_sections()[0][0]
    assert mine.sections
    assert this_dropped(mine).sections == at_next_step(mine).sections == 0
