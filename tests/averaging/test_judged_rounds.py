"""Rounds that a judge ends: nobody but the one left out is blamed, and none because it is slow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import torch

from peerd.averaging import proposing
from peerd.averaging.open_round import OpenRound
from peerd.errors import PeerGoneError
from peerd.policy.step.judging import given_up_after_s, judges_of
from peerd.policy.step.roster import Roster
from peerd.table.record import PeerId, Phase
from peerd.wire.messages import Beat
from tests.averaging.rounds_group import Group, Member, whole_sum

MakeGroup = Callable[..., Group]
AVERAGING_S = 0.4
NUM_CHUNKS = 12
NOBODY = PeerId("")


@pytest.fixture(autouse=True)
def many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposing, "num_chunks", lambda *_: NUM_CHUNKS)


def now_s() -> float:
    return asyncio.get_running_loop().time()


def open_at(member: Member) -> OpenRound:
    assert member.rounds.open is not None
    return member.rounds.open


def voids(group: Group) -> dict[PeerId, list[PeerId]]:
    """Whom each member leaves out of the step."""
    found = {peer: [void.peer for void in member.state.record.voids] for peer, member in group.members.items()}
    return {peer: out for peer, out in found.items() if out}


async def opened(group: Group, leader: PeerId | None = None) -> Roster:
    """Propose a round. Returns its roster as proposed."""
    roster = group.roster(leader=leader)
    assert await group.leader(roster).rounds.lead(roster) == ""
    return open_at(group.leader(roster)).roster


async def test_a_member_whose_chunks_take_half_an_averaging_time_each_is_waited_for(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round has no fixed time; the leader believes a slow line."""
    monkeypatch.setattr(proposing, "num_chunks", lambda *_: 4)
    group, slow = make_group(3, averaging_s=AVERAGING_S), PeerId("member2")
    group.chunk_s[slow] = AVERAGING_S / 2
    for member in group.members.values():
        member.host.rates = dict.fromkeys(group.members, (1e5, 1e5))
    began_s = now_s()
    await opened(group)
    await group.settled(Phase.AVERAGED)
    assert now_s() - began_s > 2 * AVERAGING_S
    assert all(torch.equal(member.average, whole_sum(member)) for member in group.members.values())
    assert voids(group) == {}


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("num_members", [2, 4])
async def test_a_member_of_which_no_chunk_arrives_whole_is_left_out_by_the_leader_and_by_nobody_else(
    make_group: MakeGroup, num_members: int, breaks: bool
) -> None:
    """It sends nothing, or each chunk breaks off at its end, over its own calls and over those of the others."""
    group, silent = make_group(num_members, averaging_s=AVERAGING_S), PeerId("member1")

    async def fault(kind: str, sender: PeerId, _receiver: PeerId) -> None:
        if kind in ("chunk", "taken") and sender == silent:
            if breaks:
                raise PeerGoneError("the stream ended 1 bytes early")
            await asyncio.Event().wait()

    group.fault = fault
    began_s, leader = now_s(), PeerId("member0")
    await opened(group, leader)
    await group.settled(Phase.ACCUMULATING)
    assert now_s() - began_s < 3 * AVERAGING_S + 1.0, "a loaded machine takes a while for the rest"
    assert voids(group) == {leader: [silent]}
    assert all(member.rounds.absences.missed == {} for member in group.members.values())


@pytest.mark.parametrize("beats", [True, False])
async def test_a_mute_leader_is_left_out_by_the_next_judge_and_by_nobody_else(make_group: MakeGroup, beats: bool) -> None:
    """It proposes and lives. It sends no chunk and judges nobody, and may tell nothing at all in the round."""
    group, leader = make_group(4, averaging_s=AVERAGING_S), PeerId("member0")

    async def fault(kind: str, sender: PeerId, receiver: PeerId) -> None:
        if kind in ("chunk", "taken") and sender == leader:
            await asyncio.Event().wait()
        if kind == "beat" and not beats and leader in (sender, receiver):
            await asyncio.Event().wait()
        if kind == "abort" and sender == leader:
            raise PeerGoneError("it says nothing")

    group.fault = fault
    group.members[leader].rounds.judged = lambda *_: None  # type: ignore[method-assign]
    roster = await opened(group, leader)
    await group.settled(Phase.ACCUMULATING)
    assert voids(group) == {judges_of(roster)[1]: [leader]}
    for peer, member in group.members.items():
        assert member.rounds.absences.missed == {}
        assert set(member.rounds.absences.sidelining.last_in_turn(0)) <= {peer, leader}


