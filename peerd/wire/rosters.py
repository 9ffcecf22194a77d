"""Rosters as they travel: in proposals, and with finished averages.

The ledgers of a roster are disjoint, so it takes a few bits to tell who holds a microbatch. A proposal names members by marks, which are
short, as its callee nearly always knows them all. So a proposal to 300 members of a step with 4,096 microbatches has less than 10 KB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

from peerd.config.codec import NONE
from peerd.errors import BadMessageError
from peerd.generated import averaging_pb2
from peerd.policy.hashing import digest
from peerd.policy.step.certificates import SignedSlice, Slices, average_id_of
from peerd.policy.step.confirming import RoundProof, SignedOutcome
from peerd.policy.step.groups import MAX_SECTIONS
from peerd.policy.step.roster import MOST_CREDITS, Credit, Roster, RosterEntry
from peerd.table.forms import bitmap_to
from peerd.table.record import AverageId, Lineage, PeerId, RunId
from peerd.wire.convert import MAX_LINEAGE_BYTES, MAX_ROSTER, are_hashes, bitmap_from, known_codec, short_signature, slices_from
from peerd.wire.messages import Average

MARK_BYTES, MARKS_REMEMBERED = 8, 1 << 12


def roster_to(roster: Roster, marked: bool = False) -> averaging_pb2.Roster:
    """Its ledgers are disjoint. `marked`: with marks in place of the peers, for somebody who knows them."""
    codecs = sorted(set(roster.codecs))
    return averaging_pb2.Roster(
        stage=roster.stage,
        step=roster.step,
        attempt=roster.attempt,
        leader=roster.leader,
        peers=() if marked else roster.peers,
        marks=b"".join(map(mark_of, roster.peers)) if marked else b"",
        incarnations=[entry.incarnation for entry in roster.entries],
        ledger_nos=[entry.ledger_no for entry in roster.entries],
        holders=[bitmap_to(plane) for plane in _planes([entry.done for entry in roster.entries])],
        codecs=codecs,
        codec_of=bytes(map(codecs.index, roster.codecs)),
        shares=roster.shares,
        num_chunks=roster.num_chunks,
        expected_s=roster.expected_s,
        credited=() if marked else [credit.peer for credit in roster.credits],
        credited_marks=b"".join(mark_of(credit.peer) for credit in roster.credits) if marked else b"",
        credits=[bitmap_to(plane) for plane in _planes([credit.done for credit in roster.credits])],
        section=roster.section,
        num_sections=roster.num_sections if roster.num_sections > 1 else 0,
        averages_parameters=roster.averages_parameters,
        parts=roster.parts,
    )


def roster_from(message: averaging_pb2.Roster, peers: Sequence[PeerId] | None = None, credited: Sequence[PeerId] | None = None) -> Roster:
    """`peers` and `credited`: whom the marks mean."""
    names = [PeerId(peer) for peer in message.peers] if peers is None else peers
    if max(len(names), len(message.holders)) > MAX_ROSTER:
        raise BadMessageError(f"a roster of {len(names)} peers")
    if not len(names) == len(message.incarnations) == len(message.ledger_nos):
        raise BadMessageError("a roster does not say the same of each member")
    ledgers = _ledgers([bitmap_from(plane) for plane in message.holders], len(names))
    entries = tuple(map(RosterEntry, names, message.incarnations, message.ledger_nos, ledgers))
    if max(len(message.codec_of), len(message.shares)) > len(entries) or max(message.codec_of, default=-1) >= len(message.codecs):
        raise BadMessageError("a roster with more codecs or shares than members")
    known = [str(known_codec(name) or NONE) for name in message.codecs]
    codecs, shares = tuple(known[place] for place in message.codec_of), tuple(message.shares)
    leader = PeerId(message.leader)
    of_groups = _credits(message, [PeerId(peer) for peer in message.credited] if credited is None else credited)
    if max(len(message.parts), message.num_sections) > MAX_SECTIONS or any(len(part) > MAX_LINEAGE_BYTES for part in message.parts):
        raise BadMessageError(f"a roster of {max(len(message.parts), message.num_sections)} sections, or with a part that is no id")
    return Roster(
        message.stage,
        message.step,
        message.attempt,
        leader,
        entries,
        codecs,
        shares,
        message.num_chunks,
        message.expected_s,
        of_groups,
        message.section,
        max(1, message.num_sections),
        message.averages_parameters,
        tuple(map(AverageId, message.parts)),
    )


def _credits(message: averaging_pb2.Roster, names: Sequence[PeerId]) -> tuple[Credit, ...]:
    if len(names) > MOST_CREDITS:
        raise BadMessageError(f"a roster that credits {len(names)} peers")
    ledgers = _ledgers([bitmap_from(plane) for plane in message.credits], len(names))
    return tuple(map(Credit, names, ledgers))


@lru_cache(maxsize=MARKS_REMEMBERED)
def mark_of(peer: PeerId) -> bytes:
    """What names a peer to somebody who knows it."""
    return digest("mark", peer, size=MARK_BYTES)


def proposal_to(roster: Roster, run: RunId, marked: bool) -> averaging_pb2.Proposal:
    average_id = roster.average_id if marked else b""
    return averaging_pb2.Proposal(run=run, roster=roster_to(roster, marked), average_id=average_id)


def proposal_from(proposal: averaging_pb2.Proposal, known: Callable[[], Iterable[PeerId]]) -> Roster | None:
    """The roster that is proposed; None if its marks do not tell who is in it, to somebody who knows these peers."""
    marks = proposal.roster.marks
    if not (marks or proposal.roster.credited_marks):
        return roster_from(proposal.roster)
    if len(marks) > MARK_BYTES * MAX_ROSTER:
        raise BadMessageError(f"a roster of {len(marks) // MARK_BYTES} peers")
    if len(proposal.roster.credited_marks) > MARK_BYTES * MOST_CREDITS:
        raise BadMessageError(f"a roster that credits {len(proposal.roster.credited_marks) // MARK_BYTES} peers")
    peers = {mark_of(peer): peer for peer in known()}
    named, credited = _named(marks, peers), _named(proposal.roster.credited_marks, peers)
    if named is None or credited is None:
        return None
    roster = roster_from(proposal.roster, named, credited)
    return roster if roster.average_id == proposal.average_id else None


def _named(marks: bytes, peers: Mapping[bytes, PeerId]) -> list[PeerId] | None:
    """Whom the marks mean; None if one of them means nobody."""
    found = [peers.get(marks[start : start + MARK_BYTES]) for start in range(0, len(marks), MARK_BYTES)]
    named = [peer for peer in found if peer is not None]
    return named if len(named) == len(found) else None


def _planes(ledgers: Sequence[int]) -> list[int]:
    """For each bit of a member's place + 1, the microbatches that such members hold. The ledgers are disjoint."""
    planes = [0] * len(ledgers).bit_length()
    for number, done in enumerate(ledgers, 1):
        for bit in range(number.bit_length()):
            planes[bit] |= done if number >> bit & 1 else 0
    return planes


