"""Which messages a peer takes on, and from which peers it gets what it lacks."""

from __future__ import annotations

from peerd.policy.hashing import digest, turn_of
from peerd.policy.step.certificates import apart_from_most
from peerd.policy.step.ledger import is_frozen, ledger_of
from peerd.table.record import Lineage, PeerId, PeerRecord, Phase
from peerd.table.view import LiveView

MOST_DONORS = 8
"""Peers that a joiner downloads from at once. What it has measured of its own downlink says no more than what one of them could send."""


def why_refuse_call(mine: PeerRecord, *, stage: int, step: int, holds_previous: bool) -> str | None:
    """Rule W2 (call): None when this peer can compute this microbatch, now or after a commit, else the reason (holes 4 and 17)."""
    reason = _why_not_here(mine, stage)
    if reason is not None:
        return reason
    if mine.step <= step <= newest_taken(mine) or (step == mine.step - 1 and holds_previous):
        return None
    return f"this peer is at step {mine.step}"


def why_refuse_caller(caller: PeerRecord | None, live: LiveView, stage: int) -> str | None:
    """Rule W2 (call): None when this peer may send microbatches to a stage, else the reason (hole 85). Anybody may launch at the first one.

    `caller`: its last record, whether it counts as live or not, because who calls is there. None: nobody has told of it.
    """
    if stage == 0:
        return None
    if caller is None or caller.stage != stage - 1 or caller.phase is Phase.JOINING:
        return f"the caller is not known here as a peer that serves stage {stage - 1}"
    return f"most of stage {stage - 1} leave the caller out" if caller.peer in live.sidelined(stage - 1) else None


def newest_taken(record: PeerRecord) -> int:
    """The newest step whose microbatches this peer takes: one more than it has a ledger for, while it holds an average.

    Those microbatches wait for the commit, which needs only news of the other stages, and the trainer that launched them has that
    news. So the microbatches of a step travel while its parameters are being made.
    """
    return ledger_of(record) + (record.phase is Phase.AVERAGED)


def slots_for(steps_ahead: int, slots: int) -> int:
    """Number of slots that may be taken when a microbatch arrives whose step is `steps_ahead` of this peer's.

    The step before gets one slot more, because others have yet to finish it. Later steps get one fewer: otherwise microbatches
    launched ahead would keep out what the step under way lacks. An evaluation may be of any step and gets the plain number.
    """
    return {-1: slots + 1, 1: max(1, slots - 1), 2: max(1, slots - 1)}.get(steps_ahead, slots)


def able_to_compute(live: LiveView, stage: int, step: int) -> list[PeerRecord]:
    """Return the peers of a stage to send this step to: those that can add it to a ledger, now or after a commit; otherwise those just
    past it (hole 4) or about to leave.

    A peer that this one has not reached is asked only if no other is able: its record rises all the same where the link is dead in one
    direction (hole 22), and each call to it costs as long as the caller waits. So is one that is sidelined, whose work counts for nothing.
    """
    adding = [r for r in live.serving(stage) if r.step <= step <= newest_taken(r)]
    past = [r for r in live.serving(stage) if r.step == step + 1]
    avoided = {*(live.mine.unreached if live.mine is not None else ()), *live.sidelined(stage)}
    free = [r for r in adding if not r.leaving and not is_frozen(r, step)] if any(r.group for r in adding) else []
    staying = [free, [r for r in adding if not r.leaving], [r for r in past if not r.leaving]]
    reached = [[r for r in able if r.peer not in avoided] for able in staying]
    return next((able for able in (*reached, *staying, [*adding, *past]) if able), [])


def why_refuse_evaluation(mine: PeerRecord, *, stage: int, step: int, kept: int | None) -> str | None:
    """None when this peer can compute with the parameters of an evaluated step, else the reason. `kept`: the step they were kept for."""
    return _why_not_here(mine, stage) or (None if step in (mine.step, kept) else f"this peer does not hold the parameters of step {step}")


def _why_not_here(mine: PeerRecord, stage: int) -> str | None:
    """The reason why this peer computes nothing for others, whatever the step; None if there is none."""
    if stage != mine.stage:
        return f"this peer serves stage {mine.stage}"
    if mine.phase is Phase.JOINING:
        return "this peer is still joining"
    return "this peer is leaving" if mine.leaving else None


def donors(live: LiveView, stage: int, tried: frozenset[PeerId], certifies: bool = False) -> list[PeerRecord]:
    """Peers to download a stage's state from: newest step first, best lineage, reliable ones, fast uplinks; those that leave and those
    tried already last.

    Uplinks count by powers of two, and each joiner orders equal donors differently, so that many joiners do not meet at one donor. A
    leaving peer still gives: it may be the only one left with the newest step. In a run that certifies those come last that are at another
    step or lineage than most.
    """
    able = [r for r in live.serving(stage) if r.peer != live.me]
    apart = apart_from_most(able) if certifies else ()

    def order(record: PeerRecord) -> tuple[bool, bool, int, bool, Lineage, bool, int, bytes]:
        here = record.peer in tried, record.peer in apart, -record.step, record.leaving, record.lineage, not record.is_reliable
        return *here, -record.up.bit_length(), turn_of(live.me, record.peer)

    return sorted(able, key=order)


def givers_of_data(live: LiveView) -> list[PeerRecord]:
    """Peers to fetch the run's data from: all that train, reliable ones first. Each asking peer has an order of its own."""
    able = [r for r in live.records if r.trains and not r.leaving and r.peer != live.me]
    return sorted(able, key=lambda r: (not r.is_reliable, digest("data", live.me, r.peer, size=8)))


def givers_of_start(live: LiveView, tried: frozenset[PeerId]) -> list[PeerRecord]:
    """Peers to get the state that the run begins from: reliable ones first, those that leave last. Each joiner has an order of its own."""
    able = [r for r in live.records if r.gives_start and r.peer != live.me]
    return sorted(able, key=lambda r: (r.peer in tried, r.leaving, not r.is_reliable, turn_of(live.me, r.peer)))