async def test_a_member_knows_for_how_long_nothing_moves_and_no_judge_says_anything(make_group: MakeGroup) -> None:
    """No word of any judge gets through, though their records have not expired: rule 4 (close) ends the round then."""
    group = make_group(5, averaging_s=AVERAGING_S)
    never, judges = asyncio.Event(), set[PeerId]()

    async def fault(kind: str, sender: PeerId, receiver: PeerId) -> None:
        if kind != "propose" and (not judges or judges & {sender, receiver}):
            await never.wait()

    group.fault = fault
    roster = await opened(group)
    judges.update(judges_of(roster))
    others = [open_at(member) for peer, member in group.members.items() if peer not in judges]
    async with asyncio.timeout(20):
        while any(min(each.still_s, each.judge_silent_s) < given_up_after_s(5, AVERAGING_S) for each in others):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def standing(group: Group, moves: bool = False) -> Roster:
    """A round of which nothing moves any more, or the chunks of only one member do not."""

    async def fault(kind: str, sender: PeerId, _receiver: PeerId) -> None:
        if kind in ("chunk", "taken") and (not moves or sender == "member0"):
            await asyncio.Event().wait()

    group.fault = fault
    return await opened(group, PeerId("member0"))


async def test_who_is_no_judge_ends_no_round_of_others_and_at_its_leader_it_blames_itself(make_group: MakeGroup) -> None:
    group = make_group(5)
    roster = await standing(group)
    (liar, victim) = (peer for peer in roster.peers if peer not in judges_of(roster))
    for peer in roster.peers:
        if peer not in (liar, roster.leader):
            group.members[peer].rounds.abort(liar, roster.average_id, victim, "I say so")
            assert open_at(group.members[peer]).roster == roster
    group.members[roster.leader].rounds.abort(liar, roster.average_id, victim, "I say so")
    await group.settled(Phase.ACCUMULATING)
    assert voids(group) == {}
    assert group.members[roster.leader].rounds.absences.missed[liar] == 1


async def test_a_judge_is_not_obeyed_before_its_turn(make_group: MakeGroup) -> None:
    group = make_group(5)
    roster = await standing(group)
    second, victim = judges_of(roster)[1], next(peer for peer in roster.peers if peer not in judges_of(roster))
    member = next(group.members[peer] for peer in roster.peers if peer not in (judges_of(roster)[0], second, victim))
    member.rounds.abort(second, roster.average_id, victim, "it owes chunks")
    assert open_at(member).roster == roster
    clock_s = member.rounds._clock()
    member.rounds._clock = lambda: clock_s + 21.0
    member.rounds.abort(second, roster.average_id, victim, "it owes chunks")
    assert member.rounds.open is None or member.rounds._known.is_dead(roster.average_id) or await closes(member)
    assert voids(group) == {}, "members leave nobody out for a judge's word"


async def closes(member: Member) -> bool:
    async with asyncio.timeout(10):
        while member.rounds.open is not None:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)
    return True


async def test_only_a_judge_is_believed_how_long_nothing_has_moved(make_group: MakeGroup) -> None:
    group = make_group(5)
    roster = await standing(group)
    plain, other = (group.members[peer] for peer in roster.peers if peer not in judges_of(roster))
    current = open_at(plain)
    current.progress_s = 0.0
    plain.rounds.beat(other.peer, Beat(roster.average_id, (9, 9, 9, 9, 9), (9, 9, 9, 9, 9), 0.0))
    assert current.progress_s == 0.0
    plain.rounds.beat(judges_of(roster)[2], Beat(roster.average_id, (), (), 1.5))
    assert current.still_s == pytest.approx(1.5, abs=0.5)


async def test_a_word_about_chunks_that_were_not_sent_moves_no_window(make_group: MakeGroup) -> None:
    """A member that says that it has everything gets nothing of a slice that is not summed."""
    group = make_group(3)
    roster = await standing(group)
    leader = group.members[roster.leader]
    lies = Beat(roster.average_id, (1 << 31,) * 3, (1 << 31,) * 3, 0.0)
    for peer in roster.peers[1:]:
        told = leader.rounds.beat(peer, lies)
        assert told.sums == (0, 0, 0)
    assert open_at(leader).exchange.summed == 0
