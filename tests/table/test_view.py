"""Merging and living, for any records in any order: rules T1 (order), T2 (alive), T3 (fence), T4 (members) and T5 (suspicion)."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.table.record import AverageId, PeerId, PeerRecord, Phase, Suspicion, Void
from peerd.table.swarm_view import CONDEMNED_LIVES, SwarmView, accusers_needed
from peerd.table.view import words_needed
from tests.strategies import member, records, view_of

TTL_S = 3.0
ME = PeerId("peer0")


def heard(*told: tuple[PeerRecord, float]) -> SwarmView:
    """A view that has merged these records at these times."""
    view = SwarmView(me=ME, ttl_s=TTL_S)
    for record, at_s in told:
        view.merge(record, at_s)
    return view


def of_one_author(found: list[PeerRecord]) -> list[PeerRecord]:
    """A peer publishes one content for each pair; keep the first of any that clash."""
    return list({(record.peer, record.pair): record for record in reversed(found)}.values())


many = st.lists(records(), max_size=8).map(of_one_author)


def merged(found: list[PeerRecord], now_s: float = 0.0) -> SwarmView:
    return heard(*((record, now_s) for record in found))


def known(view: SwarmView) -> dict[PeerId, PeerRecord]:
    return {peer: sighting.record for peer, sighting in view.sightings.items()}


@given(many, st.randoms(use_true_random=False))
def test_merging_in_any_order_and_any_grouping_gives_the_same_records(found: list[PeerRecord], random: object) -> None:
    shuffled = list(found)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert known(merged(found)) == known(merged(shuffled))
    for cut in range(len(found) + 1):
        first, second = merged(found[:cut]), merged(found[cut:])
        assert known(merged([*known(first).values(), *known(second).values()])) == known(merged(found))


@given(many)
def test_merging_again_changes_nothing_at_all(found: list[PeerRecord]) -> None:
    view = merged(found)
    changes, before = view.changes, dict(view.sightings)
    assert not any(view.merge(record, 99.0) for record in found)
    assert (view.changes, view.sightings) == (changes, before)


@given(many)
def test_the_highest_pair_of_each_peer_wins(found: list[PeerRecord]) -> None:
    for peer, record in known(merged(found)).items():
        assert record.pair == max(r.pair for r in found if r.peer == peer)


@given(records(peer=st.just(PeerId("peer1"))), st.floats(0, 100), st.floats(0, 100))
def test_hole_11_and_13_a_repeat_never_renews_a_record(record: PeerRecord, first_s: float, later_s: float) -> None:
    view = heard((record, first_s), (record, first_s + later_s))
    assert (record in view.live(first_s + later_s).records) == (first_s + later_s < first_s + TTL_S)


@given(records(peer=st.just(PeerId("peer1"))), st.integers(0, 2), st.integers(0, 3))
def test_hole_13_an_older_record_never_returns_after_expiry(record: PeerRecord, incarnation: int, version: int) -> None:
    older = replace(record, incarnation=incarnation, version=version)
    view = heard((record, 0.0))
    assert view.live(2 * TTL_S).records == ()
    view.merge(older, 2 * TTL_S)
    assert (view.live(2 * TTL_S).records == (older,)) == (older.pair > record.pair)


def test_a_peer_that_announces_itself_less_often_lives_longer_unseen_by_its_own_word() -> None:
    view = heard((member("peer1", periods=4), 0.0), (member("peer2"), 0.0))
    assert {record.peer for record in view.live(0.0).records} == {"peer1", "peer2"}
    assert view.holds_until_s(0.0) == TTL_S
    assert [record.peer for record in view.live(TTL_S).records] == ["peer1"]
    assert view.holds_until_s(TTL_S) == 4 * TTL_S
    assert view.live(4 * TTL_S).records == ()


def test_hole_12_a_restarted_peer_is_heard_at_once_by_its_new_incarnation() -> None:
    restarted = member("peer1", incarnation=4, version=0)
    view = heard((member("peer1", incarnation=3, version=4000), 0.0), (restarted, 1.0))
    assert view.live(1.0).find(PeerId("peer1")) == restarted


def test_hole_11_a_clock_that_is_years_ahead_changes_nothing() -> None:
    far_s = 1e9
    assert heard((member("peer1"), far_s)).live(far_s + 1.0).find(PeerId("peer1")) is not None


@given(many)
def test_hole_14_after_a_fence_nobody_lives_until_its_pair_rises(found: list[PeerRecord]) -> None:
    others = [record for record in found if record.peer != ME]
    view = merged(others)
    view.clear()
    assert view.live(0.0).records == ()
    for record in others:
        view.merge(record, 0.0)
    assert view.live(0.0).records == ()
    if others:
        risen = replace(others[0], incarnation=9, suspects=())
        view.merge(risen, 0.0)
        assert view.live(0.0).records == (risen,)


def test_a_suspect_does_not_count_until_its_pair_rises() -> None:
    accuser = member("peer1", suspects=(Suspicion(PeerId("peer2"), 0, 5),))
    view = heard((member("peer2", version=5), 0.0), (accuser, 0.0))
    assert view.live(0.0).records == (accuser,)
    assert view.suspects(0.0) == {PeerId("peer2")}
    view.merge(member("peer2", version=6), 0.0)
    assert len(view.live(0.0).records) == 2
    assert view.suspects(0.0) == frozenset()


def test_a_suspicion_of_pairs_yet_to_come_ends_with_the_next_one() -> None:
    """A liar cannot silence a peer for good; an honest accuser that knows a newer pair says it again at its next announcement."""
    lie = (Suspicion(PeerId("peer2"), 1 << 62, 1 << 62),)
    view = heard((member("peer2", version=5), 0.0), (member("peer1", suspects=lie), 0.0))
    assert view.suspects(0.0) == {PeerId("peer2")}
    view.merge(member("peer2", version=6), 0.0)
    assert view.suspects(0.0) == frozenset()
    view.merge(member("peer1", version=1, suspects=(Suspicion(PeerId("peer2"), 0, 6),)), 0.0)
    assert view.suspects(0.0) == {PeerId("peer2")}


@pytest.mark.parametrize(("stage_size", "needed"), [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 2), (300, 2)])
def test_hole_31_a_third_of_a_small_stage_or_two_peers_have_to_suspect_a_peer(stage_size: int, needed: int) -> None:
    assert accusers_needed(stage_size) == needed
    accused = [member(f"peer{number}", version=5) for number in range(1, stage_size + 1)]
    lie = (Suspicion(PeerId("peer1"), 0, 5),)
    view = heard(*((record, 0.0) for record in accused))
    for number in range(needed):
        assert view.suspects(0.0) == frozenset()
        view.merge(member(f"accuser{number}", stage=1, suspects=lie), 0.0)
    assert view.suspects(0.0) == {PeerId("peer1")}


def test_hole_31_what_this_peer_suspects_itself_counts_whatever_others_say() -> None:
    accused = [member(f"peer{number}", version=5) for number in range(1, 7)]
    view = heard(*((record, 0.0) for record in accused), (member("peer0", suspects=(Suspicion(PeerId("peer1"), 0, 5),)), 0.0))
    view.vouch(PeerId("peer1"), 0.0)
    assert view.suspects(0.0) == {PeerId("peer1")}


def test_hole_31_a_peer_that_answered_is_hidden_by_nobody_elses_word_for_one_life_of_a_record() -> None:
    accuser = member("peer1", periods=9, suspects=(Suspicion(PeerId("peer2"), 0, 5),))
    view = heard((member("peer2", version=5, periods=9), 0.0), (accuser, 0.0))
    view.vouch(PeerId("peer2"), 0.0)
    assert view.suspects(view.ttl_s - 0.1) == frozenset()
    assert view.suspects(view.ttl_s) == {PeerId("peer2")}


def test_a_peer_that_is_suspected_counts_itself() -> None:
    me = member("peer0", incarnation=2, version=1)
    accuser = member("peer1", suspects=(Suspicion(ME, 2, 1),))
    view = heard((me, 0.0), (accuser, 0.0))
    assert view.live(0.0).mine == me


def test_members_are_those_at_the_step_neither_joining_nor_voided() -> None:
    leader = member("peer1", step=4, voids=(Void(PeerId("peer2"), 0, 4),))
    voided, restarted = member("peer2", step=4), member("peer2", step=4, incarnation=1)
    joining, ahead, elsewhere = member("peer3", step=4, phase=Phase.JOINING), member("peer4", step=5), member("peer5", step=4, stage=1)
    assert view_of(leader, voided, joining, ahead, elsewhere).members(0, 4) == (leader,)
    assert view_of(leader, restarted).members(0, 4) == (leader, restarted)
    assert view_of(leader, voided, joining, ahead).serving(0) == (leader, voided, ahead)


def leaves_out(name: str, *out: str, **fields: Any) -> PeerRecord:
    return member(name, sidelined=tuple(PeerId(peer) for peer in out), **fields)


def test_hole_36_two_mates_have_to_leave_a_peer_out_and_in_a_stage_of_two_the_other_one() -> None:
    def out(*records: PeerRecord) -> set[str]:
        return set(view_of(*records).sidelined(0))

    assert out(leaves_out("a", "c"), leaves_out("b"), member("c")) == set()
    assert out(leaves_out("a", "c"), leaves_out("b", "c"), member("c")) == {"c"}
    assert out(leaves_out("a", "b"), member("b")) == {"b"}
    assert out(leaves_out("a", "a", "elsewhere"), member("b")) == set()
    assert out(leaves_out("a", "c"), leaves_out("b", "c", leaving=True), member("c")) == set(), "who leaves does not do the work anew"
    assert out(leaves_out("a", "c"), leaves_out("b", "c", phase=Phase.JOINING), member("c"), member("d")) == set()
    assert out(leaves_out("a", "c"), leaves_out("b", "c"), member("c", stage=1)) == set()


def test_hole_36_the_word_of_a_peer_that_is_left_out_counts_for_nothing_and_half_of_a_stage_stay() -> None:
    liar, honest = leaves_out("liar", "a", "b", "c"), [leaves_out(name, "liar") for name in "abc"]
    assert view_of(liar, leaves_out("a", "liar", "b"), *honest[1:]).sidelined(0) == {"liar"}
    assert view_of(liar, *honest).members(0, 0) == tuple(honest)
    assert len(view_of(leaves_out("a", "b"), leaves_out("b", "a")).members(0, 0)) == 1
    crowd = [leaves_out(f"liar{number}", "a", "b", "c", "d") for number in range(4)]
    assert len(view_of(*crowd, *(member(name) for name in "abcd")).sidelined(0)) == 4
    many = view_of(*(leaves_out(f"p{number}", *(f"p{other % 2000}" for other in range(number, number + 8))) for number in range(2000)))
    many = replace(many, group_size=32)
    began_s = time.thread_time()
    assert len(many.sidelined(0)) == 1000
    assert time.thread_time() - began_s < 0.05


@pytest.mark.parametrize(("num", "num_liars"), [(3, 1), (4, 1), (5, 2), (6, 2), (9, 3), (9, 4)])
def test_hole_58_a_minority_leaves_nobody_out_and_an_honest_majority_does(num: int, num_liars: int) -> None:
    names = [f"p{number}" for number in range(num)]
    liars, honest = names[:num_liars], names[num_liars:]
    crowd = [leaves_out(name, *honest[:8]) for name in liars]
    assert view_of(*crowd, *map(member, honest)).sidelined(0) == frozenset()
    assert view_of(*crowd, *(leaves_out(name, *liars) for name in honest)).sidelined(0) >= set(liars)
    assert words_needed(num, group_size=2) == 2, "of groups only those of a member's own see its rounds fail"


def at_step(name: str, stage: int, step: int) -> PeerRecord:
    return PeerRecord(peer=PeerId(name), stage=stage, step=step, phase=Phase.ACCUMULATING)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6)), min_size=1, max_size=8))
def test_hole_25_of_every_stage_that_is_served_somebody_counts_and_what_is_left_fits_together(found: list[tuple[int, int]]) -> None:
    live = view_of(*(at_step(f"p{number}", stage, step) for number, (stage, step) in enumerate(found)))
    for stage in {stage for stage, _ in found}:
        assert live.serving(stage)
        assert not any(live.is_outlived(record) for record in live.serving(stage))
        alone = [record for record in live.records if record.stage == stage]
        assert view_of(*alone).serving(stage) == tuple(alone), "a run of one stage outlives nobody: its newest state wins"


def test_hole_25_a_peer_that_slept_while_the_run_went_back_does_not_count() -> None:
    slept, mate, other = at_step("a", 0, 5), at_step("b", 0, 3), at_step("c", 1, 3)
    assert view_of(slept, mate, other).serving(0) == (mate,)
    assert view_of(slept, mate, at_step("c", 1, 4)).serving(0) == (slept, mate), "one step apart is the life of a run"
    assert view_of(slept, other).serving(0) == (slept,), "the other stage is behind, and nobody of this one is with it"
    joiner = replace(slept, phase=Phase.JOINING)
    assert view_of(joiner, mate, other).is_outlived(joiner)


@given(st.integers(0, 99), st.dictionaries(st.integers(0, 4), st.sets(st.integers(0, 4)), min_size=1), st.integers(2, 5))
def test_hole_38_however_members_void_each_other_one_is_left(step: int, voids: dict[int, set[int]], size: int) -> None:
    def row(number: int) -> PeerRecord:
        targets = sorted(voids.get(number, ()))
        return replace(at_step(f"p{number}", 0, step), voids=tuple(Void(PeerId(f"p{target}"), 0, step) for target in targets))

    records = [row(number) for number in range(size)]
    members = view_of(*records).members(0, step)
    assert members
    assert view_of(*reversed(records)).members(0, step) == members
    left = {record.peer for record in members}
    names = {record.peer for record in records}
    for record in members:
        voided = [void.peer for void in record.voids if void.peer in names and void.peer != record.peer]
        assert left.isdisjoint(voided[: size // 2])


def test_hole_60_one_author_voids_half_of_the_members_at_most() -> None:
    names = [f"p{number}" for number in range(5)]
    voids = tuple(Void(PeerId(name), 0, 3) for name in names)
    liar = replace(at_step("p0", 0, 3), voids=(Void(PeerId("p1"), 7, 3), *voids))
    others = [at_step(name, 0, 3) for name in names[1:]]
    assert [record.peer for record in view_of(liar, *others).members(0, 3)] == ["p0", "p3", "p4"]
    assert view_of(liar, others[0]).members(0, 3) == (liar,), "of two it is not known who is at fault"


def test_a_leaving_peer_voids_nobody() -> None:
    """Otherwise a stage of two stands still: the voided member's work would have to be done again by the peer that leaves."""
    mate, voids = at_step("b", 0, 3), (Void(PeerId("b"), 0, 3),)
    author = replace(at_step("a", 0, 3), voids=voids)
    assert view_of(author, mate).members(0, 3) == (author,)
    leaving = replace(author, leaving=True)
    assert view_of(leaving, mate).members(0, 3) == (leaving, mate)


