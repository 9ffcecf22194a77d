"""Rule 22 (size): a round in which one member's part is far too large gives no average, and the next one goes on without that member."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from peerd.averaging.exchange import Exchange
from peerd.averaging.slice_norms import SliceNorms, is_sum_out_of_bounds
from peerd.config.manifest import SwarmConfig
from peerd.policy.step.ledger import missing
from peerd.stage.executor import Priority
from peerd.table.record import PeerId, Phase
from tests.averaging.rounds_group import MANIFEST, Group, whole_sum
from tests.tiny_run import replace_train

MakeGroup = Callable[..., Group]
CERTIFIED = replace(MANIFEST, swarm=SwarmConfig(trust="on", group_size=0))


async def led(group: Group) -> str:
    """Let the first one lead a round. Returns who could not take part, or nothing."""
    roster = group.roster()
    return await group.leader(roster).rounds.lead(roster)


@pytest.mark.parametrize("factor", [10.0, -10.0, 1000.0])
async def test_a_part_that_is_far_too_large_is_in_no_average_and_its_member_is_left_out_of_the_step(
    make_group: MakeGroup, factor: float
) -> None:
    group = make_group(4, CERTIFIED)
    *honest, liar = group.members.values()
    liar.state.accumulator.flat.mul_(factor)
    await led(group)
    await group.settled(Phase.ACCUMULATING)
    finders = [member for member in honest if (liar.peer, 0) in member.host.oversized]
    assert finders
    voids = [void.peer for member in finders for void in member.state.record.voids]
    assert voids
    assert set(voids) == {liar.peer}, "a finder for whom another one has ended the round has nothing to add"
    assert all(peer == liar.peer for member in honest for peer, _ in member.host.oversized)
    assert [member.state.record.average_id for member in honest] == [honest[0].state.record.average_id] * 3
    assert [record.peer for record in group.view(honest[0].peer).members(0, 0)] == [member.peer for member in honest]
    assert missing(group.view(honest[0].peer), 0, 0, 6), "its microbatches are to be done again"


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
    await group.until(lambda: all(member.state.record.phase is Phase.ACCUMULATING for member in honest))  # the liar may hold it
    found = [member for member in honest if member.host.oversized == [(liar.peer, 0)]]
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
