"""The ledger: which microbatches a stage holds, which are missing, and when a gradient may be added.

`missing(s, t)` is the work queue of the swarm: rule W1 (launch) in docs/protocol.md.

If updates are delayed, a peer at step t has a second ledger, for step t+1: its microbatches are computed with parameters
that lack the update of step t, so they need not wait for it. At a commit the second ledger becomes the first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import median_high

from peerd.policy.hashing import digest
from peerd.table.record import NO_AVERAGE, Aside, AverageId, PeerId, PeerRecord, Phase
from peerd.table.view import LiveView

MOST_HEARD = 15
"""Number of peers that are believed to speak for a distant stage. Others that say so are left out, other ones in each step."""
FEWEST = 3
"""Of fewer peers no majority can say who of them is wrong."""


def full(num_microbatches: int) -> int:
    """The bitmap in which every microbatch of the step is set, M_t."""
    return (1 << num_microbatches) - 1


def indices(bitmap: int) -> Iterator[int]:
    """Indices of the set bits, ascending."""
    while bitmap:
        low = bitmap & -bitmap
        yield low.bit_length() - 1
        bitmap ^= low


def held(live: LiveView, stage: int, step: int) -> int:
    """The union of the members' ledgers, and of the ledgers for this step of peers that are one step behind.

    A peer that still accumulates the last step while the stage is past it has missed the average and may never get it:
    nobody waits for what it holds. For a distant stage only what its speakers tell counts: what more than half of those say
    that are at the step, because one of them may be wrong. They decide only what is launched; whether a gradient may be added
    or averaged is decided by the stage's own peers.
    """
    speakers = live.speakers(stage)
    if not speakers:
        return _held_by(live, stage, step)
    heard = sorted(speakers, key=lambda record: digest("heard", step, record.peer, size=8))[:MOST_HEARD]
    told = [(record.step, record.summary) for record in heard if record.summary is not None]
    if (stage_step(live, stage) or 0) >= step:
        return _agreed([summary.held for at, summary in told if at == step])
    return _agreed([summary.next_held for at, summary in told if at == step - 1])


def _agreed(words: Sequence[int]) -> int:
    """The bits that are set in more than half of the words."""
    in_more_than = [0] * (len(words) // 2 + 1)
    for word in words:
        for number in reversed(range(1, len(in_more_than))):
            in_more_than[number] |= in_more_than[number - 1] & word
        in_more_than[0] |= word
    return in_more_than[-1]


def _held_by(live: LiveView, stage: int, step: int, but: PeerId | None = None) -> int:
    bitmap = 0
    for record in live.members(stage, step):
        bitmap |= record.done if record.peer != but else 0
    serving, left_out = live.serving(stage), {but, *live.sidelined(stage)}
    begun = any(record.step >= step for record in serving)
    for record in serving:
        if record.step == step - 1 and record.peer not in left_out and not (begun and record.phase is Phase.ACCUMULATING):
            bitmap |= record.next_done
    return bitmap


def holders(candidates: Iterable[PeerRecord], step: int, index: int) -> frozenset[PeerId]:
    """The peers whose ledger has this microbatch."""
    found = (
        record.peer
        for record in candidates
        if (record.step == step and record.done >> index & 1) or (record.step == step - 1 and record.next_done >> index & 1)
    )
    return frozenset(found)


def makers(candidates: Sequence[PeerRecord], step: int, index: int) -> frozenset[PeerId]:
    """The peers that have computed this microbatch, and may therefore still have its gradient: of a group one alone."""
    others = {r.peer for r in candidates if r.step == step and r.group and not r.own_done >> index & 1}
    return holders(candidates, step, index) - others


def missing(live: LiveView, stage: int, step: int, num_microbatches: int) -> int:
    return full(num_microbatches) & ~held(live, stage, step)


def stage_step(live: LiveView, stage: int) -> int | None:
    """The newest step of the live peers that serve a stage; None if nobody serves it.

    One that its mates leave out does not count: it may say that the stage has finished a step, so that nobody computes what is missing. For
    a distant stage: the median of its speakers' steps, because one of them may be wrong.
    """
    if stage not in live.stage_steps:
        live.stage_steps[stage] = _stage_step(live, stage)
    return live.stage_steps[stage]


def _stage_step(live: LiveView, stage: int) -> int | None:
    speakers = live.speakers(stage)
    if speakers:
        return median_high([record.step for record in speakers])
    left_out = live.sidelined(stage)
    if left_out:
        return max((record.step for record in live.serving(stage) if record.peer not in left_out), default=live.newest_step(stage))
    return live.newest_step(stage)


def work_step(live: LiveView, num_stages: int) -> int | None:
    """The step that the swarm works on: the minimum of the stages' newest steps. None while nobody serves some stage."""
    steps = [stage_step(live, stage) for stage in range(num_stages)]
    known = [step for step in steps if step is not None]
    return min(known) if len(known) == num_stages else None


