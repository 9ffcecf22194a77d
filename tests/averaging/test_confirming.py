"""In a certified run members of a group's round, or of one for a section, go by what came of it once most of them say the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from blake3 import blake3

from peerd.averaging.confirming import Confirming
from peerd.config.manifest import WireConfig
from peerd.errors import BadMessageError, PeerGoneError, WrongStateError
from peerd.policy.step.certificates import average_id_of, statement_in
from peerd.policy.step.judging import NUM_JUDGES
from peerd.policy.step.roster import Roster
from peerd.table.record import AverageId, PeerId, Phase
from peerd.wire.messages import Beat, Frame, OutcomeWord
from peerd.wire.rosters import average_from, average_to
from tests.averaging.rounds_group import AVERAGING_S, MANIFEST, Group, Member, no_fault, whole_sum
from tests.averaging.test_group_sums import SECTIONS, gather, make_sections, proposed
from tests.paper_host import RUN

MakeGroup = Callable[..., Group]
CERTIFIED = replace(MANIFEST, swarm=replace(MANIFEST.swarm, trust="on", group_size=4))


async def averaged(make_group: MakeGroup, codec: str = "none") -> Group:
    stage = make_group(6, replace(CERTIFIED, wire=WireConfig(weight_gradients=codec)))
    await gather(stage, await make_sections(stage))
    await stage.settled(Phase.AVERAGED)
    return stage


def largest_group(stage: Group) -> Roster:
    """A round of a group with three members or more."""
    return max(proposed(stage, 0, 4), key=lambda roster: len(roster.entries))


@pytest.mark.parametrize("codec", ["none", "int8"])
async def test_all_end_with_one_average_whose_id_covers_the_numbers_of_all_sections(make_group: MakeGroup, codec: str) -> None:
    stage = await averaged(make_group, codec)
    first, *others = stage.members.values()
    held = first.state.average
    assert held is not None
    assert torch.allclose(first.average, whole_sum(first), rtol=0, atol=1e-12 if codec == "none" else 0.5)
    assert [proof.roster.section for proof in held.sections] == list(range(SECTIONS))
    assert held.roster.parts == tuple(proof.id for proof in held.sections)
    assert not {proof.roster.average_id for proof in held.sections} & {*held.roster.parts}
    assert held.rounds == tuple(proof.roster.average_id for proof in held.sections)
    assert all(proof.is_certified and len(proof.slices) == len(proof.roster.entries) for proof in held.sections)
    for member in others:
        assert torch.equal(member.average, first.average)
        assert member.state.record.average_id == first.state.record.average_id == held.id


async def test_a_mate_that_has_no_sections_fetches_the_whole_average_with_what_proves_each(make_group: MakeGroup) -> None:
    stage = await averaged(make_group)
    first, *_, last = stage.members.values()
    held = first.state.average
    assert held is not None
    found = await last.rounds.fetcher.fetch(first.peer, 0)
    assert torch.equal(found.flat_sum, held.flat_sum)
    assert found.id == held.id
    assert [proof.roster for proof in found.sections] == [proof.roster for proof in held.sections]
    header, _, _ = await first.rounds.kept.get_average(0, 0)
    assert average_from(average_to(header)) == header


def spoilt_slices(first: Member) -> None:
    held = first.state.average
    assert held is not None
    one, *rest = held.sections
    false = replace(one, slices=(replace(one.slices[0], root=bytes(32)), *one.slices[1:]))
    first.state.average = replace(held, sections=(false, *rest))


def spoilt_outcomes(first: Member) -> None:
    held = first.state.average
    assert held is not None
    one, *rest = held.sections
    first.state.average = replace(held, sections=(replace(one, outcomes=one.outcomes[:1]), *rest))


def spoilt_order(first: Member) -> None:
    held = first.state.average
    assert held is not None
    one, two, *rest = held.sections
    first.state.average = replace(held, sections=(two, one, *rest))


def spoilt_parts(first: Member) -> None:
    held = first.state.average
    assert held is not None
    first.state.average = replace(held, roster=replace(held.roster, parts=(AverageId(bytes(16)), *held.roster.parts[1:])))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (spoilt_slices, "not made of the sections that it proves"),
        (spoilt_outcomes, "most members of its round have not signed it"),
        (spoilt_order, "does not prove all of its sections"),
        (spoilt_parts, "not made of the sections that it proves"),
    ],
)
async def test_of_an_average_whose_sections_are_not_proven_nothing_is_downloaded(
    make_group: MakeGroup, spoil: Callable[[Member], None], words: str
) -> None:
    stage = await averaged(make_group)
    first, *_, last = stage.members.values()
    spoil(first)
    with pytest.raises(BadMessageError, match=words):
        await last.rounds.fetcher.fetch(first.peer, 0)


async def test_an_average_with_other_numbers_than_its_sections_were_signed_with_is_refused(make_group: MakeGroup) -> None:
    stage = await averaged(make_group)
    first, *_, last = stage.members.values()
    held = first.state.average
    assert held is not None
    first.state.average = replace(held, flat_sum=held.flat_sum + 1e-9)
    with pytest.raises(PeerGoneError, match="a section of an average that is not what its reducers have signed"):
        await last.rounds.fetcher.fetch(first.peer, 0)


async def test_a_section_without_the_signatures_of_most_makers_or_with_other_numbers_is_refused(make_group: MakeGroup) -> None:
    stage = make_group(6, CERTIFIED)
    made = await make_sections(stage)
    donor = stage.members[made[0].leader]
    lacking = next(member for member in stage.members.values() if not member.state.record.sections & 1)
    held = donor.state.sections
    assert held is not None
    proof = held.proofs[0]
    assert 2 * len(proof.outcomes) > len(proof.roster.entries) > 1
    for false, words in (
        (replace(proof, outcomes=proof.outcomes[: len(proof.roster.entries) // 2]), "most members of its round have not signed it"),
        (replace(proof, outcomes=(replace(proof.outcomes[0], signature=b"x"), *proof.outcomes[1:])), "not signed by a member"),
        (replace(proof, slices=proof.slices[1:]), "its slices are not those of its round"),
        (replace(proof, slices=(), outcomes=()), "its slices are not those of its round"),
    ):
        donor.state.sections = replace(held, proofs={**held.proofs, 0: false})
        with pytest.raises(BadMessageError, match=words):
            await lacking.rounds.fetcher.fetch_section(donor.peer, 0, 0)
    donor.state.sections = replace(held, flat=held.flat + 1e-9)
    donor.rounds.kept._hashes.clear()
    with pytest.raises(BadMessageError, match="a section that is not what its reducers have signed"):
        await lacking.rounds.fetcher.fetch_section(donor.peer, 0, 0)
    donor.state.sections = held
    donor.rounds.kept._hashes.clear()
    taken = await lacking.rounds.fetcher.fetch_section(donor.peer, 0, 0)
    assert taken.proof == proof


async def started(stage: Group, roster: Roster) -> Roster:
    """Open a round. Returns its roster with the leader's plan."""
    leader = stage.leader(roster)
    assert await leader.rounds.lead(roster) == ""
    assert leader.rounds.last is not None
    return leader.rounds.last.roster


