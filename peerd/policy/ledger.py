"""The ledger: which microbatches a stage holds, which are missing, and when one may be added.

`missing(s, t)` is the work queue of the swarm (DESIGN section 6).
"""

from __future__ import annotations

from collections.abc import Iterator

from peerd.table.record import PeerRecord, Phase
from peerd.table.view import LiveView


def full(num_microbatches: int) -> int:
    """The bitmap of the whole step, M_t."""
    return (1 << num_microbatches) - 1


def indices(bitmap: int) -> Iterator[int]:
    """Indices of the set bits, ascending."""
    while bitmap:
        low = bitmap & -bitmap
        yield low.bit_length() - 1
        bitmap ^= low


def held(live: LiveView, stage: int, step: int) -> int:
    """Union of the members' ledgers, as far as I know them or am told by those who speak for a stage far from mine.

    Only what to launch hangs on what is told, never whether a gradient may be added or averaged: that is for the stage's own peers.
    """
    bitmap = 0
    for record in live.members(stage, step):
        bitmap |= record.done
    for record in live.speakers(stage):
        if record.step == step and record.summary is not None:
            bitmap |= record.summary.held
    return bitmap


def missing(live: LiveView, stage: int, step: int, num_microbatches: int) -> int:
    return full(num_microbatches) & ~held(live, stage, step)


def stage_step(live: LiveView, stage: int) -> int | None:
    """The newest step of a stage's live peers that have its parameters; None where nobody serves it."""
    return max((record.step for record in live.serving(stage)), default=None)


def work_step(live: LiveView, num_stages: int) -> int | None:
    """The step the swarm works on: the least of the stages' newest steps. None while a stage has nobody."""
    steps = [stage_step(live, stage) for stage in range(num_stages)]
    known = [step for step in steps if step is not None]
    return min(known) if len(known) == num_stages else None


def stages_missing(live: LiveView, num_stages: int, step: int, num_microbatches: int) -> dict[int, int]:
    """For each stage that still accumulates `step`: its missing bitmap.

    A stage that is past the step, or has a member with the average already, needs nothing more.
    """
    wanted: dict[int, int] = {}
    for stage in range(num_stages):
        if stage_step(live, stage) != step:
            continue
        if any(record.phase is Phase.AVERAGED for record in live.members(stage, step)):
            continue
        absent = missing(live, stage, step, num_microbatches)
        if absent:
            wanted[stage] = absent
    return wanted


def accumulate_set(wanted: dict[int, int], index: int) -> frozenset[int]:
    """The stages that must add microbatch `index`."""
    return frozenset(stage for stage, absent in wanted.items() if absent >> index & 1)


def may_accumulate(mine: PeerRecord, live: LiveView, *, step: int, index: int, accept_mark: tuple[int, int]) -> str | None:
    """None when the gradient of (step, index) may be added now, else the reason why not.

    `mine` is my exact present state; `accept_mark` is (incarnation, ledger_no) when the call was accepted. Must be
    asked in the same critical section that adds the gradient and sets the bit (PROTOCOL, Accumulate; holes 7, 8, 9).
    """
    if mine.step != step:
        return "another step"
    if mine.phase is not Phase.ACCUMULATING:
        return "ledger is frozen"
    if accept_mark != (mine.incarnation, mine.ledger_no):
        return "ledger was dropped since"
    if mine.done >> index & 1:
        return "already held here"
    if any(record.done >> index & 1 for record in live.members(mine.stage, step) if record.peer != mine.peer):
        return "already held by a stage mate"
    return None