def has_trainer(live: LiveView) -> bool:
    """Whether some live peer has the run's data, and so launches microbatches."""
    return any(record.trains or (record.summary is not None and record.summary.trainers) for record in live.records)


def why_no_work(live: LiveView, num_stages: int) -> str:
    """Why no microbatch passes all stages now, as this peer sees it; empty if one may."""
    empty = next((stage for stage in range(num_stages) if stage_step(live, stage) is None), None)
    if empty is not None:
        return f"no peer in sight serves stage {empty}"
    return "" if has_trainer(live) else "no peer in sight has the run's data"


def why_no_average(live: LiveView, stage: int, step: int) -> str:
    """Why nobody of a stage has the average of this step, nor is past it; empty if somebody is: rule 10 (commit), hole 5."""
    members, mine = live.members(stage, step), live.mine
    holders = (*members, *([mine] if mine is not None and (mine.stage, mine.step) == (stage, step) else ()))  # even if voided
    is_held = any(m.phase is Phase.AVERAGED for m in holders) or (stage_step(live, stage) or 0) > step
    return "" if is_held else f"stage {stage} has not averaged yet"


def on_their_way(live: LiveView, stage: int, step: int, given: Collection[PeerId] = ()) -> list[PeerRecord]:
    """The members of a stage that lack the average of this step, and stay: rule 10 (commit), hole 4.

    A member that can call nobody who has it is not waited for: hole 22 (one way to a mate). It is while it is among the `given`, to which
    this peer sends the sums of its round.
    """
    able = {m.peer for m in live.serving(stage) if m.step > step or (m.step == step and m.phase is Phase.AVERAGED)}
    waiting = [m for m in live.members(stage, step) if m.phase is not Phase.AVERAGED and not m.leaving]
    return [m for m in waiting if m.peer in given or not (able and able <= set(m.unreached))]


def why_not_averaged(live: LiveView, stage: int, step: int, given: Collection[PeerId] = ()) -> str:
    """Why some member of a stage lacks the average of this step; empty if all have it or are past it."""
    late = on_their_way(live, stage, step, given)
    behind = f"{late[0].peer} of stage {stage} is still {late[0].phase.name.lower()}" if late else ""
    return why_no_average(live, stage, step) or behind


def is_averaged(live: LiveView, num_stages: int, step: int) -> bool:
    """Whether every stage has averaged this step. A peer that has not committed it will commit once it hears that."""
    return not any(why_not_averaged(live, stage, step) for stage in range(num_stages))


def stages_missing(live: LiveView, num_stages: int, step: int, num_microbatches: int, early: bool = False) -> dict[int, int]:
    """The bitmap of missing microbatches of each stage that still accumulates `step`.

    A stage that is past the step, or that has a member with the average, needs nothing more; one that is in a round takes nothing before
    that has failed. With `early`, a stage that is one step behind is included, because steps overlap or because it is about to commit.
    """
    wanted: dict[int, int] = {}
    for stage in range(num_stages):
        newest = stage_step(live, stage)
        if newest != step and not (early and newest == step - 1):
            continue
        members = live.members(stage, step)
        if any(record.phase is Phase.AVERAGED for record in members) or _is_in_round(members):
            continue
        absent = missing(live, stage, step, num_microbatches)
        if absent:
            wanted[stage] = absent
    return wanted


def _is_in_round(members: Collection[PeerRecord]) -> bool:
    """Whether most members of a stage are in rounds. Their rosters have what members that are out of sight hold, too.

    In a stage of groups, what a group lacks whose round broke waits for the rounds of the others. The word of one member is not enough: it
    would keep its stage from all that is missing for as long as it likes.
    """
    return 2 * sum(record.phase is Phase.AVERAGING for record in members) > len(members)


def accumulate_set(wanted: dict[int, int], index: int) -> frozenset[int]:
    """The stages that must add microbatch `index`."""
    return frozenset(stage for stage, absent in wanted.items() if absent >> index & 1)