def forks(stage: Group, liar: PeerId, roster: Roster) -> Callable[[PeerId, PeerId, Frame], Frame]:
    """The liar gives the last member of its round another sum than the others, and signs both."""
    told: dict[int, bytes] = {}
    victim = next(peer for peer in reversed(roster.peers) if peer != liar)

    def forge(sender: PeerId, receiver: PeerId, frame: Frame) -> Frame:
        current = stage.members[liar].rounds.last
        if sender != liar or receiver != victim or not frame.is_sum or current is None or frame.slice != current.exchange.me:
            return frame
        told[frame.number] = (torch.frombuffer(bytearray(b"".join(frame.chunks)), dtype=torch.float64) + 1.0).numpy().tobytes()
        false = replace(frame, chunks=(told[frame.number],))
        exchange, signatures = current.exchange, current.confirming._signatures
        if frame.slice_signature:
            root = blake3(b"".join(told[number] for number in sorted(told))).digest()
            false = replace(false, slice_signature=signatures.signed(current.roster, root).signature)
        return replace(false, signature=signatures.sign(exchange._text_of(false)))

    return forge


async def test_a_reducer_that_gives_members_of_its_group_unlike_sums_is_proven_a_liar_before_anybody_goes_by_them(
    make_group: MakeGroup,
) -> None:
    stage = make_group(6, CERTIFIED)
    roster = largest_group(stage)
    assert len(roster.entries) > 2
    liar = next(peer for peer in roster.peers if peer != roster.leader)
    stage.forge = forks(stage, liar, roster)
    honest = [stage.members[peer] for peer in roster.peers if peer != liar]
    done = {member.peer: member.state.record.done for member in honest}
    roster = await started(stage, roster)
    each_judge_has_had_its_turn_s = (2 + NUM_JUDGES) * AVERAGING_S  # if most have gone on before the victim shows its slices
    await stage.until(lambda: all(member.state.record.phase is Phase.ACCUMULATING for member in honest), each_judge_has_had_its_turn_s)
    proofs = [member.host.heard for member in honest if member.host.heard]
    assert proofs
    for one, other in proofs:
        (round_id, said), (_, also) = (statement_in(text, RUN) or pytest.fail("no statement") for text, _ in (one, other))
        assert (round_id, said.reducer, also.reducer) == (roster.average_id, liar, liar)
        assert said.root != also.root
    held = {member.peer: (member.state.record.done, member.state.record.group) for member in honest}
    took = [peer for peer, (_, group) in held.items() if group]
    assert len({stage.members[peer].state.accumulator.flat.sum().item() for peer in took}) <= 1, "nobody goes by what the minority has"
    assert all(held[peer] == (done[peer], b"") for peer in held if peer not in took)


