"""What a peer does with the checkpoints on its disk: rules J3 (resume), J5 (bring), J6 (return) and 14 (step back).

The record of every peer lists the steps of its stage that it holds on disk. Peers that serve also provide the parameters of
their stage's step and of the one before, its frontier. Where nobody serves some stage, the run resumes at the newest step
that every stage can provide.

The step before cannot be finished without the sum that it applied to a tied weight (tied.py). Only peers that finished it
themselves have that sum: a peer that loaded its state does not (hole 24). So a step that costs no other comes first; if there is
none, the run resumes at one that does, after a longer wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peerd.policy.step.acts import LoadCheckpoint, LoadStart, Serve, Wait
from peerd.policy.step.ledger import stage_step
from peerd.policy.step.situation import StepRules
from peerd.policy.step.tied import sum_told
from peerd.table.record import Lineage, PeerId, PeerRecord, Phase
from peerd.table.view import LiveView


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """What the run begins from, and whether this peer may begin it."""

    step: int = 0
    """The step at which the run starts."""
    needs_state: bool = False
    """The run begins from a state that some peers give (`gives_start`) and that this peer lacks; not from first weights."""
    founder: bool = True
    """This peer may begin the run. Any other waits for a peer that serves, because a view with only joiners may mean a blackout."""
    reached: int = 0
    """The newest step that the run had reached, as far as this peer's home folder shows."""

    @property
    def loses_steps(self) -> bool:
        """Whether the run had been further than this start. The steps after it are lost, which deserves a warning."""
        return self.reached > self.step

    def act(self, reason: str) -> Serve | LoadStart:
        """Begin the run."""
        return LoadStart(reason) if self.needs_state else Serve(reason)


def plan(
    mine: PeerRecord, live: LiveView, rules: StepRules, *, beginning: Beginning = Beginning(), newest_seen: int = 0
) -> Wait | Serve | LoadStart | LoadCheckpoint:
    """The act of a joiner whose stage nobody serves. `mine.checkpoints` are the steps of its stage on its disk.

    `newest_seen` is the highest step seen in any record, of live peers or not.
    """
    stages = range(rules.num_stages)
    offers = [_frontier(live, stage) | _on_disks(mine, live, stage) for stage in stages]
    begun = any(step > beginning.step for steps in offers for step in steps)
    if not begun and newest_seen > beginning.step:
        return Wait(f"the run was at step {newest_seen}, and nobody who holds its parameters is in sight")
    if not begun and not beginning.founder and not any(live.serving(stage) for stage in stages):
        return Wait("nobody who serves the run is in sight yet")
    if not begun and beginning.needs_state and not any(record.gives_start for record in live.records):
        return Wait("nobody who has the state that the run begins from is in sight")
    if not begun and beginning.loses_steps:
        lost = f"it was at step {beginning.reached}, of which no checkpoint is in sight"
        return beginning.act(f"the run begins anew at step {beginning.step}: {lost}")
    if not begun:
        return beginning.act("the run begins")
    for stage, steps in enumerate(offers):
        if not steps:
            return Wait(f"nobody who holds the parameters of stage {stage} is in sight")
    step, is_lossless = _newest_common(mine, live, rules)
    if step is None:
        return Wait("no step is held by every stage: peers with other checkpoints have to come back")
    ahead = [stage for stage in stages if live.serving(stage) and step not in _frontier(live, stage, rules if is_lossless else None)]
    if ahead:
        return Wait(f"the run resumes at step {step}, to which stage {ahead[0]} has to go back first")
    if step not in mine.checkpoints:
        return Wait(f"the run resumes at step {step}, which another peer of this stage holds")
    return LoadCheckpoint(f"the run resumes at step {step}, the newest that every stage can provide", step, is_lossless)


def checkpoint_to_bring(mine: PeerRecord, live: LiveView, rules: StepRules) -> LoadCheckpoint | None:
    """Rule J5 (bring): a joiner's own checkpoint that saves steps which its stage's serving peers have lost.

    They have lost steps if some other stage is two steps ahead of them: no peer of it holds the parameters that their step needs. The
    checkpoint must be newer than what they hold, and at most one step beyond every other stage; a later one is of a run that others
    have given up. A run of one stage goes on from the newest state, whoever holds it. None: nothing to bring.
    """
    newest, far = stage_step(live, mine.stage), rules.tied_to(mine.stage)
    others = _other_steps(mine, live, rules)
    if newest is None or (rules.num_stages > 1 and not is_left_behind(mine, newest, live, rules)):
        return None
    first, last = (max(others.values()) - 1, min(others.values()) + 1) if others else (0, max(mine.checkpoints, default=0))
    able = [step for step in mine.checkpoints if max(newest, mine.step) < step <= last]
    lossless = [step for step in able if first <= step and (far is None or step <= others.get(far, step))]
    if not able:
        return None
    return LoadCheckpoint(f"the stage is at step {newest}, and other stages cannot go on from there", max(lossless or able), bool(lossless))


def checkpoint_to_return_with(mine: PeerRecord, mates: Sequence[PeerRecord], rules: StepRules) -> LoadCheckpoint | None:
    """Rule J6 (return): a joiner's own checkpoint, from which averages that mates keep lead to its stage, if they are less than a state."""
    newest = max((mate.step for mate in mates), default=0)
    first = max(mine.step + 1, newest - rules.averages_in_state)
    led = [step for step in mine.checkpoints if first <= step and any(m.step - m.kept_averages <= step <= m.step for m in mates)]
    if not led:
        return None
    step = max(led)
    what = f"{newest - step} averages lead there" if step < newest else "there it is"
    return LoadCheckpoint(f"the stage is at step {newest}, and from the checkpoint of step {step} {what}", step, is_lasting=False)


