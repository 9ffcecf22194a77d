"""PowerSGD over the real exchange: peers of a stage stay equal to the bit through steps, failed rounds, a late mate and a joiner."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from peerd.config.manifest import WireConfig
from peerd.errors import PeerGoneError
from peerd.stage.executor import Priority
from peerd.table.record import PeerId, Phase
from tests.averaging.rounds_group import MANIFEST, MICROBATCHES, Group, Member, fill, make_member, no_fault, whole_sum

POWERSGD = replace(MANIFEST, wire=WireConfig(weight_gradients="powersgd:2"))


@pytest.fixture
async def group() -> AsyncIterator[Group]:
    group = Group()
    yield group
    for member in group.members.values():
        member.rounds.shut()
        member.executor.close()


def enter(group: Group, folder: Path, num_members: int) -> None:
    for number in range(num_members):
        peer = PeerId(f"member{number}")
        group.members[peer] = make_member(group, peer, folder / peer, POWERSGD)


async def average(group: Group, attempt: int = 0) -> None:
    """A round over what everybody has accumulated."""
    roster = group.roster(attempt, min(group.members))
    step = group.leader(roster).state.record.step
    assert await group.leader(roster).rounds.lead(replace(roster, step=step)) == ""
    await group.settled(Phase.AVERAGED)


async def commit(members: Sequence[Member]) -> None:
    for member in members:
        member.rounds.applied(await member.executor.run(Priority.CONTROL, member.state.commit))
        await asyncio.sleep(0)  # until its job is queued
        await member.rounds.arithmetic.run(Priority.IDLE, lambda: None)


def share_out(group: Group) -> None:
    for number, member in enumerate(group.members.values()):
        fill(member.state, range(number, MICROBATCHES, len(group.members)))


def assert_equal(group: Group) -> None:
    first, *others = group.members.values()
    for other in others:
        pairs = zip(first.state.holdings.module.parameters(), other.state.holdings.module.parameters(), strict=True)
        assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
        assert other.state.record.lineage == first.state.record.lineage


async def until_heard(member: Member, num_others: int) -> None:
    """Until something of so many others has come to the member."""
    async with asyncio.timeout(20):
        while (current := member.rounds.open) is not None:
            here = current.exchange
            if sum(bool(here.parts_here[line.number] or here.sums_here[line.number]) for line in current.lines.values()) >= num_others:
                return
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("num_members", [2, 3, 4])
async def test_parameters_stay_equal_and_what_is_applied_follows_the_whole_sum(group: Group, tmp_path: Path, num_members: int) -> None:
    """What all members leave out of parts and sums is what their averages lack."""
    enter(group, tmp_path, num_members)
    first = group.members[PeerId("member0")]
    told = torch.zeros_like(first.state.accumulator.flat)
    for _ in range(4):
        share_out(group)
        await average(group)
        told += first.average
        await commit(list(group.members.values()))
        assert_equal(group)
    left = torch.zeros_like(told)
    for member in group.members.values():
        for residual in (member.rounds.compression.parts, member.rounds.compression.sums):
            left += residual.left_out if residual.left_out is not None else 0
    expected = 4 * whole_sum(first)
    assert float((told - expected).norm() / expected.norm()) > 0.1, "something was left out"
    assert torch.allclose(told + left, expected, rtol=0, atol=1e-9)
    sent = first.rounds.compression.traffic["powersgd:2", "sent"]
    assert sent < 4 * 4 * told.numel() / 3, "fewer bytes than a third of raw ones in float32"


async def test_a_round_that_failed_a_mate_that_was_late_and_a_joiner_cost_no_equality(group: Group, tmp_path: Path) -> None:
    enter(group, tmp_path, 3)
    share_out(group)
    await average(group)
    await commit(list(group.members.values()))

    async def silent(kind: str, sender: PeerId, receiver: PeerId) -> None:
        if kind in ("give", "take") and {sender, receiver} == {"member2", "member0"}:
            raise PeerGoneError("gone")

    share_out(group)
    group.fault = silent
    roster = replace(group.roster(1, PeerId("member0")), step=1)
    assert await group.leader(roster).rounds.lead(roster) == ""
    await until_heard(group.leader(roster), 1)
    for member in group.members.values():
        await member.rounds.close_present("it stands still")
    await group.settled(Phase.ACCUMULATING)
    bases = [dict(member.rounds.compression.parts.bases) for member in group.members.values()]
    group.fault = no_fault
    await average(group, attempt=2)
    after = [member.rounds.compression.parts.bases for member in group.members.values()]
    assert all(torch.equal(before[name], found[name]) for before, found in zip(bases, after, strict=True) for name in before)
    late, *others = group.members.values()
    fetched = await late.rounds.fetcher.fetch(others[0].peer, 1)
    assert torch.equal(fetched.flat_sum, late.average), "whoever fetches an average has its very bits"
    await commit(list(group.members.values()))
    assert_equal(group)

    donor, peer = others[0].state, PeerId("member3")
    joiner = group.members[peer] = make_member(group, peer, tmp_path / peer, POWERSGD)
    joiner.state.begin_joining()
    joiner.state.load(donor.holdings.tensors(donor.record), donor.record.step, donor.record.lineage, donor.history)
    joiner.state.serve()
    assert joiner.rounds.compression.parts.bases == {}
    for _ in range(2):
        share_out(group)
        await average(group)
        assert all(torch.equal(member.average, joiner.average) for member in group.members.values())
        await commit(list(group.members.values()))
        assert_equal(group)
    assert joiner.rounds.compression.parts.bases != {}
