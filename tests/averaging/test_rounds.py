"""Rounds between real members in one process: all end with the same bits, whoever is late, and no failure costs a ledger.

Each member is the real Rounds over a real StageState; the client between them hands each message straight to the
callee's handler, as the wire would.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from peerd.averaging.asking import Asking
from peerd.averaging.known_rounds import MAX_DEAD_ROUNDS
from peerd.config.codec import CODECS, parse_codec
from peerd.config.manifest import WireConfig
from peerd.errors import BadMessageError, PeerGoneError, WrongStateError
from peerd.policy.step.roster import Roster
from peerd.stage.executor import Priority
from peerd.stage.results import HeldAverage
from peerd.table.record import AverageId, PeerId, Phase
from peerd.wire.messages import Beat, Frame, Verified
from peerd.wire.tensors import views_of_flat
from tests.averaging.rounds_group import (
    MANIFEST,
    Group,
    Member,
    compressed,
    no_fault,
    whole_sum,
)
from tests.steady_loop import PoolJobs
from tests.tiny_run import replace_train

MakeGroup = Callable[..., Group]
NOBODY = PeerId("")


@pytest.mark.parametrize(("num_members", "delayed"), [(1, False), (2, False), (3, False), (4, False), (3, True)])
async def test_all_members_end_with_the_same_bits_which_are_the_whole_sum(make_group: MakeGroup, num_members: int, delayed: bool) -> None:
    group = make_group(num_members, replace_train(MANIFEST, delayed_updates=delayed))
    roster = group.roster()
    assert await group.leader(roster).rounds.lead(roster) == ""
    await group.settled(Phase.AVERAGED)
    expected = whole_sum(group.leader(roster))
    for member in group.members.values():
        assert torch.equal(member.average, expected)
        assert member.state.record.average_id == group.leader(roster).state.record.average_id
    assert group.failures == []


@pytest.mark.parametrize(("codec", "apart"), [(spec.example, min(1.0, 5 * spec.error)) for spec in CODECS if spec.error])
@pytest.mark.parametrize("num_members", [1, 3])
async def test_compressed_sums_are_equal_to_the_bit_at_every_member(
    make_group: MakeGroup, num_members: int, codec: str, apart: float
) -> None:
    """The reducer too takes what its bytes say; alone, nothing travels and nothing is lost. The losses' sum is exact."""
    group = make_group(num_members, compressed(codec))
    roster = group.roster()
    assert await group.leader(roster).rounds.lead(roster) == ""
    await group.settled(Phase.AVERAGED)
    leader = group.leader(roster)
    expected = whole_sum(leader)
    assert all(torch.equal(member.average, leader.average) for member in group.members.values())
    assert float(leader.average[-1]) == float(expected[-1])
    error = float((leader.average - expected).norm() / expected.norm())
    assert (error == 0) if num_members == 1 else (0 < error < apart)
    assert leader.state.average is not None
    held = HeldAverage(leader.state.average.roster, leader.state.record.lineage, leader.average)
    for member in group.members.values():
        member.rounds.applied(held)
        await asyncio.sleep(0)  # until its job is queued
        await member.rounds.arithmetic.run(Priority.IDLE, lambda: None)
        left_out = member.rounds.compression.parts.left_out
        assert left_out is not None
        assert bool(left_out.any()) == (num_members > 1)


async def test_where_steps_overlap_a_round_is_summed_while_every_member_computes(make_group: MakeGroup, steady_clock: PoolJobs) -> None:
    group = make_group(2, replace_train(MANIFEST, delayed_updates=True))
    roster, computed = group.roster(), threading.Event()
    assert await group.leader(roster).rounds.lead(roster) == ""
    sums = [member.rounds.open.exchange.done.wait() for member in group.members.values() if member.rounds.open is not None]
    passes = [asyncio.ensure_future(member.executor.run(Priority.BACKWARD, computed.wait)) for member in group.members.values()]
    steady_clock.blocked = {member.executor._pool for member in group.members.values()}
    async with asyncio.timeout(20):
        await asyncio.gather(*sums)
    steady_clock.blocked.clear()
    computed.set()
    await asyncio.gather(*passes)
    await group.settled(Phase.AVERAGED)
    assert all(torch.equal(member.average, whole_sum(member)) for member in group.members.values())


