"""The wire form of a finished average, for a mate that missed it, and the checks that the mate makes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from peerd.errors import BadMessageError
from peerd.link.links import Bytes
from peerd.policy.step.roster import Roster, why_inexact
from peerd.stage.accumulator import all_finite
from peerd.stage.results import HeldAverage, TiedGradients
from peerd.stage.state import StageState
from peerd.table.record import NO_AVERAGE
from peerd.wire.chunks import digest_of
from peerd.wire.messages import Average
from peerd.wire.tensors import views_of_flat, whole_of


def packed(held: HeldAverage) -> tuple[Average, Sequence[Bytes]]:
    """Return the header and the chunks: the average, followed by the gradients applied to a tied weight if there are any."""
    chunks = (*views_of_flat(held.flat_sum), *(views_of_flat(held.tied.values) if held.tied else ()))
    num_bytes = sum(map(len, chunks))
    return Average(held.roster, held.lineage, num_bytes, held.tied.id if held.tied else NO_AVERAGE, held.norm), chunks


def unpacked(received: tuple[Average, bytes, Sequence[Bytes]], state: StageState, step: int) -> HeldAverage:
    """Decode and check an average. Raises BadMessageError unless it is an average of this stage at `step`."""
    average, checksum, chunks = received
    dtype, length = state.accumulator.flat.dtype, state.round_length(average.roster)
    num_tied = state.accumulator.num_tied if average.tied_sum else 0
    if sum(len(chunk) for chunk in chunks) != (length + num_tied) * dtype.itemsize:
        raise BadMessageError("the average has another length than the stage's parameters")
    if digest_of(chunks) != checksum:
        raise BadMessageError("the average does not match its hash")
    whole = whole_of(chunks, dtype)
    check_average(average.roster, whole[:length], state, step)
    tied = TiedGradients(average.tied_sum, finite(whole[length:])) if num_tied else None
    return HeldAverage(average.roster, average.lineage, whole[:length], tied, average.norm)


def packed_section(state: StageState, step: int, section: int) -> tuple[Average, Sequence[Bytes]] | None:
    """The header and the chunks of a section of the average of the step under way; None if it is not here."""
    held = state.sections
    roster = held.rosters.get(section) if held is not None else None
    if held is None or roster is None or roster.step != step:
        return None
    values = held.values_of(section)
    return Average(roster, held.lineage, values.nbytes), views_of_flat(values)


def unpacked_section(received: tuple[Average, bytes, Sequence[Bytes]], state: StageState, step: int, section: int) -> tuple[Roster, Tensor]:
    """Decode and check a section. Raises BadMessageError unless it is this one, of an exact average of this stage at `step`."""
    average, checksum, chunks = received
    roster = average.roster
    if (roster.stage, roster.step, roster.section, roster.num_sections) != (state.record.stage, step, section, state.num_sections):
        raise BadMessageError("a section of another average than was asked for")
    if (reason := why_inexact(roster.entries, state.num_microbatches)) is not None:
        raise BadMessageError(f"a section of an average is refused: {reason}")
    if digest_of(chunks) != checksum:
        raise BadMessageError("a section of an average does not match its hash")
    values = whole_of(chunks, state.accumulator.flat.dtype)
    if not all_finite([values]):
        raise BadMessageError("a section of an average that is not finite")
    return roster, values


def check_average(roster: Roster, flat_sum: Tensor, state: StageState, step: int) -> None:
    """Raises BadMessageError unless this is an exact average of the state's stage at `step`."""
    reason = why_inexact(roster.entries, state.num_microbatches)
    if (roster.stage, roster.step, roster.num_sections) != (state.record.stage, step, 1):
        reason = "it is of another stage or step, or a section"
    if flat_sum.shape != (state.round_length(roster),) or flat_sum.dtype != state.accumulator.flat.dtype:
        reason = "it has another length than the stage's parameters"
    elif not all_finite([flat_sum]):
        reason = "it is not finite"
    if reason := reason or state.why_not_averaged(roster):
        raise BadMessageError(f"the average is refused: {reason}")


def finite(values: Tensor) -> Tensor:
    if not all_finite([values]):
        raise BadMessageError("a tied weight's gradients that are not finite")
    return values
