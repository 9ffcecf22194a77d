"""Where a run certifies, each reducer signs the slice that it gives, and a mate that gives an average gives what was signed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from peerd.averaging.slices import Signatures, are_of, why_unsigned
from peerd.config.manifest import SwarmConfig
from peerd.errors import BadMessageError, PeerGoneError, RemoteError
from peerd.policy.step.certificates import SignedSlice, statement_in, told_twice
from peerd.policy.step.parts import even_cuts, slice_bounds
from peerd.policy.step.roster import WHOLE, Roster
from peerd.stage.kept_parts import KeptParts
from peerd.table.record import AverageId, PeerId, Phase
from peerd.wire.messages import Frame
from peerd.wire.rosters import average_from, average_to
from peerd.wire.tensors import decode_flat
from tests.averaging.rounds_group import MANIFEST, Group, Member, whole_sum
from tests.paper_host import RUN

MakeGroup = Callable[..., Group]
CERTIFIED = replace(MANIFEST, swarm=SwarmConfig(trust="on", group_size=0))
ME, LIAR = PeerId("member0"), PeerId("member2")


async def averaged(group: Group) -> Group:
    """A round of all members."""
    roster = group.roster()
    assert await group.leader(roster).rounds.lead(roster) == ""
    await group.settled(Phase.AVERAGED)
    return group


def signatures_of(member: Member, run: bool = True) -> Signatures:
    return Signatures(member.peer, member.host.sign, member.host.has_signed, RUN if run else None)


def slices_of(member: Member) -> Sequence[SignedSlice]:
    assert member.state.average is not None
    return member.state.average.slices


@pytest.mark.parametrize("num_members", [1, 2, 4])
async def test_all_members_hold_the_same_slices_and_the_id_covers_them(make_group: MakeGroup, num_members: int) -> None:
    group = await averaged(make_group(num_members, CERTIFIED))
    members = [*group.members.values()]
    assert {slices_of(member) for member in members} == {slices_of(members[0])}
    assert [each.reducer for each in slices_of(members[0])] == [*group.members]
    ids = {member.state.record.average_id for member in members}
    roster = members[0].state.average.roster  # type: ignore[union-attr]
    assert len(ids) == 1
    assert roster.average_id not in ids
    assert torch.equal(members[0].average, whole_sum(members[0]))
    assert why_unsigned(roster, slices_of(members[0]), len(members[0].average), signatures_of(members[-1])) == ""
    assert are_of(roster, slices_of(members[0]), members[-1].average)


async def test_in_a_run_that_does_not_certify_nothing_is_signed_and_the_id_is_that_of_the_round(make_group: MakeGroup) -> None:
    group = await averaged(make_group(3))
    for member in group.members.values():
        assert member.state.average is not None
        assert member.state.average.slices == ()
        assert member.state.record.average_id == member.state.average.roster.average_id


async def test_a_slice_that_its_reducer_has_not_signed_ends_the_round_without_it(make_group: MakeGroup) -> None:
    group = make_group(4, CERTIFIED)

    def forge(sender: PeerId, _receiver: PeerId, frame: Frame) -> Frame:
        return replace(frame, slice_signature=b"x" * 32) if sender == LIAR and frame.slice_signature else frame

    group.forge = forge
    roster = group.roster()
    await group.leader(roster).rounds.lead(roster)
    honest = [member for peer, member in group.members.items() if peer != LIAR]
    await group.until(lambda: all(member.rounds.failed and member.state.record.phase is Phase.ACCUMULATING for member in honest))


async def test_nobody_signs_two_slices_of_one_round(make_group: MakeGroup) -> None:
    """A round whose id was forgotten among those that are closed is refused all the same, for as long as the step lasts."""
    group = await averaged(make_group(2, CERTIFIED))
    member = group.members[ME]
    assert member.state.average is not None
    roster = member.state.average.roster
    await member.rounds.give_up_average()
    assert member.state.record.phase is Phase.ACCUMULATING
    answer = await member.rounds.propose(roster.leader, roster)
    assert (answer.joined, answer.reason) == (False, "this round is closed")


async def fetched(group: Group, mate: PeerId) -> dict[PeerId, RemoteError]:
    blamed: dict[PeerId, RemoteError] = {}
    member = group.members[ME]
    found = await member.rounds.fetcher.fetch(mate, 0, (), lambda peer, error: blamed.update({peer: error}))
    assert torch.equal(found.flat_sum, group.members[mate].average)
    assert found.id == group.members[mate].state.record.average_id
    return blamed


async def test_an_average_is_fetched_with_its_slices(make_group: MakeGroup) -> None:
    group = await averaged(make_group(3, CERTIFIED))
    assert await fetched(group, LIAR) == {}


async def test_of_an_average_that_is_not_signed_nothing_is_downloaded(make_group: MakeGroup) -> None:
    group = await averaged(make_group(3, CERTIFIED))
    state = group.members[LIAR].state
    assert state.average is not None
    first, *others = state.average.slices
    state.average = replace(state.average, slices=(replace(first, root=bytes(32)), *others))
    with pytest.raises(BadMessageError, match="not signed by its reducer"):
        await fetched(group, LIAR)
    state.average = replace(state.average, slices=tuple(others))
    with pytest.raises(BadMessageError, match="not those of its round"):
        await fetched(group, LIAR)


async def test_of_numbers_that_the_reducers_have_not_signed_all_who_gave_them_are_told(make_group: MakeGroup) -> None:
    group = await averaged(make_group(3, CERTIFIED))
    state = group.members[LIAR].state
    assert state.average is not None
    state.average = replace(state.average, flat_sum=state.average.flat_sum + 1.0)
    blamed: dict[PeerId, RemoteError] = {}
    with pytest.raises(PeerGoneError, match="no sound average"):
        await group.members[ME].rounds.fetcher.fetch(LIAR, 0, (), lambda peer, error: blamed.update({peer: error}))
    assert [*blamed] == [LIAR]
    assert isinstance(blamed[LIAR], BadMessageError)


async def test_slices_travel_and_those_of_no_member_are_refused(make_group: MakeGroup) -> None:
    group = await averaged(make_group(3, CERTIFIED))
    kept = group.members[LIAR].rounds.kept
    average, _, _ = await kept.get_average(0, 0)
    header = average_to(average)
    assert average_from(header) == average
    for member, root in ((7, bytes(32)), (1, bytes(31))):
        wrong = average_to(average)
        wrong.slices[-1].member, wrong.slices[-1].root = member, root
        with pytest.raises(BadMessageError, match="slices"):
            average_from(wrong)


def test_shares_that_make_no_whole_are_refused_before_anything_is_cut_by_them() -> None:
    nobody = Signatures(ME, lambda text: text, lambda *_: True, RUN)
    entries = Roster(0, 0, 0, ME, ()).entries
    for shares in ((WHOLE + 1, -1), (WHOLE,)):
        assert "whole" in why_unsigned(Roster(0, 0, 0, ME, entries, (), shares), (), 10, nobody)


def test_a_statement_names_run_round_reducer_and_root() -> None:
    signed, round_id = SignedSlice(ME, b"r" * 32, b"s"), AverageId(b"i" * 16)
    text = signed.statement(RUN, round_id)
    assert statement_in(text, RUN) == (round_id, replace(signed, signature=b""))
    assert statement_in(text, RUN + "x") is None  # type: ignore[arg-type]
    assert statement_in(text[1:], RUN) is None
    assert statement_in(b"", RUN) is None
    assert told_twice((signed,), (replace(signed, root=b"q" * 32),)) is not None


@pytest.mark.parametrize("num_members", [2, 4])
async def test_each_member_keeps_a_signed_chunk_of_every_others_part(make_group: MakeGroup, num_members: int) -> None:
    """What it keeps of a mate is the mate's own sum before the round, and bears the mate's signature: rule 20 (audit)."""
    group = make_group(num_members, CERTIFIED)
    for member in group.members.values():
        around, kept = member.rounds._around, KeptParts(RUN, lambda step, peer=member.peer: f"{peer} {step}".encode())  # type: ignore[misc]
        member.rounds._around = replace(around, signatures=replace(around.signatures, parts=kept))
    own = {peer: member.state.accumulator.flat.clone() for peer, member in group.members.items()}
    await averaged(group)
    for reducer, (peer, member) in enumerate(group.members.items()):
        assert member.state.average is not None
        roster = member.state.average.roster
        found = member.rounds._around.signatures.parts
        assert found is not None
        parts = found.of(roster.average_id)
        assert sorted(part.author for part in parts) == sorted(set(roster.peers) - {peer})
        for part in parts:
            assert part.why_unsigned(RUN, member.host.has_signed) == part.why_not_judged(roster) == ""
            slice_number, author, number = part.place
            assert (slice_number, roster.peers[author]) == (reducer, part.author)
            start, end = even_cuts(*slice_bounds(roster, len(own[peer]))[reducer], roster.num_chunks)[number : number + 2]
            values = decode_flat(found.find(part.signed(RUN)).chunks, own[peer].dtype)
            assert torch.equal(values, own[part.author][start:end])
