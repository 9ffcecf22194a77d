"""Rule J3 (resume): what a joiner does when nobody serves its stage: begin the run, load a checkpoint, or wait.

After a blackout the record of every peer lists the steps of its stage that it holds on disk. The run resumes at the newest
step that every stage can provide, from a checkpoint or from peers that still serve (they hold the parameters of this
step and of the one before).
"""

from __future__ import annotations

from dataclasses import dataclass

from peerd.policy.step.acts import LoadCheckpoint, LoadStart, Serve, Wait
from peerd.policy.step.ledger import stage_step
from peerd.table.record import PeerRecord, Phase
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
    offers = [_offers(mine, live, stage, beginning.step) for stage in range(num_stages)]
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
    if step not in mine.checkpoints:
        return Wait(f"the run resumes at step {step}, which another peer of this stage holds")
    return LoadCheckpoint(f"the run resumes at step {step}, the newest that every stage can provide", step)


def _offers(mine: PeerRecord, live: LiveView, stage: int, first_step: int) -> frozenset[int]:
    """The steps at which some live peer can provide this stage's parameters."""
    newest = stage_step(live, stage)
    if newest is not None:
        return frozenset({newest, max(first_step, newest - 1)})
    joining = [r for r in live.records if r.stage == stage and r.phase is Phase.JOINING and r.peer != mine.peer]
    held = {step for record in joining for step in record.checkpoints}
    return frozenset(held | (set(mine.checkpoints) if mine.stage == stage else set()))
