"""A run that has diverged: the loss or the gradients of a step are not finite, so that step is never finished.

It is no decision that peers take: nothing is counted, nobody is banned, and all keep their state of that step. If what the trainers
say turns out to be wrong, the step is finished like any other.
"""

from __future__ import annotations

from peerd.policy.step.ledger import work_step
from peerd.table.view import LiveView

DIVERGED_REMEDY = (
    "begin anew from an earlier checkpoint, with a lower train.learning_rate (`peerd help organiser`); "
    "no update of this step was made, and checkpoints stay"
)


def diverged_step(live: LiveView, num_stages: int) -> int | None:
    """The step at which the run stands because its values are not finite: at least half of the trainers say so. None: it has not diverged.

    What a record says of a step that is over does not count.
    """
    trainers, step = [record for record in live.records if record.trains], work_step(live, num_stages)
    said = sum(record.diverged_at == step for record in trainers)
    return step if step is not None and said and 2 * said >= len(trainers) else None
