"""Large stages average in two levels: members make the sums of their groups, and one holder of each makes the average."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch

from peerd.averaging.handover import check_header
from peerd.config.manifest import Manifest, WireConfig
from peerd.errors import BadMessageError, PeerGoneError, WrongStateError
from peerd.policy.step.groups import by_sum, num_sections_of
from peerd.policy.step.ledger import full
from peerd.policy.step.roster import MOST_CHUNKS, Roster, compose, entry_of, is_whole, union_of
from peerd.stage.executor import Priority
from peerd.table.record import PeerId, Phase
from tests.averaging.rounds_group import MANIFEST, MICROBATCHES, Group, Member, fill, no_fault, whole_sum
from tests.tiny_run import replace_train

MakeGroup = Callable[..., Group]
SIZE = 3
IN_GROUPS = replace(MANIFEST, swarm=replace(MANIFEST.swarm, group_size=SIZE))


def proposed(stage: Group, attempt: int = 0, size: int = SIZE, sections: int = 1) -> list[Roster]:
    """What all members together propose at one moment."""
    found = [
        compose(member.state.record, stage.view(peer), MICROBATCHES, attempt, group_size=size, num_sections=sections)
        for peer, member in stage.members.items()
    ]
    return [roster for roster in found if roster is not None]


async def lead(stage: Group, attempt: int = 0, size: int = SIZE, sections: int = 1) -> list[Roster]:
    """Run the rounds that are proposed, to the end."""
    rosters = proposed(stage, attempt, size, sections)
    assert await asyncio.gather(*(stage.leader(roster).rounds.lead(roster) for roster in rosters)) == [""] * len(rosters)
    await stage.until(lambda: all(member.state.record.phase is not Phase.AVERAGING for member in stage.members.values()))
    return rosters


async def averaged(stage: Group, attempt: int = 0) -> Roster:
    """Average in two levels; those that are not in the last round fetch the average from one that is. Returns the last roster."""
    assert not any(is_whole(roster.entries, MICROBATCHES) for roster in await lead(stage, attempt))
    return await averaged_from_sums(stage, attempt + 1)


async def averaged_from_sums(stage: Group, attempt: int = 1) -> Roster:
    (roster,) = await lead(stage, attempt)
    for member in stage.members.values():
        if member.peer not in roster.peers:
            held = await member.rounds.fetcher.fetch(roster.leader, roster.step)
            await member.executor.run(Priority.CONTROL, partial(member.state.take_average, held.roster, held.flat_sum))
    return roster


async def commit(members: Sequence[Member]) -> None:
    for member in members:
        member.rounds.applied(await member.executor.run(Priority.CONTROL, member.state.commit))
        await asyncio.sleep(0)  # until its job is queued
        await member.rounds.arithmetic.run(Priority.IDLE, lambda: None)


@pytest.mark.parametrize("manifest", [IN_GROUPS, replace_train(IN_GROUPS, delayed_updates=True)], ids=["plain", "delayed"])
async def test_all_members_of_a_large_stage_end_with_the_whole_sum_and_one_id(make_group: MakeGroup, manifest: Manifest) -> None:
    stage = make_group(6, manifest)
    rosters = await lead(stage)
    assert len(rosters) > 1
    for roster in rosters:
        held = [stage.members[peer].state for peer in roster.peers]
        assert {(state.record.group, state.record.done) for state in held} == {(held[0].record.group, union_of(roster.entries))}
        assert held[0].record.group
        assert all(torch.equal(state.accumulator.flat, held[0].accumulator.flat) for state in held)
    roster = await averaged_from_sums(stage)
    assert len(roster.entries) == len(by_sum([member.state.record for member in stage.members.values()])) < 6
    first = stage.members[roster.leader]
    assert torch.allclose(first.average, whole_sum(first), rtol=0, atol=1e-12)
    assert roster.computed == {peer: 1 << number for number, peer in enumerate(stage.members)}
    for member in stage.members.values():
        assert member.state.average is not None
        assert member.state.average.roster.computed == roster.computed
        assert torch.equal(member.average, first.average)
        assert member.state.record.average_id == first.state.record.average_id
        assert member.rounds.sums.num_of_groups == (member.state.record.group != b"")
    await commit(list(stage.members.values()))
    assert {(member.state.record.lineage, member.state.record.group, member.state.record.done) for member in stage.members.values()} == {
        (first.state.record.lineage, b"", 0)
    }
    assert not any(member.state.accumulator.flat.any() for member in stage.members.values())


async def test_a_group_whose_round_breaks_off_goes_back_to_its_ledgers_and_others_keep_their_sums(make_group: MakeGroup) -> None:
    stage = make_group(6, IN_GROUPS)
    rosters = proposed(stage)
    hit, *others = sorted(rosters, key=lambda roster: -len(roster.peers))
    ledgers = {peer: (m.state.record.done, m.state.accumulator.flat.clone()) for peer, m in stage.members.items() if peer in hit.peers}

    async def silent(kind: str, sender: PeerId, _receiver: PeerId) -> None:
        if kind in ("give", "take") and sender in hit.peers:
            raise PeerGoneError("gone")

    stage.fault = silent
    assert await asyncio.gather(*(stage.leader(roster).rounds.lead(roster) for roster in rosters)) == [""] * len(rosters)
    for peer in hit.peers:
        await stage.members[peer].rounds.close_present("it stands still")
    await stage.settled(Phase.ACCUMULATING)
    for peer, (done, flat) in ledgers.items():
        state = stage.members[peer].state
        assert (state.record.done, state.record.group) == (done, b"")
        assert torch.equal(state.accumulator.flat, flat)
    sums = {peer: stage.members[peer].state.record.group for roster in others for peer in roster.peers}
    assert all(sums.values())
    stage.fault = no_fault
    again = await lead(stage, 1)
    assert {peer for roster in again for peer in roster.peers} == set(hit.peers)
    assert {peer: stage.members[peer].state.record.group for peer in sums} == sums
    roster = await averaged_from_sums(stage)
    assert torch.allclose(stage.members[roster.leader].average, whole_sum(stage.members[roster.leader]), rtol=0, atol=1e-12)


async def test_a_sum_that_is_given_up_leaves_an_empty_ledger_that_takes_gradients(make_group: MakeGroup) -> None:
    stage = make_group(6, IN_GROUPS)
    (roster, *_) = await lead(stage)
    state = stage.members[roster.peers[0]].state
    assert state.record.group
    state.drop_sums([state.record.peer])
    assert (state.record.done, state.record.group) == (0, b"")
    assert not state.accumulator.flat.any()
    fill(state, [0])
    assert state.accumulator.flat.any()


async def test_a_run_without_groups_refuses_the_roster_of_one(make_group: MakeGroup) -> None:
    stage = make_group(6, MANIFEST)
    roster = proposed(stage)[0]
    other = next(peer for peer in roster.peers if peer != roster.leader)
    answer = await stage.members[other].rounds.propose(roster.leader, roster)
    assert (answer.joined, answer.reason) == (False, "the ledgers do not cover the step")


async def test_parameters_are_averaged_over_those_that_make_the_average_and_everybody_gets_the_mean(make_group: MakeGroup) -> None:
    always = {"average_parameters": "always", "average_parameters_every_steps": 1, "learning_rate": 0.01, "weight_decay": 0.0}
    stage = make_group(6, replace_train(IN_GROUPS, **always))
    heads = [member.state.holdings.module.get_parameter("head.weight") for member in stage.members.values()]
    with torch.no_grad():
        for number, head in enumerate(heads):
            head.add_(1e-4 * number)
    before = heads[0].detach().clone()
    roster = await averaged(stage)
    held = stage.members[roster.leader].state.average
    assert held is not None
    assert held.roster.averages_parameters
    await commit(list(stage.members.values()))
    assert max(float((head - heads[0]).detach().abs().max()) for head in heads) < 1e-7
    assert not torch.equal(heads[0], before)


@pytest.mark.parametrize("codec", ["int8", "powersgd:2"])
async def test_what_codecs_leave_out_in_both_levels_is_made_up_for(make_group: MakeGroup, codec: str) -> None:
    """In one of the steps a sum is given up, and its members make another one from their ledgers."""
    stage = make_group(6, replace(IN_GROUPS, wire=WireConfig(weight_gradients=codec)))
    first = stage.members[PeerId("member0")]
    told = torch.zeros_like(first.state.accumulator.flat)
    for step in range(4):
        if step:
            for number, member in enumerate(stage.members.values()):
                fill(member.state, [number])
        if step == 2:
            await give_up_one_sum(stage)
        await averaged(stage, attempt=2)
        told += first.average
        await commit(list(stage.members.values()))
    left = torch.zeros_like(told)
    for member in stage.members.values():
        for residual in (member.rounds.compression.parts, member.rounds.compression.sums):
            left += residual.left_out if residual.left_out is not None else 0
    expected = 4 * whole_sum(first)
    assert float((told - expected).norm() / expected.norm()) > 1e-4, "something was left out"
    assert torch.allclose(told + left, expected, rtol=0, atol=1e-9)


async def give_up_one_sum(stage: Group) -> None:
    """Make the sums of the groups, and go back to the ledgers of before at all members, as if rule 6 (reset) had said so."""
    await lead(stage)
    for number, member in enumerate(stage.members.values()):
        await member.executor.run(Priority.CONTROL, partial(member.state.drop_sums, [member.peer]))
        assert member.state.record.done == 0
        fill(member.state, [number])
    assert sum(member.state.record.done for member in stage.members.values()) == full(MICROBATCHES)


BY_SECTIONS = replace(MANIFEST, swarm=replace(MANIFEST.swarm, group_size=4))
SECTIONS = num_sections_of(4)


async def make_sections(stage: Group) -> dict[int, Roster]:
    """Make the sums of the groups, and then all sections of the average. Returns the rounds that made these."""
    await lead(stage, size=4)
    made, attempt = dict[int, Roster](), 1
    while rosters := proposed(stage, attempt, 4, SECTIONS):
        await lead(stage, attempt, 4, SECTIONS)
        made |= {roster.section: roster for roster in rosters}
        attempt += 1
    return made


async def gather(stage: Group, made: dict[int, Roster]) -> None:
    """Each member fetches what it lacks from the leader of the round for it."""
    for member in stage.members.values():
        for section, roster in made.items():
            if not member.state.record.sections >> section & 1:
                taken = await member.rounds.fetcher.fetch_section(roster.leader, 0, section)
                await member.executor.run(Priority.CONTROL, partial(member.state.take_section, taken))


@pytest.mark.parametrize("codec", ["none", "int8", "topk:0.1", "powersgd:2", "auto"])
async def test_an_average_by_sections_is_the_whole_sum_with_one_id_for_all(make_group: MakeGroup, codec: str) -> None:
    stage = make_group(6, replace(BY_SECTIONS, wire=WireConfig(weight_gradients=codec)))
    made = await make_sections(stage)
    assert sorted(made) == list(range(SECTIONS))
    assert all(member.state.record.phase is not Phase.AVERAGING for member in stage.members.values())
    await gather(stage, made)
    first = stage.members[PeerId("member0")]
    if codec in ("none", "int8"):
        assert torch.allclose(first.average, whole_sum(first), rtol=0, atol=1e-12 if codec == "none" else 0.5)
    for member in stage.members.values():
        assert member.state.record.phase is Phase.AVERAGED
        assert member.state.record.average_id == first.state.record.average_id
        assert torch.equal(member.average, first.average)
        assert member.state.average is not None
        assert member.state.average.roster.computed == {peer: 1 << number for number, peer in enumerate(stage.members)}
    expected, told = whole_sum(first), first.average.clone()
    await commit(list(stage.members.values()))
    left = torch.zeros_like(told)
    for member in stage.members.values():
        assert (member.state.sections, member.state.record.sections) == (None, 0)
        for residual in (member.rounds.compression.parts, member.rounds.compression.sums):
            left += residual.left_out if residual.left_out is not None else 0
    assert torch.allclose(told + left, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("devices", "is_averaged"), [(("CPU", "RTX 3060"), True), (("CPU", "CPU"), False)], ids=["unlike", "alike"])
async def test_parameters_of_unlike_devices_come_together_where_averages_are_made_by_sections(
    make_group: MakeGroup, devices: Sequence[str], is_averaged: bool
) -> None:
    stage = make_group(6, replace_train(BY_SECTIONS, learning_rate=0.01, weight_decay=0.0, average_parameters_every_steps=1))
    members = list(stage.members.values())
    heads = [member.state.holdings.module.get_parameter("head.weight") for member in members]
    with torch.no_grad():
        for number, (member, head) in enumerate(zip(members, heads, strict=True)):
            member.state.record = replace(member.state.record, device=devices[number % 2])
            head.add_(1e-4 * number)
    await gather(stage, await make_sections(stage))
    first, *_, late = members
    held = first.state.average
    assert held is not None
    assert held.roster.averages_parameters is is_averaged
    fetched = await late.rounds.fetcher.fetch(first.peer, 0)
    assert torch.equal(fetched.flat_sum, held.flat_sum), "a mate that has no sections gets the parameters, too"
    assert torch.allclose(held.flat_sum[: len(whole_sum(first))], whole_sum(first), rtol=0, atol=1e-12)
    await commit(members)
    apart = max(float((head - heads[0]).detach().abs().max()) for head in heads)
    assert apart < 1e-7 if is_averaged else apart > 1e-4


async def test_a_section_is_refused_that_is_of_another_step_or_not_there_or_does_not_match(make_group: MakeGroup) -> None:
    stage = make_group(6, BY_SECTIONS)
    made = await make_sections(stage)
    donor = stage.members[made[0].leader]
    lacking = next(member for member in stage.members.values() if not member.state.record.sections & 1)
    with pytest.raises(WrongStateError):
        await donor.rounds.kept.get_average(0, 1, 0)
    with pytest.raises(WrongStateError):
        await lacking.rounds.kept.get_average(0, 0, 0)
    header, _, is_urgent = await donor.rounds.kept.get_average(0, 0, 0)
    assert is_urgent
    check_header(header, lacking.state, 0, 0, lacking.rounds.compression)
    for forged in (
        replace(header, chunk_hashes=()),
        replace(header, num_bytes=header.num_bytes + 8),
        replace(header, roster=replace(header.roster, section=1)),
        replace(header, roster=replace(header.roster, num_sections=1)),
        replace(header, roster=replace(header.roster, step=1)),
        replace(header, roster=replace(header.roster, entries=header.roster.entries[1:])),
    ):
        with pytest.raises(BadMessageError):
            check_header(forged, lacking.state, 0, 0, lacking.rounds.compression)


@pytest.mark.parametrize("codec", ["int8", "topk:0.1", "powersgd:2"])
async def test_a_section_is_fetched_as_its_reducers_sent_it_and_given_on_in_the_same_bytes(make_group: MakeGroup, codec: str) -> None:
    stage = make_group(6, replace(BY_SECTIONS, wire=WireConfig(weight_gradients=codec)))
    made = await make_sections(stage)
    await gather(stage, made)
    given = dict[int, set[bytes]]()
    for member in stage.members.values():
        for section in made:
            header, file, _ = await member.rounds.kept.get_average(0, 0, section)
            given.setdefault(section, set()).add(b"".join(map(file.chunk, range(len(file)))))
            assert header.num_bytes == file.num_bytes
    raw = stage.members[made[0].leader].state.accumulator.flat.nbytes
    assert all(len(files) == 1 for files in given.values())
    assert sum(len(content) for files in given.values() for content in files) < 0.3 * raw
    encoded = Counter[str]()
    for member in stage.members.values():
        encoded += Counter({direction: size for (_, direction), size in member.rounds.compression.traffic.items()})
    assert encoded["sent"] == encoded["received"]


@pytest.mark.parametrize("codec", ["none", "int8"])
async def test_a_section_that_one_holder_makes_alone_is_given_to_others_too(make_group: MakeGroup, codec: str) -> None:
    stage = make_group(6, replace(BY_SECTIONS, wire=WireConfig(weight_gradients=codec)))
    maker, other = list(stage.members.values())[:2]
    fill(maker.state, range(1, MICROBATCHES))
    entry = entry_of(replace(maker.state.record, done=full(MICROBATCHES)))
    roster = Roster(0, 0, 0, maker.peer, (entry,), section=SECTIONS - 1, num_sections=SECTIONS)
    assert await maker.rounds.lead(roster) == ""
    await stage.until(lambda: maker.state.record.sections == 1 << SECTIONS - 1)
    taken = await other.rounds.fetcher.fetch_section(maker.peer, 0, SECTIONS - 1)
    held, (start, end) = maker.state.sections, maker.state.bounds_of(roster)
    assert held is not None
    assert torch.equal(taken.values, held.values_of(SECTIONS - 1))
    left = maker.rounds.compression.sums.pending[roster.average_id].flat[start:end] if codec != "none" else 0
    assert torch.allclose(taken.values + left, whole_sum(maker)[start:end], rtol=0, atol=1e-9)
    assert bool(taken.encoded) is (codec != "none")


async def test_an_encoded_section_is_refused_whose_roster_does_not_tell_its_size(make_group: MakeGroup) -> None:
    stage = make_group(6, replace(BY_SECTIONS, wire=WireConfig(weight_gradients="int8")))
    made = await make_sections(stage)
    lacking = next(member for member in stage.members.values() if not member.state.record.sections & 1)
    header, _, _ = await stage.members[made[0].leader].rounds.kept.get_average(0, 0, 0)
    check_header(header, lacking.state, 0, 0, lacking.rounds.compression)
    for wrong in ({"num_chunks": 0}, {"num_chunks": MOST_CHUNKS}, {"shares": (1,)}, {"codecs": ("int4",) * len(header.roster.entries)}):
        with pytest.raises(BadMessageError):
            check_header(replace(header, roster=replace(header.roster, **wrong)), lacking.state, 0, 0, lacking.rounds.compression)


async def test_a_fence_gives_up_the_sections_with_the_ledger(make_group: MakeGroup) -> None:
    stage = make_group(6, BY_SECTIONS)
    made = await make_sections(stage)
    state = stage.members[made[0].leader].state
    assert state.record.sections
    state.fence(2)
    assert (state.record.sections, state.sections) == (0, None)
