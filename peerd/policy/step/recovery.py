"""What a peer does with the checkpoints on its disk: rules J3 (resume), J5 (bring) and 14 (step back).

The record of every peer lists the steps of its stage that it holds on disk. Peers that serve also provide the parameters of
their stage's step and of the one before, its frontier. Where nobody serves some stage, the run resumes at the newest step
that every stage can provide.
"""

from __future__ import annotations

from dataclasses import dataclass

from peerd.policy.step.acts import LoadCheckpoint, LoadStart, Serve, Wait
from peerd.policy.step.ledger import stage_step
from peerd.table.record import PeerRecord
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
    mine: PeerRecord, live: LiveView, num_stages: int, *, beginning: Beginning = Beginning(), newest_seen: int = 0
) -> Wait | Serve | LoadStart | LoadCheckpoint:
    """The act of a joiner whose stage nobody serves. `mine.checkpoints` are the steps of its stage on its disk.

    `newest_seen` is the highest step seen in any record, of live peers or not.
    """
    offers = [_frontier(live, stage) | _on_disks(mine, live, stage) for stage in range(num_stages)]
    begun = any(step > beginning.step for steps in offers for step in steps)
    if not begun and newest_seen > beginning.step:
        return Wait(f"the run was at step {newest_seen}, and nobody who holds its parameters is in sight")
    if not begun and not beginning.founder and not any(live.serving(stage) for stage in range(num_stages)):
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
    common = frozenset.intersection(*offers)
    if not common:
        return Wait("no step is held by every stage: peers with other checkpoints have to come back")
    step = max(common)
    ahead = [stage for stage in range(num_stages) if live.serving(stage) and step not in _frontier(live, stage)]
    if ahead:
        return Wait(f"the run resumes at step {step}, to which stage {ahead[0]} has to go back first")
    if step not in mine.checkpoints:
        return Wait(f"the run resumes at step {step}, which another peer of this stage holds")
    return LoadCheckpoint(f"the run resumes at step {step}, the newest that every stage can provide", step)


def step_to_bring(mine: PeerRecord, live: LiveView, num_stages: int) -> int | None:
    """Rule J5 (bring): the step of a joiner's own checkpoint that saves steps which its stage's serving peers have lost.

    They have lost steps if some other stage is two steps ahead of them: no peer of it holds the parameters that their step needs. The
    checkpoint must be newer than what they hold, and at most one step beyond every other stage; a later one is of a run that others
    have given up. A run of one stage goes on from the newest state, whoever holds it. None: nothing to bring.
    """
    newest = stage_step(live, mine.stage)
    others = [step for stage in range(num_stages) if stage != mine.stage and (step := stage_step(live, stage)) is not None]
    if newest is None or (num_stages > 1 and (not others or max(others) < newest + 2)):
        return None
    most = min(others) + 1 if others else None
    able = [step for step in mine.checkpoints if step > max(newest, mine.step) and (most is None or step <= most)]
    return max(able, default=None)


def step_to_go_back_to(mine: PeerRecord, live: LiveView, num_stages: int) -> int | None:
    """Rule 14 (step back): the step at which the run can resume only if the peers that serve this stage go back to it.

    It is the newest step that every stage can provide, where nobody serves some other stage and its joiners hold neither the
    step of this stage nor the one before. None: there is no such need, or no such step.
    """
    frontier = _frontier(live, mine.stage)
    if not frontier or all(live.serving(stage) for stage in range(num_stages)):
        return None
    common = frozenset.intersection(*(_frontier(live, stage) | _on_disks(mine, live, stage) for stage in range(num_stages)))
    step = max(common, default=None)
    return None if step in frontier else step


def _frontier(live: LiveView, stage: int) -> frozenset[int]:
    """The steps whose parameters the serving peers of a stage hold; empty if nobody serves it."""
    newest = stage_step(live, stage)
    return frozenset() if newest is None else frozenset({newest, max(0, newest - 1)})


def _on_disks(mine: PeerRecord, live: LiveView, stage: int) -> frozenset[int]:
    """The steps of a stage on the disks of its live peers, joining or serving."""
    held = {step for record in live.of_stage(stage) if record.peer != mine.peer for step in record.checkpoints}
    return frozenset(held | (set(mine.checkpoints) if mine.stage == stage else set()))