def test_hole_25_stairs_of_stages_on_which_each_peer_makes_another_one_outlived_take_little_time() -> None:
    """Each stage has peers far ahead, and they are outlived once those of the stage below are gone."""
    far, num_stages = 10**6, 40
    low = [member(f"low{stage}", stage=stage, step=stage) for stage in range(num_stages)]
    ahead = [member(f"far{number}", stage=1 + number % (num_stages - 1), step=far) for number in range(2000)]
    live = view_of(*low, *ahead)
    began_s = time.thread_time()
    assert all(live.serving(stage) == (low[stage],) for stage in range(num_stages))
    assert time.thread_time() - began_s < 0.05


def test_hole_35_whoever_contradicts_itself_counts_for_nothing_for_eight_lives_of_a_record_and_for_twice_as_long_each_time() -> None:
    liar, mate, now_s = PeerId("peer1"), PeerId("peer2"), 0.0
    lie = (Suspicion(mate, 0, 5),)
    view = heard((member("peer2", version=5, periods=99), 0.0), (member("peer1", suspects=lie), 0.0))
    assert view.suspects(0.0) == {mate}
    for times in (1, 2, 4):
        version = int(now_s) + 1
        view.merge(member("peer1", version=version, suspects=lie), now_s)
        assert view.live(now_s).find(liar) is not None
        view.condemn(liar, now_s)
        live = view.live(now_s)
        assert (live.find(liar), live.suspected) == (None, ()), "neither it nor its word counts"
        assert liar not in {record.peer for record in live.expired}
        until_s = now_s + times * CONDEMNED_LIVES * TTL_S
        assert not view.merge(member("peer1", version=version + 1), until_s - 0.1), "however often others tell of it"
        view.clear()
        assert not view.merge(member("peer1", version=version + 1), until_s - 0.1), "a fence is no reason to believe it"
        assert view.condemned(until_s - 0.1) == {liar}
        now_s = until_s
    assert view.condemned(now_s) == frozenset()


