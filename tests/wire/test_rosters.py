"""Rosters as they travel: they come back as they were, a proposal is small, and what strangers send is no more than a bad message."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import reduce
from operator import or_
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.errors import BadMessageError
from peerd.generated import averaging_pb2
from peerd.policy.step.ledger import full
from peerd.policy.step.roster import MOST_CREDITS, WHOLE, Credit, Roster, RosterEntry, why_inexact
from peerd.table.forms import bitmap_to
from peerd.table.record import PeerId, RunId
from peerd.wire.convert import MAX_ROSTER
from peerd.wire.rosters import MARK_BYTES, proposal_from, proposal_to, roster_from, roster_to
from tests.wire.strategies import bitmaps, rosters

RUN = RunId("a" * 32)


def travelled(proposal: averaging_pb2.Proposal) -> averaging_pb2.Proposal:
    return averaging_pb2.Proposal.FromString(proposal.SerializeToString())


def large(num_members: int, num_microbatches: int, seed: int = 0) -> Roster:
    """Members with names as long as real ones, each with microbatches from all over the step, and with a codec and a share of its own."""
    draw = Random(seed)
    names = sorted(PeerId("12D3KooW" + "".join(draw.choices("abcdefghijkmnopqrstuvwxyz", k=44))) for _ in range(num_members))
    ledgers = [0] * num_members
    for index in range(num_microbatches):
        ledgers[draw.randrange(num_members)] |= 1 << index
    entries = tuple(RosterEntry(name, draw.randrange(300), draw.randrange(4000), done) for name, done in zip(names, ledgers, strict=True))
    codecs = tuple(draw.choice(("float16", "int8", "int4")) for _ in names)
    return Roster(3, 1200, 1, names[0], entries, codecs, (WHOLE // num_members,) * num_members, 30, 12.5)


@given(rosters())
def test_a_roster_and_so_its_id_come_back_as_they_were(roster: Roster) -> None:
    back = roster_from(averaging_pb2.Roster.FromString(roster_to(roster).SerializeToString()))
    assert back == roster
    assert back.average_id == roster.average_id


@given(rosters(), st.booleans(), st.sets(st.text(max_size=4).map(PeerId)))
def test_a_proposal_comes_back_as_it_was_if_the_callee_knows_its_members(roster: Roster, marked: bool, others: set[PeerId]) -> None:
    proposal = travelled(proposal_to(roster, RUN, marked))
    known = {*roster.peers, *(credit.peer for credit in roster.credits), *others}
    assert proposal_from(proposal, lambda: known) == roster
    if marked and roster.entries:
        known.discard(roster.peers[0])
        assert proposal_from(proposal, lambda: known) is None


def test_marks_that_mean_others_here_say_nothing() -> None:
    """A key can be made whose mark is that of another one. The id of the round covers the names."""
    roster = large(3, 12)
    proposal = proposal_to(roster, RUN, marked=True)
    other = replace(roster, entries=(replace(roster.entries[0], peer=PeerId("another")), *roster.entries[1:]))
    proposal.average_id = other.average_id
    assert proposal_from(proposal, lambda: roster.peers) is None


def test_a_proposal_to_three_hundred_members_has_less_than_ten_kilobytes_and_costs_little_time() -> None:
    roster = large(300, 4096)
    assert why_inexact(roster.entries, 4096) is None
    began_s = time.thread_time()
    proposal = proposal_to(roster, RUN, marked=True).SerializeToString()
    back = proposal_from(averaging_pb2.Proposal.FromString(proposal), lambda: roster.peers)
    assert time.thread_time() - began_s < 0.1
    assert back == roster
    assert len(proposal) < 10_000
    assert len(proposal_to(roster, RUN, marked=False).SerializeToString()) < 30_000


def test_so_has_one_for_the_sums_of_groups_that_tells_who_has_computed_what() -> None:
    members = large(300, 4096)
    groups = [members.entries[start::16] for start in range(16)]
    entries = tuple(replace(group[0], done=reduce(or_, (entry.done for entry in group))) for group in groups)
    credit = tuple(Credit(entry.peer, entry.done) for entry in members.entries)
    roster = replace(members, entries=entries, codecs=members.codecs[:16], shares=(WHOLE // 16,) * 16, credits=credit)
    assert why_inexact(roster.entries, 4096) is None
    proposal = proposal_to(roster, RUN, marked=True).SerializeToString()
    back = proposal_from(averaging_pb2.Proposal.FromString(proposal), lambda: members.peers)
    assert back == roster
    assert back.computed == members.computed
    assert len(proposal) < 10_240


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.lists(bitmaps, min_size=n.bit_length(), max_size=n.bit_length()))))
def test_whatever_holders_are_told_no_two_members_hold_the_same(told: tuple[int, list[int]]) -> None:
    number, planes = told
    names = [PeerId(f"p{n:02}") for n in range(number)]
    holders = list(map(bitmap_to, planes))
    roster = roster_from(averaging_pb2.Roster(peers=names, incarnations=[0] * number, ledger_nos=[0] * number, holders=holders))
    ledgers = [entry.done for entry in roster.entries]
    union = reduce(or_, ledgers)
    assert sum(done.bit_count() for done in ledgers) == union.bit_count()
    assert union & ~reduce(or_, planes) == 0
    assert why_inexact(roster.entries, 6) in (None, "the ledgers do not cover the step") or union > full(6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"codec_of": b"\0", "codecs": ["none"]}, "more codecs or shares"),
        ({"codec_of": b"\1"}, "more codecs or shares"),
        ({"shares": [1, 1]}, "more codecs or shares"),
        ({"incarnations": [1, 2]}, "the same of each member"),
        ({"ledger_nos": []}, "the same of each member"),
        ({"holders": []}, "in 0 bits"),
        ({"holders": [b"", b""]}, "in 2 bits"),
        ({"holders": [bytes((1 << 16) + 1)]}, "longer than any step"),
        ({"peers": ["p"] * (MAX_ROSTER + 1)}, f"a roster of {MAX_ROSTER + 1} peers"),
        ({"credited": ["p"]}, "in 0 bits"),
        ({"credited": ["p"] * (MOST_CREDITS + 1)}, "credits 4097 peers"),
        ({"peers": [], "marks": bytes(MARK_BYTES), "credited_marks": bytes(MARK_BYTES * (MOST_CREDITS + 1))}, "credits 4097 peers"),
        ({"peers": [], "marks": bytes(MARK_BYTES * (MAX_ROSTER + 1))}, f"a roster of {MAX_ROSTER + 1} peers"),
    ],
)
def test_a_roster_that_contradicts_itself_is_a_bad_message(changes: dict[str, object], words: str) -> None:
    sound = {"peers": ["p"], "incarnations": [1], "ledger_nos": [1], "holders": [b"\1"]}
    roster = averaging_pb2.Roster(**{**sound, **changes})  # type: ignore[arg-type]
    if words == "more codecs or shares" and changes.get("codecs"):
        roster.codec_of = b"\0\0"
    with pytest.raises(BadMessageError, match=words):
        proposal_from(averaging_pb2.Proposal(roster=roster), list)
