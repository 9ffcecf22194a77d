"""Asides: what another peer may hold, too, is summed apart, and an overlap costs the smaller of the two sums that meet."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.step.acts import DropSums
from peerd.policy.step.asides import UNKNOWN, all_merged, dropped, merged, other_holder, sums, sums_to_drop, to_merge
from peerd.policy.step.ledger import at_next_step, both_dropped, marked, with_overlap
from peerd.policy.step.situation import OwnState, Situation
from peerd.policy.step.stepping import decide
from peerd.table.record import MAX_ASIDES, PeerId, PeerRecord, Phase
from tests.policy.test_stepping import RULES
from tests.strategies import NUM_MICROBATCHES, member, view_of

A, B, C, D, E = (PeerId(name) for name in "abcde")
added = st.lists(st.tuples(st.integers(0, NUM_MICROBATCHES - 1), st.none() | st.sampled_from([UNKNOWN, A, B, C, D, E])), max_size=8)


def with_added(record: PeerRecord, microbatches: list[tuple[int, PeerId | None]]) -> PeerRecord:
    """The record after these were added as a peer adds them: each once, (index, the other holder)."""
    for index, other in microbatches:
        if record.done >> index & 1:
            continue
        spare = to_merge(record, record.step, other) if other is not None else None
        record = marked(record if spare is None else merged(record, record.step, spare), record.step, index, other)
    return record


def decided(mine: PeerRecord, mate: PeerRecord) -> tuple[PeerId, ...]:
    act = decide(Situation(OwnState(record=mine), view_of(mine, mate), 100.0, RULES))
    return act.names if isinstance(act, DropSums) else ()


@given(added)
def test_the_sums_of_a_ledger_are_disjoint_and_together_the_ledger(microbatches: list[tuple[int, PeerId | None]]) -> None:
    record = with_added(member("me"), microbatches)
    parts = sums(record)
    assert len(parts) <= 1 + MAX_ASIDES
    assert sum(parts.values()) == record.done == with_added(member("me"), [(index, None) for index, _ in microbatches]).done
    assert all_merged(record) == replace(record, asides=())


@given(added, st.sets(st.sampled_from([UNKNOWN, A, B, C, PeerId("me")])))
def test_what_is_dropped_is_missing_and_the_rest_is_kept(microbatches: list[tuple[int, PeerId | None]], names: set[PeerId]) -> None:
    record = with_added(member("me"), microbatches)
    assert sums(dropped(record, names)) == {name: bitmap for name, bitmap in sums(record).items() if name not in names}


@given(added, added)
def test_of_two_sums_that_meet_exactly_one_is_dropped(
    first: list[tuple[int, PeerId | None]], second: list[tuple[int, PeerId | None]]
) -> None:
    one, two = with_added(member("p1"), first), with_added(member("p2"), second)
    drops = [(sums_to_drop(one, two), sums(one)), (sums_to_drop(two, one), sums(two))]
    for mine, bits in sums(one).items():
        for theirs, held in sums(two).items():
            if bits & held:
                assert mine in drops[0][0] or theirs in drops[1][0]
    assert bool(drops[0][0] or drops[1][0]) == bool(one.done & two.done)
    for _ in range(8):
        one, two = dropped(one, sums_to_drop(one, two)), two
        two = dropped(two, sums_to_drop(two, one))
    assert not one.done & two.done


@given(added, added, added, added)
def test_two_sums_are_never_both_dropped_for_each_other_however_stale_the_views(
    mine: list[tuple[int, PeerId | None]],
    mine_grew: list[tuple[int, PeerId | None]],
    other: list[tuple[int, PeerId | None]],
    other_grew: list[tuple[int, PeerId | None]],
) -> None:
    """The two largest sums of both: whichever is the largest of all stays."""
    one, two = with_added(member("p1"), mine), with_added(member("p2"), other)
    one_now, two_now = with_added(one, mine_grew), with_added(two, other_grew)
    kept = sums(dropped(one_now, sums_to_drop(one_now, two))) or sums(dropped(two_now, sums_to_drop(two_now, one)))
    assert kept or not (one_now.done or two_now.done)


def test_hole_23_a_wrong_suspicion_costs_what_was_done_twice() -> None:
    """p1 holds four; p2 suspected it, added one of those anew, and had one of its own."""
    suspected = member("p1", done=0b001111)
    silent = replace(view_of(member("p2", done=0b010000)), suspected=(suspected,))
    assert silent.mine is not None
    other = other_holder(silent.mine, silent, step=0, index=2, again=True)
    assert other == suspected.peer
    mine = marked(silent.mine, 0, 2, other)
    assert decided(mine, suspected) == (suspected.peer,)
    assert decided(suspected, mine) == ()
    assert dropped(mine, [suspected.peer]) == member("p2", done=0b010000)


def test_an_aside_that_has_grown_larger_than_what_it_meets_stays() -> None:
    mine = with_added(member("p2"), [(index, A) for index in range(4)])
    late = member("p1", done=0b11)
    assert decided(mine, late) == ()
    assert decided(late, mine) == (late.peer,)


def test_the_other_holder_is_who_shows_the_microbatch_and_may_be_alive() -> None:
    mine = member("me")
    live = view_of(mine)

    def holder(
        index: int, again: bool = False, suspected: tuple[PeerRecord, ...] = (), expired: tuple[PeerRecord, ...] = ()
    ) -> PeerId | None:
        return other_holder(mine, replace(live, suspected=suspected, expired=expired), step=0, index=index, again=again)

    assert holder(0) is None
    assert holder(0, again=True) == UNKNOWN
    assert holder(0, suspected=(member("a", done=1),)) == A
    assert holder(0, again=True, expired=(member("b", done=1),)) == B
    assert holder(1, suspected=(member("a", done=1),)) is None
    assert holder(0, suspected=(member("a", stage=1, done=1), member("b", step=1, done=1))) is None
    averaging = replace(mine, phase=Phase.AVERAGING)
    assert other_holder(averaging, replace(live, suspected=(member("a", done=1),)), step=1, index=0, again=True) is None


def test_only_so_many_asides_are_kept_and_the_one_that_has_not_grown_for_longest_is_merged() -> None:
    record = with_added(member("me"), [(0, A), (1, B), (2, C), (3, A), (4, D)])
    assert [aside.other for aside in record.asides] == [C, A, D]
    assert sums(record) == {PeerId("me"): 0b000010, C: 0b000100, A: 0b001001, D: 0b010000}


def test_where_steps_overlap_the_next_steps_asides_go_with_its_ledger() -> None:
    mine = marked(marked(with_overlap(member("me")), 1, 2, A), 1, 3)
    assert not mine.asides
    begun = at_next_step(marked(mine, 0, 1, B))
    assert sums(begun) == {A: 0b0100, begun.peer: 0b1000}
    assert begun.next_asides == ()
    assert sums(at_next_step(begun)) == sums(both_dropped(begun)) == {}