def test_hole_32_a_claim_that_is_found_to_be_unproven_again_is_doubted_for_longer_up_to_a_bound() -> None:
    liar, now_s = PeerRecord(peer=PeerId("liar"), step=9), 0.0
    view = SwarmView(me=ME, ttl_s=TTL_S)
    for times in (1, 2, 3, 4, 4):
        for version in range(10):  # it announces itself all the time
            liar = replace(liar, version=liar.version + 1 + version)
            view.merge(liar, now_s)
            assert liar in view.live(now_s).records
        view.doubt(liar.peer, now_s)
        now_s += times * TTL_S
        liar = replace(liar, version=liar.version + 1)
        view.merge(liar, now_s - 1.0)
        assert view.live(now_s - 1.0).suspected == (liar,)
        assert view.holds_until_s(now_s - 1.0) == now_s
    view.doubt(liar.peer, now_s)
    view.clear()
    view.merge(replace(liar, version=liar.version + 1), now_s)
    assert view.live(now_s).suspected == ()


def test_a_member_of_a_group_counts_as_having_computed_no_more_than_its_records_have_shown() -> None:
    view, mine = (
        SwarmView(me=PeerId("p0"), ttl_s=3.0),
        PeerRecord(peer=PeerId("p1"), step=4, phase=Phase.ACCUMULATING, done=0b11, version=1),
    )
    claimed = replace(mine, version=2, done=0b1111, group=AverageId(bytes(16)), own_done=0b0111)

    def seen(*records: PeerRecord) -> int:
        for number, record in enumerate(records):
            view.merge(record, float(number))
        return view.sightings[PeerId("p1")].record.own_done

    assert seen(mine, claimed) == 0b11
    assert seen(replace(claimed, version=3, own_done=0b1111)) == 0b11
    assert seen(replace(claimed, version=4, step=5, own_done=0b1)) == 0
    assert seen(replace(claimed, version=5, step=6, group=AverageId(b""), own_done=0, done=0b1), replace(claimed, version=6, step=6)) == 0b1
