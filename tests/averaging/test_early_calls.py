"""A chunk may come before the proposal of its round. Few wait, and nothing of their bytes is read before the roster is known."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

import pytest

from peerd.averaging.early_calls import MOST_EACH, MOST_STRANGERS
from peerd.errors import BusyError
from peerd.table.record import AverageId, PeerId
from peerd.wire.messages import Frame
from tests.averaging.rounds_group import Group

MakeGroup = Callable[..., Group]


async def test_few_calls_wait_for_their_rounds_and_fewer_of_strangers(make_group: MakeGroup) -> None:
    """What waits finds its round when that opens; nothing of what is refused is read, and nothing of it stays."""
    group = make_group(2)
    roster, member, mate = group.roster(), group.members[PeerId("member0")], PeerId("member1")
    strangers = [PeerId(f"stranger{number}") for number in range(2 * MOST_STRANGERS)]
    member.host.strangers = set(strangers)
    made_up = AverageId(bytes(16))
    waiting = [asyncio.ensure_future(member.rounds.give(peer, made_up, unread, print)) for peer in (*strangers, *(MOST_EACH + 1) * [mate])]
    done, _ = await asyncio.wait(waiting, timeout=0.1)
    assert len(done) == MOST_STRANGERS + 1
    for call in done:
        with pytest.raises(BusyError, match="wait for their rounds"):
            await call
    await member.rounds.propose(roster.leader, roster)
    for call in waiting:
        call.cancel()
    await asyncio.wait(waiting)
    assert member.rounds._early._waiting.num_callers == 0


def unread(*_: object) -> AsyncGenerator[Frame]:
    raise AssertionError
