"""A bug at a member ends its round at once, with the reason in the log, and the run goes on to the next attempt."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from peerd.averaging.exchange import Exchange
from peerd.averaging.open_round import OpenRound
from peerd.averaging.rounds import MOST_OWN_ERRORS
from peerd.background import INTERNAL_ERRORS
from peerd.table.record import PeerId, Phase
from tests.averaging.rounds_group import AVERAGING_S, Group, whole_sum

MakeGroup = Callable[..., Group]
WITHIN_S = AVERAGING_S / 4
"""Far below each deadline of a round."""


class Bug:
    """Breaks a method of a round's data at one member."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, peer: str) -> None:
        true, self.is_there = getattr(Exchange, name), True

        def broken(exchange: Exchange, *arguments: Any, **named: Any) -> Any:
            if self.is_there and exchange.roster.peers[exchange.me] == peer:
                raise TypeError("a bug")
            return true(exchange, *arguments, **named)

        monkeypatch.setattr(Exchange, name, broken)


async def _ended(group: Group) -> None:
    async with asyncio.timeout(WITHIN_S):
        await group.settled(Phase.ACCUMULATING)
    assert all(member.rounds.open is None for member in group.members.values())


@pytest.mark.parametrize("where", ["begin", "frame", "take_part", "_add", "_sum"])
@pytest.mark.parametrize("peer", ["member0", "member1"])
async def test_a_bug_shows_and_the_round_goes_on_to_its_next_attempt(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch, where: str, peer: str
) -> None:
    group = make_group(2)
    bug, before, roster = Bug(monkeypatch, where, peer), INTERNAL_ERRORS.count, group.roster()
    with capture_logs() as logs:
        await group.leader(roster).rounds.lead(roster)
        await _ended(group)
    assert group.leader(roster).rounds.absences.missed in ({}, {peer: 1} if peer != roster.leader else {}), "nobody else is left out for it"
    (line,) = [line for line in logs if line["log_level"] == "error"]
    assert "TypeError: a bug" in line["exception"]
    assert INTERNAL_ERRORS.count == before + 1
    reasons = [line["reason"] for line in logs if line["event"] == "round closed"]
    assert reasons[0] == "internal error: TypeError('a bug')"
    bug.is_there = False
    async with asyncio.timeout(WITHIN_S):
        for attempt in itertools.count(1):  # a member may be about to leave the first round
            again = group.roster(attempt)
            if await group.leader(again).rounds.lead(again) == "":
                break
    await group.settled(Phase.AVERAGED)
    assert all(torch.equal(member.average, whole_sum(member)) for member in group.members.values())


@pytest.mark.parametrize("peer", ["member0", "member1"])
async def test_a_bug_while_a_round_opens_closes_it_at_all_members(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch, peer: str
) -> None:
    group = make_group(2)
    roster = group.roster()
    monkeypatch.setattr(group.members[PeerId(peer)].rounds, "_begin", _raise)
    lead = group.leader(roster).rounds.lead
    if peer == roster.leader:
        with pytest.raises(TypeError):
            await lead(roster)
    else:
        assert "this round is closed" in await lead(roster), "it is asked again, as after a lost answer"
    await _ended(group)


async def test_a_member_that_cannot_take_a_sum_gives_the_round_up(make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    group = make_group(2)
    Bug(monkeypatch, "_take_sum", "member1")
    roster, before = group.roster(), INTERNAL_ERRORS.count
    member, mate = group.members[PeerId("member1")], group.members[PeerId("member0")]
    await group.leader(roster).rounds.lead(roster)
    async with asyncio.timeout(WITHIN_S):
        while Phase.AVERAGING in (member.state.record.phase, mate.state.record.phase) or not member.rounds.failed:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert (member.rounds.open, INTERNAL_ERRORS.count) == (None, before + 1)
    assert member.state.record.phase is Phase.ACCUMULATING
    if mate.state.record.phase is Phase.AVERAGED:  # else it was told before it had every sum
        assert torch.equal((await member.rounds.fetcher.fetch(mate.peer, 0)).flat_sum, mate.average)


async def test_a_member_that_cannot_take_the_average_gives_the_round_up(make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    group = make_group(2)
    roster, before = group.roster(), INTERNAL_ERRORS.count
    member, mate = group.members[PeerId("member1")], group.members[PeerId("member0")]
    monkeypatch.setattr(member.state, "take_average", _raise)
    true = OpenRound.run

    async def run(current: OpenRound) -> None:
        """The member is the last one that is done: a mate that lacked its sum would have to average again."""
        await true(current)
        is_member = current.exchange.roster.peers[current.exchange.me] == member.peer
        while is_member and mate.state.record.phase is not Phase.AVERAGED:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)

    monkeypatch.setattr(OpenRound, "run", run)
    await group.leader(roster).rounds.lead(roster)
    async with asyncio.timeout(WITHIN_S):
        await asyncio.gather(*member.rounds._tasks.running, *mate.rounds._tasks.running)
    assert (mate.state.record.phase, member.state.record.phase) == (Phase.AVERAGED, Phase.ACCUMULATING)
    assert (member.rounds.open, member.rounds.failed, INTERNAL_ERRORS.count) == (None, 1, before + 1)
    assert torch.equal((await member.rounds.fetcher.fetch(mate.peer, 0)).flat_sum, mate.average), "it takes the mate's"


async def test_a_leader_whose_own_bug_ends_each_round_leads_no_more(make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are left out of the rounds that fail for want of them; a leader is not, so the run would stand."""
    group = make_group(2)
    Bug(monkeypatch, "frame", "member0")
    for attempt in range(MOST_OWN_ERRORS):
        roster = group.roster(attempt)
        await group.leader(roster).rounds.lead(roster)
        await _ended(group)
    with pytest.raises(TypeError, match="a bug"):
        await group.leader(roster).rounds.lead(group.roster(MOST_OWN_ERRORS))


def _raise(*_arguments: Any) -> Any:
    raise TypeError("a bug")
