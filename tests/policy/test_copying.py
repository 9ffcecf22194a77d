"""Whose moves a peer copies, and when it asks for them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.step.copying import MOST_COPIED, DueCopies, whose_to_copy
from peerd.table.record import Aside, PeerId, PeerRecord

ME, MATE = PeerId("me"), PeerId("mate")
RECORD = PeerRecord(peer=MATE, stage=1, incarnation=1)


@given(st.sets(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=30), st.integers(1, 9))
def test_every_log_has_as_many_copies(names: set[str], most: int) -> None:
    peers = [PeerId(name) for name in sorted(names)]
    of = [peer for me in peers for peer in whose_to_copy(me, peers, most)]
    assert {of.count(peer) for peer in peers} == {min(most, len(peers) - 1)}
    assert all(me not in whose_to_copy(me, peers, most) for me in peers)


def test_a_mate_is_due_once_for_each_update_that_its_record_shows() -> None:
    copies = DueCopies(ME)
    assert copies.due([RECORD]) == [MATE]
    assert copies.due([RECORD]) == []
    open_batch = replace(RECORD, done=0b11, asides=(Aside(PeerId("batch-0"), 0b11),))
    assert copies.due([open_batch]) == [], "an open batch is no update"
    sealed = replace(RECORD, done=0b11)
    assert [copies.due([sealed]), copies.due([sealed])] == [[MATE], []]
    for changed in (replace(RECORD, step=1), replace(RECORD, incarnation=2)):
        assert [copies.due([changed]), copies.due([changed])] == [[MATE], []]


def test_a_mate_that_has_been_away_is_due_again() -> None:
    copies = DueCopies(ME)
    copies.due([RECORD])
    assert copies.due([]) == []
    assert copies.due([RECORD]) == [MATE]


def test_in_a_large_stage_a_peer_asks_some_mates_and_never_itself() -> None:
    mates = [PeerRecord(peer=PeerId(f"p{number:02}"), stage=1) for number in range(20)]
    due = DueCopies(mates[15].peer).due(mates)
    assert due == [mate.peer for mate in (*mates[16:], *mates[:4])]
    assert len(due) == MOST_COPIED
