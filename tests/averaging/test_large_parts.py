"""Rule 22 (size): a round in which one member's part is far too large gives no average, and the next one goes on without that member."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from peerd.averaging.exchange import Exchange
from peerd.averaging.slice_norms import SliceNorms, is_sum_out_of_bounds
from peerd.config.manifest import SwarmConfig
from peerd.policy.step.ledger import indices, missing
from peerd.stage.executor import Priority
from peerd.table.record import PeerId, Phase
from tests.averaging.rounds_group import MANIFEST, Group, Member, fill, whole_sum
from tests.tiny_run import replace_train

MakeGroup = Callable[..., Group]
CERTIFIED = replace(MANIFEST, swarm=SwarmConfig(trust="on", group_size=0))


async def led(group: Group) -> str:
    """Let the first one lead a round. Returns who could not take part, or nothing."""
    roster = group.roster()
    return await group.leader(roster).rounds.lead(roster)


async def end_round(group: Group, members: list[Member]) -> None:
    """Until these members have left the round that gave no average."""
    await group.until(lambda: all(member.state.record.phase is Phase.ACCUMULATING for member in members))


async def done_again(group: Group, left_out: Member, factor: float = 1.0) -> int:
    """Another member does what the one that is left out had done, each gradient times this factor, and all others average, without
    those that are left out meanwhile. Returns after how many rounds.
    """
    gone: Member | None = left_out
    rounds = 0
    while gone is not None:
        others = [member for member in group.members.values() if member is not gone]
        fill(others[rounds % len(others)].state, list(indices(gone.state.record.done)), factor)
        del group.members[gone.peer]
        rounds += 1
        await led(group)
        await group.until(lambda: all(member.rounds.open is None for member in others))  # noqa: B023 - it is used in this turn alone
        members = {record.peer for record in group.view(others[0].peer).members(0, 0)}
        gone = next((member for member in others if member.peer not in members), None)
    await group.settled(Phase.AVERAGED)
    return rounds


@pytest.mark.parametrize("factor", [100.0, -100.0, 1000.0])
async def test_a_part_that_is_far_too_large_is_in_no_average_and_its_member_is_left_out_of_the_step(
    make_group: MakeGroup, factor: float
) -> None:
    group = make_group(4, CERTIFIED)
    *honest, liar = group.members.values()
    liar.state.accumulator.flat.mul_(factor)
    await led(group)
    await end_round(group, honest)
    finders = [member for member in honest if member.rounds.large._found.spared(0, member.peer) == liar.state.record.done]
    assert finders
    voids = [void.peer for member in finders for void in member.state.record.voids]
    assert voids
    assert set(voids) == {liar.peer}, "a finder for whom another one has ended the round has nothing to add"
    assert [record.peer for record in group.view(honest[0].peer).members(0, 0)] == [member.peer for member in honest]
    assert missing(group.view(honest[0].peer), 0, 0, 6), "its microbatches are to be done again"
    assert await done_again(group, liar) == 1
    assert any(member.host.oversized == [(liar.peer, 0)] for member in finders)
    assert all(set(member.host.oversized) <= {(liar.peer, 0)} for member in honest)


async def test_gradients_that_are_so_large_at_another_member_too_cost_rounds_and_nobody_its_place(make_group: MakeGroup) -> None:
    group = make_group(6, CERTIFIED)
    *others, member = group.members.values()
    member.state.accumulator.flat.mul_(100.0)
    await led(group)
    await end_round(group, others)
    assert await done_again(group, member, 100.0) <= 3
    assert 2 * sum(bool(each.host.oversized) for each in others) < len(others), "too few to leave anybody out of further steps"
    averages = [each.average for each in group.members.values()]
    assert all(torch.equal(average, averages[0]) for average in averages)


async def test_a_sum_into_which_its_reducer_has_put_too_much_is_in_no_average(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody sees the part that a reducer itself puts into its slice."""
    group = make_group(3, CERTIFIED)
    liar, *honest = group.members.values()
    add = Exchange._sum

    def inflated(self: Exchange, number: int) -> bool:
        where = self.layout.piece(self.me, number, self.me)
        if self._signatures.me == liar.peer:
            self.accumulator[where.start : where.end].mul_(1000.0)
        return add(self, number)

    monkeypatch.setattr(Exchange, "_sum", inflated)
    await led(group)
    await end_round(group, honest)  # the liar may hold it
    found = [member for member in honest if member.rounds.large._found.spared(0, member.peer) == liar.state.record.done]
    assert found
    assert {void.peer for member in found for void in member.state.record.voids} == {liar.peer}


