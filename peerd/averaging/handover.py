"""The wire form of a finished average, for a mate that missed it, and the checks that the mate makes."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from peerd.averaging.compression import Compression
from peerd.averaging.layout import RoundLayout
from peerd.averaging.slice_norms import is_sum_out_of_bounds
from peerd.averaging.slices import Signatures, are_of, why_unproven, why_unsigned
from peerd.errors import BadMessageError, OtherLineageError, WrongStateError
from peerd.link.links import CHUNK_BYTES
from peerd.policy.round.chunks import most_chunks
from peerd.policy.step.confirming import RoundProof
from peerd.policy.step.roster import Roster, entry_of, whole_of, why_inexact, why_no_plan, why_not_adopt
from peerd.stage.accumulator import all_finite
from peerd.stage.results import HeldAverage, TiedGradients
from peerd.stage.sections import SectionOfAverage
from peerd.stage.state import StageState
from peerd.table.record import NO_AVERAGE
from peerd.wire.chunks import CutFile
from peerd.wire.messages import Average
from peerd.wire.tensors import views_of_flat
from peerd.wire.tensors import whole_of as values_in


def packed(held: HeldAverage) -> tuple[Average, CutFile]:
    """Return the header, but for the hashes, and the file: the average, and behind it the gradients applied to a tied weight."""
    file = CutFile((*views_of_flat(held.flat_sum), *(views_of_flat(held.tied.values) if held.tied else ())), chunk_bytes=CHUNK_BYTES)
    tied_sum = held.tied.id if held.tied else NO_AVERAGE
    bare = Average(held.roster, held.lineage, file.num_bytes, tied_sum, held.norm)
    return replace(bare, slices=held.slices, sections=held.sections), file


def check_header(average: Average, state: StageState, step: int, section: int | None, compression: Compression) -> None:
    """Raise RemoteError unless this is the header of an exact average of `step`, or of a section of it, that the state may take."""
    if reason := why_not_adopt(state.record, step, average.lineage):
        raise WrongStateError(reason) if step != state.record.step else OtherLineageError(reason)
    roster, due = average.roster, (state.record.stage, step, section or 0, 1 if section is None else state.averages_by[2])
    if (roster.stage, roster.step, roster.section, roster.num_sections) != due:
        raise BadMessageError("an average of another stage or step, or another section, than was asked for")
    if (reason := why_inexact(roster.entries, state.num_microbatches) or state.why_not_averaged(roster)) is not None:
        raise BadMessageError(f"the average is refused: {reason}")
    if average.num_bytes != (due_bytes := _num_bytes(average, state, section, compression)):
        raise BadMessageError(f"an average of {average.num_bytes} bytes where {due_bytes} are due")
    if len(average.chunk_hashes) != -(-due_bytes // CHUNK_BYTES):
        raise BadMessageError(f"an average of {average.num_bytes} bytes in {len(average.chunk_hashes)} chunks")


def _num_bytes(average: Average, state: StageState, section: int | None, compression: Compression) -> int:
    """The size that an average with this header has. Raises BadMessageError if the roster does not tell it."""
    if section is not None and compression.allowed.is_lossy:
        return sum(_layout_of(average.roster, state, compression).slice_bytes)
    start, end = state.bounds_of(average.roster)
    num_tied = state.accumulator.num_tied if average.tied_sum and section is None else 0
    return (end - start + num_tied) * state.accumulator.flat.itemsize


def unpacked(average: Average, whole: memoryview, state: StageState) -> HeldAverage:
    """Take an average whose header and chunks were checked. Raises BadMessageError if it is not finite, or not what was signed."""
    length, values = state.round_length(average.roster), finite(values_in((whole,), state.accumulator.flat.dtype))
    tied = TiedGradients(average.tied_sum, values[length:]) if average.tied_sum else None
    flat_sum, proofs = values[:length], average.sections
    if not are_of(average.roster, average.slices, flat_sum):
        raise BadMessageError("an average that is not what its reducers have signed")
    if not all(_is_within(proof, flat_sum, state) for proof in proofs):
        raise BadMessageError("a section of an average that is not what its reducers have signed")
    found = HeldAverage(average.roster, average.lineage, flat_sum, tied, average.norm, slices=average.slices, sections=proofs)
    return replace(found, is_too_large=_is_too_large(average, flat_sum, state))


def _is_too_large(average: Average, flat_sum: Tensor, state: StageState) -> bool:
    """Whether a round's sum that has this peer's present ledger in it is too large beside that: rule 22 (size)."""
    roster, mine = average.roster, state.record
    is_own = bool(average.slices) and state.looks_at_sizes and roster.entry_of(mine.peer) == entry_of(mine)
    return is_own and is_sum_out_of_bounds(roster, flat_sum, state.accumulator.flat, mine.peer, state.room_behind(roster))


def _is_within(proof: RoundProof, flat_sum: Tensor, state: StageState) -> bool:
    """Whether a section of this average is what its reducers have signed."""
    start, end = state.bounds_of(proof.roster)
    return end <= len(flat_sum) and _is_signed(proof, flat_sum[start:end], state)


def _is_signed(proof: RoundProof, values: Tensor, state: StageState) -> bool:
    """Whether these are the elements of a section that its reducers have signed."""
    roster, (first, _) = proof.roster, state.bounds_of(proof.roster)
    return are_of(roster, proof.slices, values, first, state.round_length(roster), state.room_behind(roster))


def why_unproven_average(average: Average, section: int | None, state: StageState, signatures: Signatures) -> str:
    """What is wrong with what proves the numbers of an average, or of a section of it; empty if nothing is: rule 18 (certify)."""

    def why(proof: RoundProof) -> str:
        return why_unproven(proof, state.round_length(proof.roster), signatures, state.room_behind(proof.roster))

    roster, proofs = average.roster, average.sections
    if section is not None:
        return why(average.proof)
    if not (roster.parts and signatures.certified_run):
        unsigned = why_unsigned(roster, average.slices, state.round_length(roster), signatures)
        return unsigned or ("it proves sections that it does not have" if proofs else "")
    due = [(state.record.stage, roster.step, number, state.averages_by[2]) for number in range(state.averages_by[2])]
    if [(proof.roster.stage, proof.roster.step, proof.roster.section, proof.roster.num_sections) for proof in proofs] != due:
        return "it does not prove all of its sections"
    if average.slices or roster != whole_of([proof.roster for proof in proofs], [proof.id for proof in proofs]):
        return "it is not made of the sections that it proves"
    inexact = (why_inexact(proof.roster.entries, state.num_microbatches) or why(proof) for proof in proofs)
    return next(filter(None, inexact), "")


def _layout_of(roster: Roster, state: StageState, compression: Compression) -> RoundLayout:
    """The chunks in which the round of a section sent its sums. Raises BadMessageError if there can be no such round."""
    start, end = state.bounds_of(roster)
    if roster.num_chunks > most_chunks(2 * (end - start) * state.accumulator.flat.itemsize):  # a codec may add to what is very small
        raise BadMessageError(f"a section of {end - start} elements in {roster.num_chunks} chunks")
    reason, codecs = why_no_plan(roster), compression.codecs_of(roster)
    if reason or codecs is None:
        raise BadMessageError(f"a section is refused: {reason or 'this run does not allow its codec'}")
    return RoundLayout(roster, state.round_length(roster), compression, codecs, state.room_behind(roster))


def packed_section(state: StageState, step: int, section: int) -> tuple[Average, CutFile] | None:
    """The header, but for the hashes, and the file of a section of the average of the step under way; None if it is not here."""
    held = state.sections
    proof = held.proofs.get(section) if held is not None else None
    if held is None or proof is None or proof.roster.step != step:
        return None
    file = CutFile(held.encoded.get(section) or views_of_flat(held.values_of(section)), chunk_bytes=CHUNK_BYTES)
    return Average(proof.roster, held.lineage, file.num_bytes, slices=proof.slices, outcomes=proof.outcomes), file


def unpacked_section(average: Average, whole: memoryview, state: StageState, compression: Compression) -> SectionOfAverage:
    """Take a section whose header and chunks were checked. Raises BadMessageError if it is not finite, or not what was signed.

    In a lossy codec it comes as its reducers sent it: encoded once more it would be other numbers than its makers hold.
    """
    encoded: tuple[memoryview, ...] = (whole,) if compression.allowed.is_lossy else ()
    if encoded:
        values = _decoded_section(average.roster, whole, state, compression)
    else:
        values = finite(values_in((whole,), state.accumulator.flat.dtype))
    if not _is_signed(average.proof, values, state):
        raise BadMessageError("a section that is not what its reducers have signed")
    return SectionOfAverage(average.roster, values, encoded, average.slices, average.outcomes)


def _decoded_section(roster: Roster, whole: memoryview, state: StageState, compression: Compression) -> Tensor:
    layout, (first, last), before = _layout_of(roster, state, compression), state.bounds_of(roster), 0
    values = state.accumulator.flat.new_empty(last - first, device="cpu")
    for reducer in range(layout.num_members):
        for number in range(layout.chunks_of(reducer)):
            where = layout.piece(reducer, number, reducer)
            after = before + compression.num_bytes(where)
            values[where.start - first : where.end - first] = compression.received((whole[before:after],), where)
            before = after
    return values


def finite(values: Tensor) -> Tensor:
    if not all_finite([values]):
        raise BadMessageError("an average, or a tied weight's gradients, that are not finite")
    return values
