"""A view of many rows: what a change costs does not grow with them, and keys that somebody makes push out nobody who is there."""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.swarm.spreading import periods
from peerd.table.record import MAX_PERIODS, PeerId, PeerRecord, Phase, Suspicion
from peerd.table.strangers import WORDS_FOR_PROOF
from peerd.table.swarm_view import LEAST_BELIEVED, MAX_EXPIRED, MAX_TOMBSTONES, MAX_UNPROVEN, Sighting, SwarmView, accusers_needed
from tests.strategies import member, records

ME = PeerId("me")
TTL_S = 3.0
MANY = 19_000
EVENTS = ("merge", "prove", "tell", "clear", "condemn")


def view_of_many(rows: int) -> SwarmView:
    view = SwarmView(me=ME, ttl_s=TTL_S)
    view.merge(member("me"), 0.0)
    for number in range(rows):
        view.merge(member(f"p{number}"), 0.0)
        view.prove(PeerId(f"p{number}"), 0.0)
    return view


def seconds_for_changes(rows: int) -> float:
    """For a thousand records that rise, some with suspicions, each with the questions that the daemon asks about it; the least of three."""
    view, took_s = view_of_many(rows), list[float]()
    for first in (0, 1000, 2000):
        gc.collect()
        each = range(first, first + 1000)
        risen = [(n / 2000, member(f"p{n % 90}", version=1 + n, suspects=(Suspicion(PeerId(f"p{n % 7}"), 0, 0),))) for n in each]
        since_s = time.thread_time()
        for now_s, record in risen:
            view.only_renews(record, now_s)
            view.merge(record, now_s)
            view.holds_until_s(now_s)
        took_s.append(time.thread_time() - since_s)
    return min(took_s)


def test_a_change_costs_the_same_among_many_rows_as_among_few() -> None:
    """Twice as much is left for caches; what looked at each row took more than a hundred times as long."""
    few = seconds_for_changes(100)
    assert seconds_for_changes(MANY) < 3 * few


def test_fresh_keys_push_out_nobody_who_was_ever_reached() -> None:
    view = SwarmView(me=ME, ttl_s=TTL_S)
    view.merge(member("me"), 0.0)
    view.merge(member("real", version=7), 0.0)
    view.prove(PeerId("real"), 0.0)
    for number in range(MAX_TOMBSTONES + 10):
        view.merge(member(f"ghost{number}"), 1000.0 + number / 1000)
    assert not view.merge(member("real", version=6), 2000.0), "an old record does not return"
    assert view.sightings[ME].record == member("me")
    assert len(view.sightings) == MAX_UNPROVEN + 2
    assert len(view.evicted) == MAX_TOMBSTONES + 10 - MAX_UNPROVEN


def test_of_proven_ones_the_one_that_rose_longest_ago_makes_room() -> None:
    view = view_of_many(MAX_TOMBSTONES)
    view.merge(member("ghost"), 1.0)
    view.merge(member("p0", version=1), 1.0)
    assert len(view.sightings) == MAX_TOMBSTONES + 2
    view.prove(PeerId("ghost"), 1.0)
    assert view.evicted == ["p1"]


def test_expired_rows_of_fresh_keys_hide_no_expired_row_of_a_proven_peer() -> None:
    view = SwarmView(me=ME, ttl_s=TTL_S)
    view.merge(member("me"), 0.0)
    view.merge(member("real", done=0b1), 0.0)
    view.prove(PeerId("real"), 0.0)
    for number in range(MAX_EXPIRED + 10):
        view.merge(member(f"ghost{number}"), 1.0)
    expired = view.live(1.0 + TTL_S).expired
    assert [record.peer for record in expired] == ["real"]


@dataclass
class Proofs:
    """Who is proven, and since when, the first one first; and who has told of each peer."""

    since_s: dict[PeerId, float] = field(default_factory=dict)
    told_by: defaultdict[PeerId, set[PeerId]] = field(default_factory=lambda: defaultdict(set))

    def prove(self, peer: PeerId, now_s: float) -> None:
        self.since_s.setdefault(peer, now_s)

    def tell(self, peer: PeerId, teller: PeerId, now_s: float) -> None:
        self.told_by[peer].add(teller)
        if len(self.told_by[peer]) == WORDS_FOR_PROOF:
            self.prove(peer, now_s)


