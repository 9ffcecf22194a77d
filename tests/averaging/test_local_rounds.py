"""Local steps in rounds: members average what their own updates have changed, and begin the next step alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from peerd.config.manifest import WireConfig
from peerd.stage.executor import Priority
from peerd.stage.moves import MoveLog
from peerd.stage.own_updates import OwnUpdates
from peerd.stage.results import Ticket
from peerd.table.record import PeerId, Phase
from tests.averaging.rounds_group import MICROBATCHES, Group, Member, gradient_of
from tests.averaging.test_group_sums import IN_GROUPS, averaged, commit, lead
from tests.tiny_run import replace_train

MakeGroup = Callable[..., Group]
LOCAL = replace_train(IN_GROUPS, local_batch=1, outer_momentum=0.5)


def with_updates(group: Group, held: dict[PeerId, list[int]]) -> None:
    """Each member adds microbatches with made-up gradients, and seals all but the last."""
    for peer, indices in held.items():
        state = group.members[peer].state
        if state.own is None:
            state.own = OwnUpdates(state._manifest, state.holdings, MoveLog(state.record))
        with torch.no_grad():
            state.accumulator.flat.zero_()
        state.record = replace(state.record, done=0)
        for number, index in enumerate(indices):
            if number:
                state.seal_batch(state.record.asides[0].other)
            shapes = [parameter.shape for parameter in state.holdings.module.parameters()]
            flat = gradient_of(index, sum(shape.numel() for shape in shapes))
            parts = torch.split(flat, [shape.numel() for shape in shapes])
            ticket = Ticket(state.record.step, index, (state.record.incarnation, state.record.ledger_no), accumulate=True)
            gradients = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
            assert state.accumulate(ticket, gradients, loss=float(index)) == ""


def dealt(group: Group) -> dict[PeerId, list[int]]:
    return {peer: list(range(number, MICROBATCHES, len(group.members))) for number, peer in enumerate(group.members)}


def flat(member: Member) -> Tensor:
    return torch.cat([value.detach().flatten() for value in member.state.holdings.module.parameters()])


def own(member: Member) -> Tensor:
    """The parameters that a member computes with."""
    return torch.cat([value.detach().flatten() for value in member.state.module_at(member.state.record.step).parameters()])


@pytest.mark.parametrize("codec", ["none", "sparse:64", "int8", "powersgd:2", "auto"])
async def test_three_members_average_their_changes_and_go_on_alike(make_group: MakeGroup, codec: str) -> None:
    group = make_group(3, replace(LOCAL, wire=WireConfig(weight_gradients=codec)))
    members = list(group.members.values())
    for step in range(3):
        with_updates(group, dealt(group))
        begun = flat(members[0])
        roster = replace(group.roster(), step=step)
        assert await group.leader(roster).rounds.lead(roster) == ""
        await group.settled(Phase.AVERAGED)
        shares = sum(len(dealt(group)[member.peer]) * (begun.double() - own(member).double()) for member in members)
        assert isinstance(shares, Tensor)
        assert all(torch.equal(member.average, members[0].average) for member in members)
        if codec == "none":
            assert torch.equal(members[0].average[:-1], shares)
        assert members[0].average[-1] == sum(range(MICROBATCHES))
        await commit(members)
        assert all(torch.equal(flat(member), flat(members[0])) for member in members)
        assert not torch.equal(flat(members[0]), begun)
        assert all(torch.equal(own(member), flat(member)) for member in members)
    if codec == "sparse:64":
        sent = sum(member.rounds.compression.traffic[codec, "sent"] for member in members)
        raw = 3 * 2 * (len(members) - 1) * 4 * len(flat(members[0]))
        assert raw / 141 < sent < raw / 100, "parts and sums of three steps, of which float32 takes so many bytes"


async def test_a_large_stage_averages_changes_in_groups(make_group: MakeGroup) -> None:
    group = make_group(6, LOCAL)
    members = list(group.members.values())
    with_updates(group, dealt(group))
    begun = flat(members[0])
    expected = sum(begun.double() - own_after(member) for member in members)
    await averaged(group)
    assert isinstance(expected, Tensor)
    assert torch.allclose(members[0].average[:-1], expected, rtol=0, atol=1e-12)
    await commit(members)
    assert all(torch.equal(flat(member), flat(members[0])) for member in members)


def own_after(member: Member) -> Tensor:
    """What a member's parameters are once its only batch, of one microbatch, is sealed."""
    before = own(member)
    state = member.state
    other = OwnUpdates(state._manifest, state.holdings, MoveLog(state.record))
    batch = state._sums[0].batch(state.record.asides[0].other)
    other.update(state.record, PeerId("0"), batch.sums(batch.flat), 1)
    assert torch.equal(own(member), before)
    return torch.cat([value.detach().flatten() for value in other.version().module.parameters()]).double()


async def test_a_group_whose_sum_is_given_up_begins_the_step_anew(make_group: MakeGroup) -> None:
    group = make_group(6, LOCAL)
    with_updates(group, dealt(group))
    (roster, *_) = await lead(group)
    member = group.members[roster.peers[0]]
    assert member.state.record.group
    assert not torch.equal(own(member), flat(member))
    await member.executor.run(Priority.CONTROL, partial(member.state.drop_sums, [member.peer]))
    assert (member.state.record.done, member.state.record.group) == (0, b"")
    assert torch.equal(own(member), flat(member))