def _ledgers(planes: Sequence[int], num_members: int) -> list[int]:
    """The ledgers again. They are disjoint, whatever the planes are."""
    if len(planes) != num_members.bit_length():
        raise BadMessageError(f"a roster of {num_members} peers that tells the holders in {len(planes)} bits")
    found = []
    for number in range(1, num_members + 1):
        held = -1
        for bit, plane in enumerate(planes):
            held &= plane if number >> bit & 1 else ~plane
        found.append(held)
    return found


def _slices_to(slices: Slices, peers: Sequence[PeerId]) -> list[averaging_pb2.SliceRoot]:
    return [averaging_pb2.SliceRoot(member=peers.index(each.reducer), root=each.root, signature=each.signature) for each in slices]


def _outcomes_to(outcomes: Sequence[SignedOutcome], peers: Sequence[PeerId]) -> list[averaging_pb2.Outcome]:
    return [averaging_pb2.Outcome(member=peers.index(each.member), signature=each.signature) for each in outcomes]


def _section_to(proof: RoundProof) -> averaging_pb2.Section:
    peers = proof.roster.peers
    slices, outcomes = _slices_to(proof.slices, peers), _outcomes_to(proof.outcomes, peers)
    return averaging_pb2.Section(roster=roster_to(proof.roster), slices=slices, outcomes=outcomes)


def average_to(average: Average) -> averaging_pb2.AverageHeader:
    return averaging_pb2.AverageHeader(
        roster=roster_to(average.roster),
        num_bytes=average.num_bytes,
        chunk_blake3=average.chunk_hashes,
        inexact=average.lineage.inexact,
        lineage=average.lineage.chain,
        tied_sum=average.tied_sum,
        norm=average.norm,
        slices=_slices_to(average.slices, average.roster.peers),
        outcomes=_outcomes_to(average.outcomes, average.roster.peers),
        sections=map(_section_to, average.sections),
    )


def average_from(header: averaging_pb2.AverageHeader) -> Average:
    lineage, tied_sum = Lineage(header.inexact, header.lineage), AverageId(header.tied_sum[:MAX_LINEAGE_BYTES])
    norm = header.norm if header.HasField("norm") else None
    if norm is not None and not norm >= 0:  # nor not a number
        raise BadMessageError("an average with a gradient norm that is none")
    hashes = tuple(header.chunk_blake3)
    if not are_hashes(hashes):
        raise BadMessageError("an average whose chunks have damaged hashes")
    if len(header.sections) > MAX_SECTIONS:
        raise BadMessageError(f"an average of {len(header.sections)} sections")
    proof, sections = _proof_from(header), tuple(map(_proof_from, header.sections))
    return Average(proof.roster, lineage, header.num_bytes, tied_sum, norm, hashes, proof.slices, proof.outcomes, sections)


def _proof_from(message: averaging_pb2.AverageHeader | averaging_pb2.Section) -> RoundProof:
    """What proves the numbers of a round. Signatures are checked later."""
    roster = roster_from(message.roster)
    peers, slices = roster.peers, slices_from(message.slices)
    members = [each.member for each in message.outcomes]
    if members != sorted(set(members)) or max([*members, *(each.member for each in slices)], default=-1) >= len(peers):
        raise BadMessageError("the slices or outcomes of an average are of no members, or not in their order")
    signed = tuple(SignedSlice(peers[each.member], each.root, each.signature) for each in slices)
    average_id = average_id_of(roster, signed)
    outcomes = (SignedOutcome(peers[each.member], average_id, short_signature(each.signature)) for each in message.outcomes)
    return RoundProof(roster, signed, tuple(outcomes))
