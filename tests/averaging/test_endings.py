"""However the joining of a round ends, no member stays AVERAGING in a round that nothing ends: hole 21."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from peerd.averaging.known_rounds import MAX_DEAD_ROUNDS
from peerd.errors import PeerGoneError
from peerd.policy.round.debts import AtFault
from peerd.policy.step.roster import Roster
from peerd.stage.executor import Priority
from peerd.table.record import PeerId, Phase
from tests.averaging.rounds_group import Fault, Group, Member, no_fault, whole_sum

MakeGroup = Callable[..., Group]
AVERAGING_S = 0.5


def _raise(*_arguments: Any, **_named: Any) -> Any:
    raise MemoryError


def breaks_in_the_copy(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member.state.accumulator, "copied", _raise)


def breaks_once_it_is_open(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    open_round = member.state.open_round

    def opened(roster: Roster) -> Any:
        open_round(roster)
        raise MemoryError

    monkeypatch.setattr(member.state, "open_round", opened)


@pytest.mark.parametrize("peer", ["member0", "member1"])
@pytest.mark.parametrize("breaks", [breaks_in_the_copy, breaks_once_it_is_open])
async def test_hole_21_a_member_that_fails_while_it_opens_a_round_is_out_of_it(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch, breaks: Callable[[Member, pytest.MonkeyPatch], None], peer: str
) -> None:
    group = make_group(2)
    member, roster = group.members[PeerId(peer)], group.roster()
    breaks(member, monkeypatch)
    joining = member.rounds.lead(roster) if peer == roster.leader else member.rounds.propose(roster.leader, roster)
    with pytest.raises(MemoryError):
        await joining
    while running := [task for each in group.members.values() for task in each.rounds._tasks.running]:
        await asyncio.gather(*running, return_exceptions=True)
    for each in group.members.values():
        assert (each.rounds.open, each.state.round, each.state.record.phase) == (None, None, Phase.ACCUMULATING)
    monkeypatch.undo()
    again = group.roster(attempt=1)
    assert await group.leader(again).rounds.lead(again) == ""
    await group.settled(Phase.AVERAGED)


async def test_hole_21_a_round_is_not_noted_that_a_fence_ended_while_it_opened(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record says nothing of a round then, and its parts would go out under a ledger that is dropped."""
    group = make_group(2)
    roster, member = group.roster(), group.members[PeerId("member1")]
    open_round = member.state.open_round

    def opened(roster: Roster) -> Any:
        result = open_round(roster)
        member.state.fence(2)
        return result

    monkeypatch.setattr(member.state, "open_round", opened)
    assert (await member.rounds.propose(roster.leader, roster))[:2] == (False, "this round is closed")
    assert (member.rounds.open, member.state.round, member.state.record.phase) == (None, None, Phase.ACCUMULATING)


async def test_hole_21_the_end_of_one_round_does_not_end_the_next(make_group: MakeGroup) -> None:
    group = make_group(2)
    old, roster, member = group.roster(), group.roster(attempt=1), group.members[PeerId("member1")]
    assert (await member.rounds.propose(roster.leader, roster))[0]
    await member.rounds.close(old.average_id)
    assert (member.state.record.phase, member.state.round) == (Phase.AVERAGING, roster)
    assert (await member.rounds.propose(roster.leader, roster))[:2] == (False, "this round is closed")
    assert member.rounds.runs(roster.average_id)
    await member.rounds.close_present("over")
    assert (member.rounds.open, member.state.round, member.state.record.phase) == (None, None, Phase.ACCUMULATING)


async def test_closing_a_round_again_and_again_does_not_bring_others_back(make_group: MakeGroup) -> None:
    """Rule 4 (close) says so at each look while a round is being opened; a closed id is dead for ever."""
    group = make_group(2)
    ended, present = group.roster(), group.roster(attempt=1)
    rounds = group.members[PeerId("member1")].rounds
    await rounds.close(ended.average_id)
    for _ in range(MAX_DEAD_ROUNDS + 1):
        await rounds.close(present.average_id)
    assert (await rounds.propose(ended.leader, ended))[:2] == (False, "this round is closed")


