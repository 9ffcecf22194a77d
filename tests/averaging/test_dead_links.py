"""Rounds with a link between two members that carries nothing: calls over it hang. The leader, or any judge, may be an end of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

import pytest
import torch

from peerd.averaging import proposing
from peerd.averaging.carrying import Carrying
from peerd.averaging.exchange import Exchange
from peerd.averaging.flows import Sendings
from peerd.errors import PeerGoneError
from peerd.policy.round.debts import BEHIND, Edge
from peerd.policy.step.judging import judges_of
from peerd.table.record import PeerId, Phase
from peerd.wire.messages import Carried, Frame, Verified
from tests.averaging.rounds_group import Group, whole_sum

MakeGroup = Callable[..., Group]
AVERAGING_S = 2.5
NUM_CHUNKS = 12
PATIENCE_S = 1.5 * AVERAGING_S


@pytest.fixture(autouse=True)
def many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposing, "num_chunks", lambda *_: NUM_CHUNKS)


def cut(group: Group, ends: Collection[PeerId]) -> None:
    """Nothing passes between two members but the proposal of a round."""

    async def fault(kind: str, sender: PeerId, receiver: PeerId) -> None:
        if {sender, receiver} == set(ends) and kind != "propose":
            await asyncio.sleep(PATIENCE_S)
            raise PeerGoneError("no answer in time")

    group.fault = fault


async def test_what_both_ends_of_a_dead_link_say_is_carried_from_the_beginning(make_group: MakeGroup) -> None:
    """Nobody waits there until an edge is told."""
    group, ends = make_group(4, averaging_s=20.0), (PeerId("member1"), PeerId("member2"))
    cut(group, ends)
    for member in group.members.values():
        member.host.cut = {ends, ends[::-1]}
    roster = group.roster(leader=PeerId("member0"))
    began_s = asyncio.get_running_loop().time()
    assert await group.leader(roster).rounds.lead(roster) == ""
    await group.settled(Phase.AVERAGED)
    assert asyncio.get_running_loop().time() - began_s < BEHIND * 20.0
    assert all(torch.equal(member.average, whole_sum(member)) for member in group.members.values())


async def test_two_mates_may_carry_for_each_other(make_group: MakeGroup) -> None:
    """Each tells what the other has verified, of what the source owes it."""
    group = make_group(4)
    stand = asyncio.Event()

    async def fault(kind: str, _sender: PeerId, _receiver: PeerId) -> None:
        if kind != "propose":
            await stand.wait()

    group.fault = fault
    roster = group.roster(leader=PeerId("member0"))
    assert await group.leader(roster).rounds.lead(roster) == ""
    source = group.members[PeerId("member1")].rounds.open
    assert source is not None
    source._carry({Edge(1, 2): 3, Edge(1, 3): 2})
    for mate, target in ((2, 3), (3, 2)):
        source.lines[roster.peers[mate]].told(Verified(0, 0, 0, (Carried(1, target, 1, 1, 0, 0),)))
    assert [source.lines[roster.peers[target]].own.part for target in (2, 3)] == [1, 1]


async def exchanged(make_group: MakeGroup, peer: str) -> Exchange:
    """What is left at a member of a round of three that is done."""
    group = make_group(3)
    roster = group.roster(leader=PeerId("member0"))
    assert await group.leader(roster).rounds.lead(roster) == ""
    await group.settled(Phase.AVERAGED)
    over = group.members[PeerId(peer)].rounds.last
    assert over is not None
    return over.exchange


async def test_a_stream_that_breaks_sends_no_chunk_of_a_part_whose_sum_stands_in_its_place(make_group: MakeGroup) -> None:
    """It would not be the chunk that its author has signed: the mate that was to carry it banned the author."""
    exchange, edge = await exchanged(make_group, "member1"), Edge(1, 2)
    carrying = Carrying(exchange)
    sendings = Sendings(2, exchange, carrying)
    sendings.resume()
    sent = []
    while (sending := sendings.next()) is not None:
        sent.append(sending.flow.of == sending.flow.slice)
        sending.flow.next += 1
    assert sent, "a sum that is not verified is sent again"
    assert all(sent)
    assert carrying.first_of(edge, is_sum=False) == exchange.layout.chunks_of(2)


async def test_a_mate_takes_a_part_that_leaves_out_what_the_target_has(make_group: MakeGroup) -> None:
    carrying, edge = Carrying(await exchanged(make_group, "member0")), Edge(1, 2)
    carrying.take_over({edge: 0})
    frames = [Frame(2, 1, number, 2, chunks=(b"",)) for number in range(4)]
    assert [carrying.takes(frames[number]) for number in (0, 1, 3)] == [True, True, False]
    assert carrying.load(edge).here == 2, "the mate would be blamed for what it never had"
    carrying.told_by_target(edge, Verified(part=3))
    assert carrying.load(edge).here == 4


@pytest.mark.parametrize("chunk_s", [0.0, AVERAGING_S / 40])
@pytest.mark.parametrize("ends", [(0, 1), (1, 2), (2, 3)])
async def test_a_round_goes_around_a_dead_link_wherever_its_judges_stand(
    make_group: MakeGroup, ends: tuple[int, int], chunk_s: float
) -> None:
    """`ends` are ranks: 0 leads, 0 to 2 judge."""
    group = make_group(4, averaging_s=AVERAGING_S)
    roster = group.roster(leader=PeerId("member0"))
    order = [*judges_of(roster), *(peer for peer in roster.peers if peer not in judges_of(roster))]
    cut(group, [order[rank] for rank in ends])
    group.chunk_s = dict.fromkeys(group.members, chunk_s)
    for member in group.members.values():
        member.host.rates = dict.fromkeys(group.members, (1e5, 1e5))
    assert await group.leader(roster).rounds.lead(roster) == ""
    await group.settled(Phase.AVERAGED)
    assert all(torch.equal(member.average, whole_sum(member)) for member in group.members.values())
    assert all(member.state.record.voids == () for member in group.members.values())
    assert all(member.rounds.failed == 0 for member in group.members.values())
