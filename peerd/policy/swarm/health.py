"""What a user should know about this peer and its run, as named states with a reason and a remedy."""

from __future__ import annotations

from dataclasses import dataclass

from peerd.policy.step.ledger import full, held, stage_step
from peerd.table.record import PeerRecord, Phase
from peerd.table.view import LiveView

STALLED_AFTER_S = 30.0
STALLED_AFTER_STEPS = 3.0


@dataclass(frozen=True, slots=True)
class HealthNote:
    """`severity` is info, warning or problem."""

    code: str
    title: str
    severity: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the run has come: the stages' steps added up, and the fewest microbatches that were missing since."""

    steps: int
    missing: int
    since_s: float
    """When it last came further."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the states are derived from."""

    mine: PeerRecord
    live: LiveView
    num_stages: int
    num_microbatches: int
    decision: str
    """The step rules' last reason."""
    still_s: float = 0.0
    """For how long the run has come no further."""
    step_s: float = 0.0
    """How long a step took lately; 0: unknown."""
    complete: bool = False


def advance(before: Progress | None, live: LiveView, num_stages: int, num_microbatches: int, now_s: float) -> Progress:
    """`before`, or what has come further. Rounds that fail and ledgers that are dropped are no progress; a resumed run begins anew."""
    stages = [(stage, stage_step(live, stage)) for stage in range(num_stages)]
    steps = sum(step for _, step in stages if step is not None)
    missing = sum(
        (full(num_microbatches) & ~held(live, stage, step)).bit_count() if step is not None else num_microbatches for stage, step in stages
    )
    if before is None or steps != before.steps or missing < before.missing:
        return Progress(steps, missing, now_s)
    return before


def health(facts: Facts) -> list[HealthNote]:
    """Problems first."""
    items = [item for item in (_empty_stages(facts), _no_trainer(facts), _stalled(facts), _inexact(facts), _joining(facts)) if item]
    return sorted(items, key=lambda item: ("problem", "warning", "info").index(item.severity))


def _empty_stages(facts: Facts) -> HealthNote | None:
    empty = [str(stage) for stage in range(facts.num_stages) if not facts.live.serving(stage)]
    if not empty:
        return None
    which = ("stage " if len(empty) == 1 else "stages ") + ", ".join(empty)
    return HealthNote("stage-empty", f"nobody serves {which}", "problem", "more peers have to join; training waits for them")


def _no_trainer(facts: Facts) -> HealthNote | None:
    if any(record.trains or (record.summary is not None and record.summary.trainers) for record in facts.live.records):
        return None
    return HealthNote("no-trainer", "no peer has the run's data", "problem", "start a peer that has the data, with --data PATH")


def _stalled(facts: Facts) -> HealthNote | None:
    """No microbatch added and no step finished anywhere for long; not while a stage is empty, which says why."""
    patience_s = max(STALLED_AFTER_S, STALLED_AFTER_STEPS * facts.step_s)
    if facts.complete or facts.still_s < patience_s or _empty_stages(facts) is not None:
        return None
    title = f"no progress for {facts.still_s:.0f} s: {_what_lacks(facts)}; this peer: {facts.decision}"
    return HealthNote("stalled", title, "problem", "it recovers by itself where it can; else `peerd peers` shows which stage needs a peer")


def _what_lacks(facts: Facts) -> str:
    """The stage that is behind the others, and by what."""
    steps = [(stage_step(facts.live, stage) or 0, stage) for stage in range(facts.num_stages)]
    step = min(steps)[0]
    for at, stage in steps:
        absent = (full(facts.num_microbatches) & ~held(facts.live, stage, at)).bit_count()
        averaged = any(record.phase is Phase.AVERAGED for record in facts.live.members(stage, at))
        if at == step and absent and not averaged:
            return f"stage {stage} lacks {absent} of {facts.num_microbatches} microbatches of step {step}"
    waiting = [stage for at, stage in steps if at == step]
    return f"stage {waiting[0]} has not averaged step {step}"


def _inexact(facts: Facts) -> HealthNote | None:
    given_up = facts.mine.lineage.inexact
    return HealthNote("inexact", f"{given_up} steps of this stage were given up", "warning", "see the log") if given_up else None


def _joining(facts: Facts) -> HealthNote | None:
    if facts.mine.phase is not Phase.JOINING:
        return None
    newest = stage_step(facts.live, facts.mine.stage)
    if newest is not None and 0 < facts.mine.step < newest:
        title = f"at step {facts.mine.step}, its stage at {newest}: {facts.decision}"
        return HealthNote("behind", title, "warning", "nothing to do; it catches up")
    return HealthNote("joining", facts.decision, "info", "nothing to do; it serves when the download is done")
