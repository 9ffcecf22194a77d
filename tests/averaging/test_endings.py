"""However the joining of a round ends, no member stays AVERAGING in a round that nothing ends: hole 21."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from peerd.policy.step.roster import Roster
from peerd.stage.executor import Priority
from peerd.table.record import PeerId, Phase
from tests.averaging.rounds_group import Group, Member

MakeGroup = Callable[..., Group]


def _raise(*_arguments: Any) -> Any:
    raise MemoryError


def breaks_in_the_copy(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member.state, "_averages_parameters", _raise)


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
    assert (await member.rounds.propose(roster.leader, roster))[:2] == (False, "this round is open already")
    assert member.rounds.runs(roster.average_id)
    await member.rounds.close_present("over")
    assert (member.rounds.open, member.state.round, member.state.record.phase) == (None, None, Phase.ACCUMULATING)


async def test_hole_21_a_round_that_no_task_runs_is_closed(make_group: MakeGroup) -> None:
    group = make_group(2)
    roster, member = group.roster(), group.members[PeerId("member1")]
    await member.executor.run(Priority.CONTROL, lambda: member.state.open_round(roster))
    assert (member.state.round, member.rounds.runs(roster.average_id)) == (roster, False)
    await member.rounds.close_present("nothing at this peer would end the round")
    assert (member.state.round, member.state.record.phase) == (None, Phase.ACCUMULATING)
    assert (await member.rounds.propose(roster.leader, roster))[:2] == (False, "this round is closed")
