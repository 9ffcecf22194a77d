"""T8 (proof): who counts of the keys of which nothing shows that a daemon has them."""

from __future__ import annotations

from peerd.table.record import PeerId
from peerd.table.swarm_view import SwarmView
from tests.strategies import member

ME, GHOST = PeerId("me"), PeerId("ghost")
TTL_S = 3.0


def view_of(*proven: str, since_s: float = 0.0) -> SwarmView:
    view = SwarmView(me=ME, ttl_s=TTL_S)
    view.merge(member("me"), since_s)
    for name in proven:
        view.merge(member(name), since_s)
        view.prove(PeerId(name), since_s)
    return view


def counted(view: SwarmView, now_s: float) -> set[str]:
    found = {str(record.peer) for record in view.live(now_s).records}
    assert found - {"me"} == {str(peer) for peer in view.sightings if view.counts(peer, now_s)} - {"me"}
    return found


def renewed(view: SwarmView, now_s: float, *names: str) -> SwarmView:
    for name in names:
        view.merge(member(name, version=int(1000 * now_s)), now_s)
    return view


def test_hole_37_a_key_of_which_one_peer_tells_does_not_count_however_often() -> None:
    view = renewed(view_of("a", "b", "c"), 2.9, "a", "b", "c")
    for number in range(10):
        renewed(view, 3.0 + number / 10, "ghost")
        view.told(GHOST, PeerId("a"), 3.0 + number / 10)
        assert counted(view, 3.0 + number / 10) == {"me", "a", "b", "c"}


def test_two_that_have_proven_to_be_there_prove_a_third() -> None:
    view = renewed(view_of("a", "b", "c"), 2.9, "a", "b", "c", "ghost")
    assert not view.told(GHOST, PeerId("a"), 3.0)
    assert not view.told(GHOST, PeerId("a"), 3.0)
    assert view.told(GHOST, PeerId("b"), 3.0)
    assert counted(view, 3.0) == {"me", "a", "b", "c", "ghost"}


def test_whoever_has_called_or_answered_counts_for_good() -> None:
    view = renewed(view_of("a", "b", "c"), 2.9, "a", "b", "c", "ghost")
    assert view.prove(GHOST, 3.0)
    assert not view.prove(GHOST, 3.0)
    assert "ghost" in counted(view, 3.0)
    view.clear()
    assert "ghost" in counted(renewed(view, 50.0, "a", "b", "ghost"), 50.0)


def test_a_newcomer_believes_its_first_table_for_one_life_of_a_record_after_it_has_met_another_peer() -> None:
    view = renewed(view_of(), 0.0, "a", "x", "y")
    assert counted(view, 0.0) == {"me", "a", "x", "y"}
    view.prove(PeerId("a"), 0.0)
    view.told(PeerId("x"), PeerId("a"), 0.0)
    renewed(view, 2.0, "a", "x", "y")
    assert counted(view, 2.9) == {"me", "a", "x", "y"}
    assert view.holds_until_s(2.9) == 3.0
    assert counted(view, 3.0) == {"me", "a", "x"}, "nobody has told of y"
    renewed(view, 4.0, "a", "b", "x", "y")
    view.prove(PeerId("b"), 4.0)
    renewed(view, 6.5, "a", "b", "x")
    assert counted(view, 6.9) == {"me", "a", "b", "x"}
    assert view.holds_until_s(6.9) == 7.0
    assert counted(view, 7.0) == {"me", "a", "b"}


def test_where_all_others_are_gone_the_word_of_the_last_one_is_enough() -> None:
    view = renewed(view_of("a", "b"), 2.9, "a", "b", "x")
    view.told(PeerId("x"), PeerId("a"), 3.0)
    assert counted(view, 3.0) == {"me", "a", "b"}
    renewed(view, 5.5, "a", "x")
    assert view.holds_until_s(5.5) == 5.9
    assert counted(view, 5.9) == {"me", "a", "x"}


def test_what_strangers_say_changes_nothing_and_costs_no_new_look() -> None:
    view = renewed(view_of("a", "b"), 2.9, "a", "b")
    before = view.changes
    renewed(view, 3.0, *(f"g{number}" for number in range(100)))
    assert view.changes == before
    assert view.holds_until_s(3.0) == 2.9 + TTL_S