def told_by_all_rows(sightings: Sequence[Sighting], proofs: Proofs, now_s: float) -> tuple[set[PeerId], set[PeerId], float]:
    """The peers that count, those that are suspected, and the next change, found by looking at each row."""
    alive = [seen for seen in sightings if seen.record.peer == ME or seen.is_fresh(now_s, TTL_S)]
    num_live = sum(seen.record.peer in proofs.since_s for seen in alive)
    known_s = [at_s + TTL_S for at_s in list(proofs.since_s.values())[:WORDS_FOR_PROOF]]
    needed = min(WORDS_FOR_PROOF, num_live, sum(now_s >= at_s for at_s in known_s))
    strangers = {each.record.peer for each in alive} - {ME, *proofs.since_s}
    out = {peer for peer in strangers if len(proofs.told_by[peer]) < needed}
    fresh = [seen for seen in alive if seen.record.peer not in out]
    accused = [(seen.record.peer, peer, pair) for seen in fresh for peer, pair in seen.accused.items()]
    suspected = set()
    for seen in fresh:
        accusers = {accuser for accuser, peer, pair in accused if peer == seen.record.peer and seen.record.pair <= pair}
        size = sum(other.record.stage == seen.record.stage for other in fresh)
        if ME in accusers or len(accusers) >= accusers_needed(size):
            suspected.add(seen.record.peer)
    expiries = [seen.fresh_until_s(TTL_S) for seen in fresh if seen.record.peer != ME]
    expiries += [at_s for at_s in known_s if at_s > now_s] if strangers - out else []
    return {seen.record.peer for seen in fresh} - suspected, suspected, min(expiries, default=float("inf"))


def condemned_ever(events: Sequence[tuple[PeerRecord, int, float, str]]) -> set[PeerId]:
    """Within these few seconds none of them comes back."""
    return {record.peer for record, _, _, what in events if what == "condemn"}


@given(
    st.lists(st.tuples(records(), st.integers(1, 4), st.floats(0, 2), st.sampled_from(EVENTS)), max_size=20),
    st.floats(0, 8),
)
def test_what_counts_is_what_a_look_at_all_rows_finds(events: list[tuple[PeerRecord, int, float, str]], later_s: float) -> None:
    view, now_s, proofs, before = SwarmView(me=ME, ttl_s=TTL_S), 0.0, Proofs(), ME
    last, changes, until_before_s = view.live(0.0), view.changes, float("inf")
    for record, rarely, pause_s, what in events:
        now_s += pause_s
        is_other = record.peer != ME and record.peer in view.sightings
        if what == "merge":
            view.merge(replace(record, periods=rarely), now_s)
        elif what == "prove":
            view.prove(record.peer, now_s)
            if is_other:
                proofs.prove(record.peer, now_s)
        elif what == "tell" and is_other:
            view.told(record.peer, before, now_s)
            proofs.tell(record.peer, before, now_s)
        elif what == "condemn" and record.peer != ME:
            view.condemn(record.peer, now_s)
        elif pause_s > 1.9:
            view.clear()
        before, live = record.peer, view.live(now_s)
        counted, suspected, until_s = told_by_all_rows(list(view.sightings.values()), proofs, now_s)
        assert {each.peer for each in live.records} == counted
        assert {each.peer for each in live.suspected} == suspected == view.suspects(now_s)
        assert view.holds_until_s(now_s) == until_s
        assert live == last or view.changes > changes or now_s >= until_before_s
        last, changes, until_before_s = live, view.changes, until_s
    live = view.live(now_s + later_s)
    assert {each.peer for each in live.records} == told_by_all_rows(list(view.sightings.values()), proofs, now_s + later_s)[0]
    nothing = condemned_ever(events)
    gone = [view.sightings[peer].record for peer in proofs.since_s if not view.sightings[peer].is_fresh(now_s + later_s, TTL_S)]
    assert {each.peer for each in live.expired} == {each.peer for each in gone if each.phase is not Phase.JOINING} - nothing


def test_a_peer_that_lives_shorter_than_it_said_before_expires_in_time() -> None:
    view = SwarmView(me=ME, ttl_s=TTL_S)
    view.merge(member("p", periods=4), 0.0)
    view.merge(member("p", version=1), 1.0)
    assert view.holds_until_s(1.0) == 1.0 + TTL_S
    assert view.live(1.0 + TTL_S).records == ()


def test_in_a_small_swarm_nobody_is_believed_to_announce_itself_as_rarely_as_in_a_large_one() -> None:
    view = SwarmView(me=ME, ttl_s=TTL_S)
    view.merge(member("ghost", periods=MAX_PERIODS), 0.0)
    assert view.holds_until_s(0.0) == LEAST_BELIEVED * TTL_S
    for number in range(1000):
        view.merge(member(f"p{number}", periods=periods(number)), 0.0)
        assert view.sightings[PeerId(f"p{number}")].fresh_until_s(TTL_S) == TTL_S * periods(number)
