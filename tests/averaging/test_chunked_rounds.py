"""Rounds of many chunks, over several windows: whatever breaks between members, all end with the same bits, which are the whole sum."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
import torch

from peerd.averaging import proposing
from peerd.config.codec import CODECS
from peerd.errors import PeerGoneError
from peerd.policy.round.chunks import WINDOW
from peerd.policy.step.roster import WHOLE, Roster
from peerd.table.record import PeerId, Phase
from tests.averaging.rounds_group import Fault, Group, compressed, whole_sum

MakeGroup = Callable[..., Group]
NUM_CHUNKS = 3 * WINDOW
SLOW = 1e4
"""Bytes per second at which a round of these accumulators takes seconds, so that a leader cares who reduces how much."""
LOSSY = [(spec.example, min(1.0, 5 * spec.error)) for spec in CODECS if spec.error]


@pytest.fixture(autouse=True)
def many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposing, "num_chunks", lambda *_: NUM_CHUNKS)


async def averaged(group: Group, leader: PeerId | None = None) -> Roster:
    """Hold a round. Returns its roster, once every member has the same average; an exact one if nothing is compressed."""
    roster = group.roster(leader=leader)
    first = group.leader(roster)
    assert await first.rounds.lead(roster) == ""
    await group.settled(Phase.AVERAGED)
    assert first.state.average is not None
    assert all(torch.equal(member.average, first.average) for member in group.members.values())
    if not first.rounds.compression.allowed.is_lossy:
        assert torch.equal(first.average, whole_sum(first))
    assert all(member.state.record.voids == () for member in group.members.values())
    return first.state.average.roster


@pytest.mark.parametrize("num_members", [2, 3, 4])
async def test_a_round_takes_as_many_chunks_as_its_slices_have(make_group: MakeGroup, num_members: int) -> None:
    group = make_group(num_members)
    roster = await averaged(group)
    assert roster.num_chunks == NUM_CHUNKS
    assert group.failures == []


@pytest.mark.parametrize("num_members", [2, pytest.param(3, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize(("codec", "apart"), [*LOSSY, ("powersgd:2", 1.0)])
async def test_each_codec_travels_in_many_chunks(make_group: MakeGroup, codec: str, apart: float, num_members: int) -> None:
    group = make_group(num_members, compressed(codec))
    roster = await averaged(group)
    leader = group.leader(roster)
    expected = whole_sum(leader)
    assert float(leader.average[-1]) == float(expected[-1])
    assert 0 < float((leader.average - expected).norm() / expected.norm()) < apart


async def test_each_member_sends_in_the_codec_that_the_roster_names_for_it(make_group: MakeGroup) -> None:
    group = make_group(3, compressed("auto"))
    for member in group.members.values():
        member.host.rates = {peer: (SLOW if peer == "member1" else 1e9, 1e9) for peer in group.members}
    await asyncio.sleep(1.0)  # the step: exact sums take the others a small share of it, and member1 many times as long
    roster = await averaged(group)
    assert len(set(roster.codecs)) > 1
    leader = group.leader(roster)
    assert 0 < float((leader.average - whole_sum(leader)).norm() / whole_sum(leader).norm()) < 1


@pytest.mark.parametrize("num_members", [3, 4])
async def test_members_reduce_as_much_as_their_lines_allow_and_some_nothing(make_group: MakeGroup, num_members: int) -> None:
    group = make_group(num_members)
    rates = [SLOW, 4 * SLOW, 4 * SLOW, 0.3 * SLOW]
    for member in group.members.values():
        member.host.rates = {peer: (rate, rate) for peer, rate in zip(group.members, rates, strict=False)}
    roster = await averaged(group)
    assert sum(roster.shares) == WHOLE
    assert roster.shares[0] < roster.shares[1]
    assert num_members == 3 or roster.shares[3] == 0


@pytest.mark.parametrize("num_members", [2, 3])
@pytest.mark.parametrize("codec", ["none", "int8"])
async def test_what_one_member_cannot_call_for_the_other_takes_and_gives(make_group: MakeGroup, num_members: int, codec: str) -> None:
    group = make_group(num_members, compressed(codec), averaging_s=2.0)
    caller, callee = PeerId("member0"), PeerId("member1")

    async def fault(kind: str, sender: PeerId, receiver: PeerId) -> None:
        if (sender, receiver) == (caller, callee) and kind in ("give", "take", "beat", "chunk"):
            raise PeerGoneError("no way")

    group.fault = fault
    await averaged(group, leader=callee)


@pytest.mark.parametrize("codec", ["none", "int8", "powersgd:2"])
async def test_what_two_members_cannot_send_each_other_at_all_goes_through_a_mate(make_group: MakeGroup, codec: str) -> None:
    group = make_group(4, compressed(codec), averaging_s=2.0)
    cut = {PeerId("member1"), PeerId("member2")}

    async def fault(_kind: str, sender: PeerId, receiver: PeerId) -> None:
        if {sender, receiver} == cut:
            raise PeerGoneError("no way")

    group.fault = fault
    await averaged(group, leader=PeerId("member0"))


@pytest.mark.parametrize("late", ["member1", "member2", "member3"])
async def test_nobody_is_blamed_where_members_hear_at_different_times_who_carries_what(make_group: MakeGroup, late: str) -> None:
    group, cut = make_group(4, averaging_s=2.0), {PeerId("member1"), PeerId("member2")}
    leader, missed = group.members[PeerId("member0")], [0]

    async def fault(kind: str, sender: PeerId, receiver: PeerId) -> None:
        if {sender, receiver} == cut:
            raise PeerGoneError("no way")
        chosen = leader.rounds.open is not None and leader.rounds.open.carrying.mates
        if kind == "beat" and chosen and {sender, receiver} == {leader.peer, late} and missed[0] < 3:
            missed[0] += 1
            raise PeerGoneError("no answer")

    group.fault = fault
    await averaged(group, leader=leader.peer)
    assert missed[0]


def unsteady(seed: int) -> Fault:
    """Calls that fail, and streams that break off at any chunk, on the way there or after it was sent."""
    rng = random.Random(seed)

    async def fault(kind: str, _sender: PeerId, _receiver: PeerId) -> None:
        if rng.random() < {"give": 0.2, "take": 0.5, "chunk": 0.1, "taken": 0.1, "beat": 0.3}.get(kind, 0.0):
            raise PeerGoneError("the line broke")

    return fault


@pytest.mark.parametrize("seed", range(6))
async def test_streams_that_break_at_any_chunk_go_on_there(make_group: MakeGroup, seed: int) -> None:
    group = make_group(2 + seed % 3, compressed("int8" if seed % 2 else "none"), averaging_s=5.0)
    group.fault = unsteady(seed)
    roster = await averaged(group)
    assert roster.num_chunks == NUM_CHUNKS
