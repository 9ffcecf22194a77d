"""The wire form of a finished average, for a mate that missed it, and the checks that the mate makes."""

from __future__ import annotations

from torch import Tensor

from peerd.averaging.compression import Compression
from peerd.averaging.layout import RoundLayout
from peerd.averaging.slices import are_of
from peerd.errors import BadMessageError, OtherLineageError, WrongStateError
from peerd.link.links import CHUNK_BYTES
from peerd.policy.round.chunks import most_chunks
from peerd.policy.step.roster import Roster, why_inexact, why_no_plan, why_not_adopt
from peerd.stage.accumulator import all_finite
from peerd.stage.results import HeldAverage, TiedGradients
from peerd.stage.sections import SectionOfAverage
from peerd.stage.state import StageState
from peerd.table.record import NO_AVERAGE
from peerd.wire.chunks import CutFile
from peerd.wire.messages import Average
from peerd.wire.tensors import views_of_flat, whole_of


def packed(held: HeldAverage) -> tuple[Average, CutFile]:
    """Return the header, but for the hashes, and the file: the average, and behind it the gradients applied to a tied weight."""
    file = CutFile((*views_of_flat(held.flat_sum), *(views_of_flat(held.tied.values) if held.tied else ())), chunk_bytes=CHUNK_BYTES)
    tied_sum = held.tied.id if held.tied else NO_AVERAGE
    return Average(held.roster, held.lineage, file.num_bytes, tied_sum, held.norm, slices=held.slices), file


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
    length, values = state.round_length(average.roster), finite(whole_of((whole,), state.accumulator.flat.dtype))
    tied = TiedGradients(average.tied_sum, values[length:]) if average.tied_sum else None
    if not are_of(average.roster, average.slices, values[:length]):
        raise BadMessageError("an average that is not what its reducers have signed")
    return HeldAverage(average.roster, average.lineage, values[:length], tied, average.norm, slices=average.slices)


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
    roster = held.rosters.get(section) if held is not None else None
    if held is None or roster is None or roster.step != step:
        return None
    file = CutFile(held.encoded.get(section) or views_of_flat(held.values_of(section)), chunk_bytes=CHUNK_BYTES)
    return Average(roster, held.lineage, file.num_bytes), file


def unpacked_section(average: Average, whole: memoryview, state: StageState, compression: Compression) -> SectionOfAverage:
    """Take a section whose header and chunks were checked. Raises BadMessageError if it is not finite.

    In a lossy codec it comes as its reducers sent it: encoded once more it would be other numbers than its makers hold.
    """
    roster, dtype = average.roster, state.accumulator.flat.dtype
    if not compression.allowed.is_lossy:
        return SectionOfAverage(roster, finite(whole_of((whole,), dtype)))
    layout, (first, last), before = _layout_of(roster, state, compression), state.bounds_of(roster), 0
    values = state.accumulator.flat.new_empty(last - first, device="cpu")
    for reducer in range(layout.num_members):
        for number in range(layout.chunks_of(reducer)):
            where = layout.piece(reducer, number, reducer)
            after = before + compression.num_bytes(where)
            values[where.start - first : where.end - first] = compression.received((whole[before:after],), where)
            before = after
    return SectionOfAverage(roster, values, (whole,))


def finite(values: Tensor) -> Tensor:
    if not all_finite([values]):
        raise BadMessageError("an average, or a tied weight's gradients, that are not finite")
    return values