async def test_an_abort_that_comes_while_a_round_opens_closes_it(make_group: MakeGroup) -> None:
    group = make_group(2)
    roster, member = group.roster(), group.members[PeerId("member1")]
    joining = asyncio.ensure_future(member.rounds.propose(roster.leader, roster))
    await asyncio.sleep(0)  # it waits for the executor
    member.rounds.abort(roster.leader, roster.average_id, NOBODY, "")
    assert (await joining)[:2] == (False, "this round is closed")
    assert member.rounds.open is None
    assert member.state.record.phase is Phase.ACCUMULATING


async def test_the_codecs_that_a_leader_names_are_part_of_the_round_and_one_that_the_run_does_not_allow_is_refused(
    make_group: MakeGroup,
) -> None:
    group = make_group(3, replace(MANIFEST, wire=WireConfig(weight_gradients="auto")))
    leader = group.leader(group.roster())
    leader.host.rates = dict.fromkeys(group.members, (1.0, 1e9))  # no step is so long that exact sums were a small share of it
    leader.host.rates[PeerId("member1")] = (1e9, 1e9)
    await asyncio.sleep(1.0)  # but for member1 they are
    assert await leader.rounds.lead(group.roster()) == ""
    await group.settled(Phase.AVERAGED)
    roster = leader.state.average.roster if leader.state.average else group.roster()
    assert [parse_codec(name).name for name in roster.codecs] == ["topk", "none", "topk"]
    assert all(torch.equal(member.average, leader.average) for member in group.members.values())
    assert all(member.state.record.average_id == roster.average_id for member in group.members.values())
    other, wrong = group.members[PeerId("member2")], replace(group.roster(), codecs=("none", "none", "topk:0.3"))
    await other.rounds.close_present("the round is done")
    assert other.state.record.phase is Phase.AVERAGED
    assert "does not allow a codec" in await other.rounds._join(wrong)


@pytest.mark.parametrize("late", [0, 1, 2])
async def test_the_bits_do_not_depend_on_who_is_late(make_group: MakeGroup, late: int) -> None:
    group = make_group(3)

    async def hold(kind: str, sender: PeerId, _receiver: PeerId) -> None:
        if kind == "give" and sender == f"member{late}":
            await asyncio.sleep(0.1)

    group.fault = hold
    roster = group.roster(leader=PeerId("member1"))
    await group.leader(roster).rounds.lead(roster)
    await group.settled(Phase.AVERAGED)
    assert all(torch.equal(member.average, whole_sum(member)) for member in group.members.values())


async def test_a_chunk_that_comes_before_its_proposal_is_held(make_group: MakeGroup) -> None:
    group = make_group(2)
    proposed = asyncio.Event()

    async def late_proposal(kind: str, _sender: PeerId, _receiver: PeerId) -> None:
        if kind == "propose":
            await asyncio.sleep(0.15)
            proposed.set()
        elif kind == "give" and not proposed.is_set():
            parts_before.append(kind)

    parts_before: list[str] = []
    group.fault = late_proposal
    roster = group.roster()
    await group.leader(roster).rounds.lead(roster)
    await group.settled(Phase.AVERAGED)
    assert parts_before


@pytest.mark.parametrize("kinds", [("propose",), ("give", "take")])
async def test_a_member_that_does_not_answer_closes_the_round_and_every_ledger_is_kept(
    make_group: MakeGroup, kinds: tuple[str, ...]
) -> None:
    group = make_group(3, averaging_s=0.5)
    gone = PeerId("member2")
    before = {peer: (m.state.record.done, m.state.accumulator.flat.clone()) for peer, m in group.members.items()}

    async def dead(what: str, sender: PeerId, receiver: PeerId) -> None:
        if gone in (sender, receiver) and what in kinds:
            raise PeerGoneError("gone")

    group.fault = dead
    roster = group.roster()
    await group.leader(roster).rounds.lead(roster)
    await group.settled(Phase.ACCUMULATING)
    for peer, member in group.members.items():
        assert member.rounds.open is None
        assert member.state.record.done == before[peer][0]
        assert torch.equal(member.state.accumulator.flat, before[peer][1])
    assert (roster.leader, gone) in group.failures
    group.fault = no_fault
    again = group.roster(attempt=1)
    assert await group.leader(again).rounds.lead(again) == ""
    await group.settled(Phase.AVERAGED)
    assert torch.equal(group.leader(again).average, whole_sum(group.leader(again)))


