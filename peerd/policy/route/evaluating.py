"""Which trainer evaluates which step, when another takes over, and which evaluation is the newest.

One trainer makes a whole evaluation, so that its mean needs no agreement. A second one, made by a trainer that thought the first
one stuck, costs time and gives the same value.
"""

from __future__ import annotations

from peerd.policy.route.launching import owners, those_who_train
from peerd.policy.step.ledger import work_step
from peerd.table.record import Evaluation
from peerd.table.view import LiveView

OWNER_INDEX = 1 << 32
"""Stands for the microbatch in the hash that says who owns an evaluation; no microbatch has this number."""


def due_step(step: int, every_steps: int, last_step: int) -> int | None:
    """The newest step at or before `step` that is evaluated: every `every_steps` steps, and the last one. None if there is none."""
    if not every_steps:
        return None
    return last_step if last_step and step >= last_step else step - step % every_steps


def newest_evaluation(live: LiveView, num_stages: int, mine: Evaluation | None) -> Evaluation | None:
    """Return the evaluation of the newest step that the swarm has reached, this peer's own included; ties go to the smaller loss."""
    reached = work_step(live, num_stages)
    told = [record.evaluation for record in live.records if record.evaluation is not None]
    known = [each for each in told if reached is not None and each.step <= reached] + ([mine] if mine is not None else [])
    return max(known, key=lambda each: (each.step, -each.loss), default=None)


def is_my_turn(live: LiveView, step: int, waited_s: float, takeover_s: float) -> bool:
    """True if this peer shall evaluate `step`, due for `waited_s`: the trainer of rank k begins after `takeover_s` times k."""
    ranked = owners(tuple(record.peer for record in those_who_train(live) if not record.leaving), step, OWNER_INDEX)
    return live.me in ranked and waited_s >= takeover_s * ranked.index(live.me)