@pytest.mark.parametrize("num_members", [2, 3])
async def test_a_member_that_does_not_say_what_came_of_a_round_is_left_out_where_its_word_is_needed(
    make_group: MakeGroup, num_members: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = make_group(6, CERTIFIED)
    whole = largest_group(stage)
    roster = replace(whole, entries=whole.entries[:num_members], leader=whole.entries[0].peer, credits=())
    mute = roster.peers[1:]
    words_for = Confirming.words_for

    def says_nothing(self: Confirming, peer: PeerId) -> tuple[OutcomeWord, ...]:
        return () if self._signatures.me in mute else words_for(self, peer)

    monkeypatch.setattr(Confirming, "words_for", says_nothing)
    leader = stage.members[roster.leader]
    began_s = asyncio.get_running_loop().time()
    roster = await started(stage, roster)
    await asyncio.sleep(2 * AVERAGING_S)
    assert leader.state.record.phase is Phase.ACCUMULATING
    assert leader.state.record.group == b""
    assert [void.peer for void in leader.state.record.voids] == [mute[0]]
    assert asyncio.get_running_loop().time() - began_s >= AVERAGING_S


async def test_who_has_no_word_yet_hears_it_from_members_that_have_gone_on(make_group: MakeGroup) -> None:
    stage = make_group(6, CERTIFIED)
    roster = largest_group(stage)
    late, *others = [stage.members[peer] for peer in reversed(roster.peers)]
    roster = await started(stage, roster)
    await stage.until(lambda: all(stage.members[peer].state.record.group for peer in roster.peers))
    gone = others[0]
    gone.rounds._retire()
    gone.rounds._known.confirmed[roster.average_id]._known_by.clear()  # as if nothing had come from the late one
    answer = gone.rounds.beat(late.peer, Beat(roster.average_id, (), (), 0.0))
    assert (answer.parts, answer.sums) == ((), ())
    assert {roster.peers[word.member] for word in answer.words} >= {gone.peer}
    slices = gone.rounds.joined[roster.average_id]
    assert {word.average_id for word in answer.words} == {average_id_of(roster, slices)}
    with pytest.raises(WrongStateError):
        gone.rounds.beat(PeerId("stranger"), Beat(roster.average_id, (), (), 0.0))
    with pytest.raises(WrongStateError):
        gone.rounds.beat(late.peer, Beat(AverageId(bytes(16)), (), (), 0.0))


async def test_a_word_that_its_author_has_not_signed_is_refused_and_ends_the_round_without_who_told_it(make_group: MakeGroup) -> None:
    stage = make_group(6, CERTIFIED)
    roster = largest_group(stage)

    async def stands(kind: str, _sender: PeerId, _receiver: PeerId) -> None:
        if kind in ("give", "take"):
            raise PeerGoneError("it stands")

    stage.fault = stands
    roster = await started(stage, roster)
    leader, teller = stage.members[roster.leader], next(peer for peer in roster.peers if peer != roster.leader)
    zeros = (0,) * len(roster.entries)
    false = OutcomeWord(0, AverageId(bytes(16)), b"x")
    for word in (false, replace(false, member=len(roster.entries)), replace(false, member=1 << 31)):
        with pytest.raises(BadMessageError):
            leader.rounds.beat(teller, Beat(roster.average_id, zeros, zeros, 0.0, words=(word,)))
    await stage.until(lambda: leader.state.record.phase is Phase.ACCUMULATING)
    stage.fault = no_fault