def ledger_of(record: PeerRecord) -> int:
    """The newest step for which this peer has a ledger."""
    return record.step + (record.next_ledger_no > 0)


def number_of(mine: PeerRecord, step: int) -> int:
    """The number of the ledger that takes microbatches of `step`. A step that is over has no ledger; the caller checks that."""
    return mine.next_ledger_no if step == mine.step + 1 else mine.ledger_no


def is_frozen(mine: PeerRecord, step: int) -> bool:
    """Whether nothing is added to this peer's ledger of `step`: it is in a round, or over, or the sum of a group."""
    return step == mine.step and (mine.phase is not Phase.ACCUMULATING or mine.group != NO_AVERAGE)


def may_accumulate(mine: PeerRecord, live: LiveView, *, step: int, index: int, accept_mark: tuple[int, int]) -> str | None:
    """Why the gradient of (step, index) may not be added now; None if it may.

    `mine` is this peer's exact present state; `accept_mark` is (incarnation, number of the step's ledger) when the call was accepted.
    Call this in the critical section that adds the gradient and sets the bit: rule W3 (accumulate), holes 7, 8 and 9.
    """
    early = step == mine.step + 1 and mine.next_ledger_no > 0
    if step != mine.step and not early:
        return "another step"
    if mine.phase is Phase.JOINING or is_frozen(mine, step):
        return "ledger is frozen"
    if accept_mark != (mine.incarnation, number_of(mine, step)):
        return "ledger was dropped since"
    if (mine.next_done if early else mine.done) >> index & 1:
        return "already held here"
    if _held_by(live, mine.stage, step, but=mine.peer) >> index & 1:
        return "already held by a stage mate"
    return None


# How a peer's own ledgers change


def with_overlap(mine: PeerRecord) -> PeerRecord:
    """Add an empty ledger for the next step, as a run whose steps overlap has from its beginning."""
    return replace(mine, next_ledger_no=mine.ledger_no + 1)


def marked(mine: PeerRecord, step: int, index: int, other: PeerId | None = None) -> PeerRecord:
    """Set the bit of (step, index), once its gradient is in the accumulator, or in the aside of what `other` may hold as well."""
    early, bit = step == mine.step + 1, 1 << index
    mine = replace(mine, next_done=mine.next_done | bit) if early else replace(mine, done=mine.done | bit)
    if other is None:
        return mine
    asides = mine.next_asides if early else mine.asides
    grown = (*(a for a in asides if a.other != other), Aside(other, bit | sum(a.done for a in asides if a.other == other)))
    return replace(mine, next_asides=grown) if early else replace(mine, asides=grown)


def this_dropped(mine: PeerRecord) -> PeerRecord:
    """Drop this step's ledger, so that its microbatches are missing again; the next step's ledger stays."""
    return replace(mine, done=0, asides=(), group=NO_AVERAGE, own_done=0, sections=0, ledger_no=_unused(mine))


def ledger_dropped(mine: PeerRecord, step: int) -> PeerRecord:
    """Drop the ledger of `step` alone: this step's, or the next one's if there is one."""
    return this_dropped(mine) if step == mine.step else replace(mine, next_done=0, next_asides=(), next_ledger_no=_unused(mine))


def both_dropped(mine: PeerRecord) -> PeerRecord:
    dropped = this_dropped(mine)
    return ledger_dropped(dropped, mine.step + 1) if mine.next_ledger_no else dropped


def with_sum(mine: PeerRecord, group: AverageId, done: int) -> PeerRecord:
    """Hold the sum of a group's round in place of the own ledger, which it contains. Nothing is added to it."""
    return replace(this_dropped(mine), done=done, group=group, own_done=mine.done)


def at_next_step(mine: PeerRecord) -> PeerRecord:
    """Move to the next step. Its ledger, if any, becomes this step's and keeps its number, so calls accepted for it still count."""
    if not mine.next_ledger_no:
        return replace(this_dropped(mine), step=mine.step + 1)
    begun = replace(this_dropped(mine), step=mine.step + 1, done=mine.next_done, asides=mine.next_asides, ledger_no=mine.next_ledger_no)
    return replace(begun, next_done=0, next_asides=(), next_ledger_no=_unused(mine))


def _unused(mine: PeerRecord) -> int:
    return 1 + max(mine.ledger_no, mine.next_ledger_no)