async def test_a_member_whose_ledger_changed_refuses_and_the_leader_closes_the_round(make_group: MakeGroup) -> None:
    group = make_group(2)
    roster, other = group.roster(), group.members[PeerId("member1")]
    other.state.drop_sums([other.state.record.peer])
    reason = await group.leader(roster).rounds.lead(roster)
    assert "the ledger of this peer has changed since" in reason
    await group.settled(Phase.ACCUMULATING)
    assert group.leader(roster).state.record.done != 0


async def test_chunks_of_a_closed_round_are_dead_for_ever(make_group: MakeGroup) -> None:
    group = make_group(2)
    roster, member = group.roster(), group.members[PeerId("member1")]
    await member.rounds.close(roster.average_id)
    assert (await member.rounds.propose(roster.leader, roster))[:2] == (False, "this round is closed")
    with pytest.raises(WrongStateError, match="closed"):
        await member.rounds.give(roster.leader, roster.average_id, nothing, print)
    with pytest.raises(WrongStateError, match="closed"):
        await anext(aiter(member.rounds.take(roster.leader, roster.average_id, no_words())))
    with pytest.raises(WrongStateError, match="no such round"):
        member.rounds.beat(roster.leader, Beat(roster.average_id, (), (), 0.0))


async def nothing(_size_of: Callable[[Frame], int]) -> AsyncGenerator[Frame]:
    return
    yield


async def no_words() -> AsyncGenerator[Verified]:
    return
    yield


async def test_a_leader_learns_from_a_refusal_what_the_member_really_is(make_group: MakeGroup) -> None:
    group = make_group(2)
    roster = group.roster()
    leader, member = group.leader(roster), next(m for peer, m in group.members.items() if peer != roster.leader)
    member.host.record = b"as it is", b"signed"
    assert await leader.rounds.lead(replace(roster, attempt=1)) == ""
    await group.settled(Phase.AVERAGED)
    assert leader.host.heard == []
    asking = Asking(leader.rounds._around, member.state.record.peer, replace(roster, attempt=2))
    assert "this peer is averaged" in await asking.refusal()
    assert leader.host.heard == [(b"as it is", b"signed")]


async def test_only_the_leader_may_propose_and_abort(make_group: MakeGroup) -> None:
    group = make_group(3)
    roster, member, stranger = group.roster(), group.members[PeerId("member1")], PeerId("member2")
    with pytest.raises(BadMessageError, match="by its leader"):
        await member.rounds.propose(stranger, roster)
    joined, *_ = await member.rounds.propose(roster.leader, roster)
    assert joined
    member.rounds.abort(stranger, roster.average_id, NOBODY, "")
    assert member.rounds.open is not None
    member.rounds.abort(roster.leader, roster.average_id, NOBODY, "")
    await group.settled(Phase.ACCUMULATING)
    assert member.rounds.open is None


async def test_an_abort_of_a_round_that_nobody_opened_is_ignored_and_leaves_nothing_behind(make_group: MakeGroup) -> None:
    """Neither does it kill the round that is proposed later, nor does it bring a closed one back."""
    group = make_group(2)
    ended, roster, member, stranger = group.roster(), group.roster(attempt=1), group.members[PeerId("member1")], PeerId("stranger")
    await member.rounds.close(ended.average_id)
    for number in range(2 * MAX_DEAD_ROUNDS):
        member.rounds.abort(stranger, AverageId(number.to_bytes(16)), NOBODY, "")
    for caller in (stranger, roster.leader):
        member.rounds.abort(caller, roster.average_id, NOBODY, "")
    assert (await member.rounds.propose(ended.leader, ended))[:2] == (False, "this round is closed")
    joining = asyncio.ensure_future(member.rounds.propose(roster.leader, roster))
    await asyncio.sleep(0)
    member.rounds.abort(stranger, roster.average_id, NOBODY, "")
    assert (await joining)[:2] == (True, "")


async def test_a_member_that_gives_a_round_up_counts_as_absent_and_the_leader_closes_it_everywhere(make_group: MakeGroup) -> None:
    group = make_group(3)

    async def hold(kind: str, _sender: PeerId, _receiver: PeerId) -> None:
        if kind == "chunk":
            await asyncio.sleep(600)

    group.fault = hold
    roster = group.roster()
    leader = group.leader(roster)
    assert await leader.rounds.lead(roster) == ""
    assert leader.rounds.open is not None
    average_id = leader.rounds.open.roster.average_id
    leader.rounds.abort(PeerId("stranger"), average_id, NOBODY, "")
    assert leader.rounds.absences.missed == {}
    leader.rounds.abort(PeerId("member2"), average_id, NOBODY, "")
    await group.settled(Phase.ACCUMULATING)
    assert leader.rounds.absences.missed == {PeerId("member2"): 1}


