"""Chunks that are not what they should be are refused, whoever opened their stream, and whoever forged them is blamed: its mate is not."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from peerd.averaging import proposing
from peerd.averaging.open_round import BEATS
from peerd.config.manifest import Manifest, WireConfig
from peerd.errors import PeerGoneError
from peerd.policy.round.debts import Edge
from peerd.policy.step.roster import Roster
from peerd.table.record import PeerId, Phase
from peerd.wire.messages import Frame
from tests.averaging.rounds_group import MANIFEST, Group, no_fault, no_forge, whole_sum

MakeGroup = Callable[..., Group]
TAKEN_AFTER_S = 0.4
NUM_CHUNKS = 6


@pytest.fixture(autouse=True)
def many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposing, "num_chunks", lambda *_: NUM_CHUNKS)


def changed(frame: Frame) -> tuple[bytes, ...]:
    """Its bytes, the first of which is another one."""
    whole = b"".join(frame.chunks)
    return (bytes((whole[0] ^ 1,)) + whole[1:],)


def not_finite(frame: Frame) -> tuple[bytes, ...]:
    return (b"\xff" * frame.num_bytes,)


WRONG: Mapping[str, Callable[[Frame], Mapping[str, Any]]] = {
    "it is another one's": lambda frame: {"author": 2},
    "it is of a slice that is not here": lambda frame: {"slice": 2},
    "it is for somebody else": lambda frame: {"to": 2},
    "it leaves chunks out": lambda frame: {"number": frame.number + 1},
    "it is in no slice": lambda frame: {"number": NUM_CHUNKS},
    "it is of nobody": lambda frame: {"author": 3},
    "it is too short": lambda frame: {"chunks": (b"".join(frame.chunks)[8:],)},
    "it is too long": lambda frame: {"chunks": (*frame.chunks, bytes(8))},
    "it is not finite": lambda frame: {"chunks": not_finite(frame)},
}


async def lead(group: Group, leader: PeerId, attempt: int = 0) -> Roster:
    """Hold a round, which may be over at once."""
    roster = group.roster(attempt, leader)
    await group.leader(roster).rounds.lead(roster)
    return roster


async def assert_blamed(group: Group, leader: PeerId, liar: PeerId) -> None:
    """The leader closes the round and counts it against the liar alone. The next one, in which nobody lies, is exact."""
    await group.settled(Phase.ACCUMULATING)
    missed = {peer: dict(member.rounds.absences.missed) for peer, member in group.members.items()}
    assert missed == {peer: {liar: 1} if peer == leader else {} for peer in group.members}
    assert all(member.state.record.voids == () for member in group.members.values())
    group.forge, group.fault = no_forge, no_fault
    async with asyncio.timeout(20):
        attempts = (group.roster(attempt, leader) for attempt in itertools.count(1))  # a member may be about to leave the first round
        while await group.members[leader].rounds.lead(next(attempts)):
            pass
    await group.settled(Phase.AVERAGED)
    first = group.members[leader]
    assert all(torch.equal(member.average, first.average) for member in group.members.values())
    if not first.rounds.compression.allowed.is_lossy:
        assert torch.equal(first.average, whole_sum(first))


@pytest.mark.parametrize("way", ["Give", "Take"])
@pytest.mark.parametrize("wrong", WRONG)
async def test_a_wrong_chunk_is_refused_over_either_kind_of_call_and_its_author_alone_is_blamed(
    make_group: MakeGroup, way: str, wrong: str
) -> None:
    group, leader, liar = make_group(3, averaging_s=BEATS * TAKEN_AFTER_S), PeerId("member0"), PeerId("member1")

    async def fault(kind: str, sender: PeerId, receiver: PeerId) -> None:
        is_given = kind == "give" and (sender, receiver) == (liar, leader)
        if (way == "Take" and is_given) or (way == "Give" and kind == "take"):
            raise PeerGoneError("no way")

    def forge(sender: PeerId, receiver: PeerId, frame: Frame) -> Frame:
        return replace(frame, **WRONG[wrong](frame)) if (sender, receiver) == (liar, leader) else frame

    group.fault, group.forge = fault, forge
    await lead(group, leader)
    await assert_blamed(group, leader, liar)


async def lead_around(group: Group, leader: PeerId, one: PeerId, other: PeerId) -> None:
    """Lead a round in which no chunk passes between two members, and member0 carries from the beginning."""

    async def fault(kind: str, sender: PeerId, receiver: PeerId) -> None:
        if {sender, receiver} == {one, other} and kind in ("give", "take", "beat"):
            raise PeerGoneError("no way")

    group.fault = fault
    roster = await lead(group, leader)
    ends = roster.peers.index(one), roster.peers.index(other)
    for member in group.members.values():
        assert member.rounds.open is not None
        member.rounds.open._carry({Edge(*ends): 0, Edge(*ends[::-1]): 0})


def compressed(codec: str) -> Manifest:
    return replace(MANIFEST, wire=WireConfig(weight_gradients=codec))


@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize("is_sum", [False, True])
async def test_a_mate_that_forges_what_it_carries_is_blamed_and_its_author_is_not(make_group: MakeGroup, is_sum: bool, codec: str) -> None:
    """It can change a part or a sum, and cannot sign it."""
    group, leader, author, mate = make_group(4, compressed(codec)), PeerId("member1"), PeerId("member2"), PeerId("member0")

    def forge(sender: PeerId, receiver: PeerId, frame: Frame) -> Frame:
        is_carried = (sender, receiver, frame.author, frame.is_sum) == (mate, leader, 2, is_sum)
        return replace(frame, chunks=changed(frame)) if is_carried else frame

    group.forge = forge
    await lead_around(group, leader, leader, author)
    await assert_blamed(group, leader, mate)


@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize("is_sum", [False, True])
async def test_an_author_that_signs_another_chunk_is_blamed_and_the_mate_that_carries_it_is_not(
    make_group: MakeGroup, is_sum: bool, codec: str
) -> None:
    """Else it could have its mate banned by the one that the chunk is for."""
    group, mate, liar, target = make_group(4, compressed(codec)), PeerId("member0"), PeerId("member1"), PeerId("member2")

    def forge(sender: PeerId, receiver: PeerId, frame: Frame) -> Frame:
        is_wrong = (sender, receiver, frame.author) == (liar, mate, 1) and (frame.is_sum if is_sum else frame.to == 2)
        return replace(frame, signature=bytes(len(frame.signature))) if is_wrong else frame

    group.forge = forge
    await lead_around(group, mate, liar, target)
    await assert_blamed(group, mate, liar)