async def test_hole_21_a_round_that_no_task_runs_is_closed(make_group: MakeGroup) -> None:
    group = make_group(2)
    roster, member = group.roster(), group.members[PeerId("member1")]
    await member.executor.run(Priority.CONTROL, lambda: member.state.open_round(roster))
    assert (member.state.round, member.rounds.runs(roster.average_id)) == (roster, False)
    await member.rounds.close_present("nothing at this peer would end the round")
    assert (member.state.round, member.state.record.phase) == (None, Phase.ACCUMULATING)
    assert (await member.rounds.propose(roster.leader, roster))[:2] == (False, "this round is closed")


@pytest.mark.parametrize("num_members", [2, 3])
async def test_hole_22_what_a_member_cannot_send_to_another_that_calls_and_takes_it(make_group: MakeGroup, num_members: int) -> None:
    group = make_group(num_members, averaging_s=0.5)
    leader, other = PeerId("member0"), PeerId("member1")
    group.fault = _cut(other, leader)
    roster = group.roster(leader=leader)
    assert await group.leader(roster).rounds.lead(roster) == ""
    await group.settled(Phase.AVERAGED)
    assert all(torch.equal(member.average, whole_sum(member)) for member in group.members.values())
    assert all(failed == (other, leader) for failed in group.failures)


async def test_hole_36_the_leader_leaves_out_a_member_that_sends_nothing_at_once_and_the_others_blame_nobody(make_group: MakeGroup) -> None:
    """It is there and beats. It is out of the step for the leader, and others hear of that."""
    group, silent = make_group(4, averaging_s=AVERAGING_S), PeerId("member1")

    async def drop(kind: str, sender: PeerId, receiver: PeerId) -> None:
        if (kind == "chunk" and sender == silent) or (kind == "take" and receiver == silent):
            await asyncio.Event().wait()

    group.fault = drop
    rest = [member for peer, member in group.members.items() if peer != silent]
    roster, began_s = group.roster(leader=rest[0].peer), asyncio.get_running_loop().time()
    assert await group.leader(roster).rounds.lead(roster) == ""
    await group.settled(Phase.ACCUMULATING)
    assert asyncio.get_running_loop().time() - began_s < 3 * AVERAGING_S
    assert [void.peer for void in rest[0].state.record.voids] == [silent]
    assert all(member.state.record.voids == () for member in rest[1:])
    assert all(member.rounds.absences.missed == {} for member in group.members.values())
    assert rest[0].rounds.absences.sidelining.last_in_turn(0) == (rest[0].peer, silent)


async def test_hole_36_rounds_of_two_leaders_that_ended_without_a_member_leave_it_out_until_it_completes_one(make_group: MakeGroup) -> None:
    group, silent = make_group(4), PeerId("member1")
    for member in group.members.values():
        member.rounds.absences._averaging_s = 0.0  # a round that ends sooner than half of it says nothing of anybody

    async def hold(kind: str, _sender: PeerId, _receiver: PeerId) -> None:
        if kind in ("chunk", "take"):
            await asyncio.Event().wait()

    group.fault = hold
    rest = [member for peer, member in group.members.items() if peer != silent]
    for number, leading in enumerate(rest[:2]):
        roster = group.roster(attempt=number, leader=leading.peer)
        assert await leading.rounds.lead(roster) == ""
        current = leading.rounds.open
        assert current is not None
        leading.rounds.judged(current.roster, AtFault(current.roster.peers.index(silent), "it owes chunks"))
        await group.settled(Phase.ACCUMULATING)
        told = {member.rounds.absences.sidelining.peers for member in rest}
        assert told == {(silent,) if number else ()}
        in_vain = [member.peer for member in rest[: number + 1]]
        assert rest[2].rounds.absences.sidelining.last_in_turn(0) == (*in_vain, *[silent] * (number + 1))
    group.fault = no_fault
    roster = group.roster(attempt=2)
    assert await group.leader(roster).rounds.lead(roster) == ""
    await group.settled(Phase.AVERAGED)
    for member in rest:
        assert member.state.average is not None
        member.rounds.applied(member.state.average)
        assert member.rounds.absences.sidelining.peers == ()


def _cut(caller: PeerId, callee: PeerId) -> Fault:
    async def fault(kind: str, sender: PeerId, receiver: PeerId) -> None:
        if (sender, receiver) == (caller, callee) and kind != "taken":
            raise PeerGoneError("no way")

    return fault