@pytest.mark.parametrize("manifest", [CERTIFIED, replace_train(CERTIFIED, accumulate="float32")])
async def test_an_honest_round_of_a_certified_run_is_the_whole_sum_to_the_bit(make_group: MakeGroup, manifest: object) -> None:
    group = make_group(5, manifest)
    assert await led(group) == ""
    await group.settled(Phase.AVERAGED)
    if manifest is CERTIFIED:
        assert all(torch.equal(member.average, whole_sum(member)) for member in group.members.values())
    assert all(member.host.oversized == [] for member in group.members.values())


async def test_nobody_looks_at_sizes_where_averages_are_not_certified_or_steps_are_local(make_group: MakeGroup) -> None:
    for manifest in (MANIFEST, replace_train(CERTIFIED, local_batch=1), replace_train(CERTIFIED, precision="float16", loss_scale=2.0)):
        assert not next(iter(make_group(1, manifest).members.values())).state.looks_at_sizes


async def test_the_norms_and_directions_are_those_of_the_parts_without_what_comes_behind_the_gradients(make_group: MakeGroup) -> None:
    group = make_group(4, CERTIFIED)
    await led(group)
    await group.settled(Phase.AVERAGED)
    exchange = group.members[group.roster().peers[0]].rounds.last
    assert exchange is not None
    layout, chance = exchange.exchange.layout, torch.Generator().manual_seed(1)
    layout.room = 3
    norms = SliceNorms(exchange.roster, 0, layout)
    parts = {number: torch.randn(20, generator=chance, dtype=torch.float64) for number in range(4)}
    own = torch.randn(layout.length, generator=chance, dtype=torch.float64)
    norms.note_own(own)
    norms.note_own(0 * own)
    start = layout.length - 3 - 10
    norms.add(start, parts)
    found, _, even = norms._whole
    for number, part in parts.items():
        rest = sum(other[:10] for place, other in parts.items() if place != number)
        assert isinstance(rest, torch.Tensor)
        assert found[number].norm == pytest.approx(float(part[:10].norm()))
        assert found[number].along == pytest.approx(float(torch.cosine_similarity(part[:10], rest, 0)), abs=1e-5)
    count = exchange.roster.entries[0].done.bit_count()
    assert even == pytest.approx(float(own[:-3].norm()) / count * (10 / (layout.length - 3)) ** 0.5)


async def test_a_mate_that_holds_such_an_average_gives_it_to_nobody_that_has_a_part_of_it(make_group: MakeGroup) -> None:
    """Its reducer may hold it alone, and all that were in its round would take it."""
    group = make_group(3, CERTIFIED)
    first, second, third = group.members.values()
    first.state.accumulator.flat.mul_(3.0)
    assert await led(group) == ""
    await group.settled(Phase.AVERAGED)
    own = {member.peer: member.state.accumulator.flat.clone() for member in (second, third)}
    for member in (second, third):
        await member.rounds.give_up_average()
    await first.rounds.arithmetic.run(Priority.CONTROL, lambda: None)
    for member, factor, is_too_large in ((second, 1.0, False), (third, 0.01, True)):
        member.state.accumulator.flat.copy_(factor * own[member.peer])
        found = await member.rounds.fetcher.fetch(first.peer, 0)
        assert found.is_too_large == is_too_large
    assert not is_sum_out_of_bounds(found.roster, 1e6 * found.flat_sum, own[third.peer], PeerId("nobody"), 0)
    assert is_sum_out_of_bounds(found.roster, 1e6 * found.flat_sum, own[third.peer], third.peer, 0)
