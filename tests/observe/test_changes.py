"""The events between two states of the swarm."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from peerd.observe.changes import PeerState, SwarmState, changes

STATES = st.builds(PeerState, stage=st.integers(0, 3), leaving=st.booleans(), paused=st.booleans(), suspect=st.booleans())
PEERS = st.dictionaries(st.sampled_from("abcdef"), STATES)


def kinds(before: SwarmState, after: SwarmState) -> list[tuple[str, str]]:
    return [(event.kind, event.peer) for event in changes(before, after)]


def look(**peers: PeerState) -> SwarmState:
    return SwarmState(time_s=1.0, peers=peers)


def test_a_killed_peer_is_suspect_and_then_gone() -> None:
    assert kinds(look(a=PeerState(0)), look(a=PeerState(0, suspect=True))) == [("suspect", "a")]
    assert kinds(look(a=PeerState(0, suspect=True)), look()) == [("gone", "a")]


def test_a_peer_that_said_goodbye_has_left_and_is_not_gone() -> None:
    assert kinds(look(a=PeerState(0)), look(a=PeerState(0, leaving=True))) == [("leaving", "a")]
    assert kinds(look(a=PeerState(0, leaving=True)), look()) == [("left", "a")]


def test_a_peer_that_pauses_does_so_and_does_not_leave_for_good() -> None:
    pausing, leaving = look(a=PeerState(0, leaving=True, paused=True)), look(a=PeerState(0, leaving=True))
    assert kinds(look(a=PeerState(0)), pausing) == [("paused", "a")]
    assert kinds(pausing, leaving) == [("leaving", "a")], "its owner stopped it while it was paused"
    assert kinds(look(), pausing) == [("joined", "a"), ("paused", "a")]
    assert kinds(pausing, look(a=PeerState(0))) == [], "it has joined again, or goes on"
    assert kinds(pausing, look()) == [], "it rests"


def test_a_wrong_suspicion_is_taken_back() -> None:
    assert kinds(look(a=PeerState(0, suspect=True)), look(a=PeerState(0))) == [("back", "a")]


def test_a_peer_that_works_for_nothing_is_told_of_once_with_the_reason() -> None:
    told = [PeerState(0), PeerState(0, unaveraged="for 5 steps"), PeerState(0, unaveraged="for 6 steps"), PeerState(0)]
    found = [changes(look(a=before), look(a=after)) for before, after in pairwise(told)]
    assert [[(event.kind, event.text) for event in events] for events in found] == [[("unaveraged", "for 5 steps")], [], [("averaged", "")]]


def test_a_move_names_both_stages() -> None:
    (event,) = changes(look(a=PeerState(0)), look(a=PeerState(2)))
    assert (event.kind, event.stage, event.text) == ("moved", 2, "from stage 0")


def test_who_comes_into_sight_or_out_of_it_in_a_stage_that_is_partly_known_has_neither_come_nor_gone() -> None:
    seen, unseen = look(far=PeerState(3)), look()
    for before, after in ((seen, unseen), (unseen, seen), (seen, look(far=PeerState(3, suspect=True)))):
        assert kinds(replace(before, partly_known=frozenset({3})), replace(after, partly_known=frozenset({3}))) == []
    partly = frozenset({3})
    assert kinds(replace(look(far=PeerState(0)), partly_known=partly), replace(seen, partly_known=partly)) == [("moved", "far")]
    assert kinds(replace(look(near=PeerState(0)), partly_known=partly), replace(unseen, partly_known=partly)) == [("gone", "near")]


def test_health_items_are_raised_and_cleared_once() -> None:
    well, ill = SwarmState(time_s=1.0), SwarmState(time_s=2.0, health={"stage-empty": "nobody serves stage 1"})
    assert [(e.kind, e.text) for e in changes(well, ill)] == [("raised", "stage-empty: nobody serves stage 1")]
    assert changes(ill, ill) == []
    assert [e.kind for e in changes(ill, well)] == ["cleared"]


def test_a_rebalancing_plan_and_a_checkpoint_are_told_once() -> None:
    still = SwarmState(time_s=1.0)
    decided = SwarmState(time_s=2.0, moves=frozenset({("a", 1, "stage 1 is the weakest")}), resumed_at=7)
    assert [(e.kind, e.stage, e.text) for e in changes(still, decided)] == [
        ("rebalancing", 1, "stage 1 is the weakest"),
        ("resumed", None, "from the checkpoint of step 7"),
    ]
    assert changes(decided, decided) == []


@given(PEERS, PEERS)
def test_nothing_happens_where_nothing_changed_and_something_where_a_peer_did(one: dict[str, PeerState], two: dict[str, PeerState]) -> None:
    before, after = SwarmState(time_s=1.0, peers=one), SwarmState(time_s=2.0, peers=two)
    assert changes(before, before) == []
    named = {event.peer for event in changes(before, after)}
    stopped_leaving = {p for p in one.keys() & two.keys() if one[p] != two[p] and _only_stopped_leaving(one[p], two[p])}
    rests = {p for p in one.keys() - two.keys() if one[p].leaving and one[p].paused}
    assert named == {p for p in one.keys() | two.keys() if one.get(p) != two.get(p)} - stopped_leaving - rests
    assert {event.time_s for event in changes(before, after)} <= {2.0}


def _only_stopped_leaving(old: PeerState, new: PeerState) -> bool:
    """Nothing is said where a peer stays after all; `paused` means nothing in a peer that does not leave."""
    return not new.leaving and (old.stage, old.suspect) == (new.stage, new.suspect)