def is_given_up(step: int, lineage: Lineage, mates: Sequence[PeerRecord]) -> bool:
    """Whether mates at this step have computed it anew, so that a checkpoint of another lineage is of a part of the run that they gave up.

    At a later step they show it by their averages, which it cannot take.
    """
    there = [mate for mate in mates if mate.step == step]
    return bool(there) and all(mate.lineage != lineage for mate in there)


def is_served_everywhere(live: LiveView, rules: StepRules) -> bool:
    """Whether some peer serves each stage. Otherwise no step can be finished."""
    return all(live.serving(stage) for stage in range(rules.num_stages))


def is_left_behind(mine: PeerRecord, step: int, live: LiveView, rules: StepRules) -> bool:
    """Whether another stage is two steps ahead of `step` of this one: no peer of it holds the parameters that `step` needs."""
    return max(_other_steps(mine, live, rules).values(), default=0) >= step + 2


def _other_steps(mine: PeerRecord, live: LiveView, rules: StepRules) -> dict[int, int]:
    """The newest step of every other stage that somebody serves."""
    return {stage: step for stage in range(rules.num_stages) if stage != mine.stage and (step := stage_step(live, stage)) is not None}


def holds_later(mine: PeerRecord, live: LiveView) -> bool:
    """Whether a joiner's disk holds a later step than its stage's serving peers, which the joiner would give up by taking their state."""
    newest = stage_step(live, mine.stage)
    return mine.phase is Phase.JOINING and newest is not None and max(mine.checkpoints, default=0) > max(newest, mine.step)


def step_to_go_back_to(mine: PeerRecord, live: LiveView, rules: StepRules) -> int | None:
    """Rule 14 (step back): the step at which the run can resume only if the peers that hold this stage go back to it.

    It is the newest step that every stage can provide, where nobody serves some stage, and its joiners hold neither the step of this
    stage nor the one before. None: there is no such need, or no such step. For a joiner that holds a newer state than its mates it is
    the step that the run resumes at without that state.

    Where every stage is served it is the step of the stage that is left behind by two steps or more, if all others can provide it.
    """
    if is_served_everywhere(live, rules):
        behind = step_of_stage_left_behind(mine, live, rules)
        return None if behind is None or behind in _frontier(live, mine.stage, rules) else behind
    newest = stage_step(live, mine.stage)
    joins_ahead = mine.phase is Phase.JOINING and (newest is None or newest < mine.step)
    held = frozenset({mine.step}) if joins_ahead else frozenset()
    step, is_lossless = _newest_common(mine, live, rules, held)
    return None if step in (held or _frontier(live, mine.stage, rules if is_lossless else None)) else step


def step_of_stage_left_behind(mine: PeerRecord, live: LiveView, rules: StepRules) -> int | None:
    """The step of a stage that is two steps or more behind another one, if every stage can provide it; None otherwise (hole 29)."""
    steps = [step for stage in range(rules.num_stages) if (step := stage_step(live, stage)) is not None]
    lowest = min(steps, default=0)
    if len(steps) < rules.num_stages or max(steps) < lowest + 2:
        return None
    offered = all(lowest in _frontier(live, stage, rules) | _on_disks(mine, live, stage) for stage in range(rules.num_stages))
    return lowest if offered else None


def peers_to_load(mine: PeerRecord, live: LiveView, rules: StepRules) -> frozenset[PeerId]:
    """Other peers of stages that nobody serves, which claim to have the step on disk at which the run can resume."""
    stages = [stage for stage in range(rules.num_stages) if not live.serving(stage)]
    step = _newest_common(mine, live, rules)[0] if stages else None
    found = (r for stage in stages for r in live.of_stage(stage) if r.peer != mine.peer)
    return frozenset(r.peer for r in found if step is not None and step in r.checkpoints)


def _newest_common(mine: PeerRecord, live: LiveView, rules: StepRules, held: frozenset[int] = frozenset()) -> tuple[int | None, bool]:
    """The newest step that every stage can provide, and whether no step is given up for it; None if there is no such step.

    `held` are steps of its stage that this peer can provide beside those that its record tells.
    """
    for limits in (rules, None):
        offers = [_frontier(live, stage, limits) | _on_disks(mine, live, stage) for stage in range(rules.num_stages)]
        offers[mine.stage] |= held
        common = frozenset.intersection(*offers)
        if common:
            return max(common), limits is not None
    return None, True


def _frontier(live: LiveView, stage: int, rules: StepRules | None = None) -> frozenset[int]:
    """The step of a stage's serving peers and the one before; empty if nobody serves it.

    With `rules`, the step before counts only if it can be finished exactly: where nobody serves the other end of a tied weight, some
    peer has to hold the sum that the step applied.
    """
    newest = stage_step(live, stage)
    if newest is None:
        return frozenset()
    before, far = max(0, newest - 1), None if rules is None else rules.tied_to(stage)
    if far is None or live.serving(far) or any(r.step < newest or sum_told(r, before) is not None for r in live.serving(stage)):
        return frozenset({newest, before})
    return frozenset({newest})


def _on_disks(mine: PeerRecord, live: LiveView, stage: int) -> frozenset[int]:
    """The steps of a stage on the disks of its live peers, joining or serving."""
    held = {step for record in live.of_stage(stage) if record.peer != mine.peer for step in record.checkpoints}
    return frozenset(held | (set(mine.checkpoints) if mine.stage == stage else set()))