async def test_a_chunk_that_is_sent_again_is_not_taken_again(make_group: MakeGroup) -> None:
    """A stream that broke off is opened anew, and what was under way may come twice."""
    group = make_group(2)
    roster = group.roster()
    reducer, sender = group.members[PeerId("member0")], group.members[PeerId("member1")]
    await reducer.rounds.propose(roster.leader, roster)
    frame, told = first_part(sender, roster), list[Verified]()

    async def twice(size_of: Callable[[Frame], int]) -> AsyncGenerator[Frame]:
        for _ in range(2):
            assert size_of(frame) == frame.num_bytes
            yield frame

    for _ in range(2):
        await reducer.rounds.give(sender.peer, roster.average_id, twice, told.append)
    assert told[-1] == Verified(part=1, sum=0, summed=1)
    assert reducer.rounds.open is not None
    end = sender.state.accumulator.flat.numel() // 2
    assert torch.equal(reducer.rounds.open.exchange.accumulator[:end], whole_sum(reducer)[:end])


def first_part(sender: Member, roster: Roster) -> Frame:
    """The only chunk of the last member's part for the first."""
    end = sender.state.accumulator.flat.numel() // len(roster.peers)
    chunks = views_of_flat(sender.state.accumulator.flat[:end].clone())
    return Frame(0, roster.peers.index(sender.peer), 0, 0, chunks=tuple(chunks))


@pytest.mark.parametrize("lie", ["author", "slice", "receiver", "number", "size", "values", "stranger"])
async def test_a_part_that_is_not_what_the_roster_says_is_refused(make_group: MakeGroup, lie: str) -> None:
    group = make_group(3)
    roster = group.roster()
    reducer, sender = group.members[PeerId("member0")], group.members[PeerId("member1")]
    await reducer.rounds.propose(roster.leader, roster)
    sound = first_part(sender, roster)
    values = torch.full((sound.num_bytes // 8,), math.nan, dtype=torch.float64)
    changes: dict[str, dict[str, Any]] = {
        "author": {"author": 2},
        "slice": {"slice": 2},
        "receiver": {"to": 1},
        "number": {"number": 1},
        "size": {"chunks": sound.chunks[:-1]},
        "values": {"chunks": tuple(views_of_flat(values))},
    }
    caller, frame = PeerId("member9") if lie == "stranger" else sender.peer, replace(sound, **changes.get(lie, {}))

    async def frames(size_of: Callable[[Frame], int]) -> AsyncGenerator[Frame]:
        if size_of(frame) != frame.num_bytes:
            raise BadMessageError("the chunks do not add up")
        yield frame

    with pytest.raises(BadMessageError):
        await reducer.rounds.give(caller, roster.average_id, frames, print)
    if lie == "stranger":
        assert reducer.rounds.open is not None
        return
    await group.settled(Phase.ACCUMULATING)
    assert (reducer.rounds.failed, reducer.rounds.absences.missed) == (1, {sender.peer: 1})


async def test_a_mate_that_missed_the_average_gets_it_from_memory_and_later_from_the_log(make_group: MakeGroup) -> None:
    group = make_group(2)
    roster = group.roster()
    await group.leader(roster).rounds.lead(roster)
    await group.settled(Phase.AVERAGED)
    holder, late = group.members[PeerId("member0")], group.members[PeerId("member1")]
    fetched = await late.rounds.fetcher.fetch(holder.peer, 0)
    assert fetched.roster.entries == roster.entries
    assert torch.equal(fetched.flat_sum, holder.average)
    holder.rounds.applied(holder.state.commit())
    from_memory = await late.rounds.fetcher.fetch(holder.peer, 0)
    await holder.executor.run(Priority.IDLE, lambda: None)  # so that the log has been written
    from_log = await late.rounds.fetcher.fetch(holder.peer, 0)
    assert torch.equal(from_memory.flat_sum, fetched.flat_sum)
    assert torch.equal(from_log.flat_sum, fetched.flat_sum)
    with pytest.raises(WrongStateError, match="no average"):
        await late.rounds.fetcher.fetch(holder.peer, 0 + 9)
