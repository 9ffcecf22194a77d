"""Which trainer evaluates which step, when another takes over, and which evaluation is the newest.

One trainer makes a whole evaluation, so that its mean needs no agreement. A second one, made by a trainer that thought the first
one stuck, costs time and gives the same value.
"""

from __future__ import annotations

from statistics import median_low

from peerd.policy.hashing import digest
from peerd.policy.route.launching import those_who_train
from peerd.policy.step.ledger import work_step
from peerd.table.record import Evaluation
from peerd.table.view import LiveView

LEAST_TAKEOVER_S, FIRST_TAKEOVER_S = 60.0, 600.0
"""An owner that is alive but has announced no result counts as stuck after this time at the earliest; the second one while it is not known
here how long steps take."""
TAKEOVER_TIMES = 3.0
"""How often the time that the last evaluation took, or that so many microbatches of a step take."""


def due_step(step: int, every_steps: int, last_step: int) -> int | None:
    """The newest step at or before `step` that is evaluated: every `every_steps` steps, and the last one. None if there is none."""
    if not every_steps:
        return None
    return last_step if last_step and step >= last_step else step - step % every_steps


def newest_evaluation(live: LiveView, num_stages: int, mine: Evaluation | None) -> Evaluation | None:
    """Return the evaluation of the newest step that the swarm has reached, this peer's own included: the median of what is told of it."""
    reached = work_step(live, num_stages)
    told = [record.evaluation for record in live.records if record.evaluation is not None]
    known = [each for each in told if reached is not None and each.step <= reached] + ([mine] if mine is not None else [])
    newest = max((each.step for each in known), default=None)
    return None if newest is None else Evaluation(newest, median_low([each.loss for each in known if each.step == newest]))


class Takeover:
    """How long an evaluation may take before its owner counts as stuck, from what this peer sees. Times are seconds on its clock."""

    def __init__(self, num_microbatches: int, num_of_step: int) -> None:
        """`num_microbatches` make an evaluation, `num_of_step` a step."""
        self._num_microbatches = num_microbatches
        self._share_of_step = num_microbatches / num_of_step
        self._step: tuple[int, float] | None = None
        """The step that the swarm is at, and since when."""
        self._due: tuple[int, float] | None = None
        """The evaluation that has no result yet, and since when."""
        self._expected_s: float | None = None
        self._is_measured = False

    def look(self, reached: int, due: int, is_known: bool, now_s: float) -> None:
        """The swarm is at step `reached`; step `due` is to be evaluated, if its result is not known already."""
        if self._step is None or reached != self._step[0]:
            if self._step is not None and not self._is_measured:
                self._expected_s = self._share_of_step * (now_s - self._step[1]) / abs(reached - self._step[0])
            self._step = reached, now_s
        if is_known and self._due is not None:
            self._expected_s, self._is_measured = now_s - self._due[1], True
        if is_known:
            self._due = None
        elif self._due is None or self._due[0] != due:
            self._due = due, now_s

    def is_mine(self, live: LiveView, now_s: float, microbatch_s: float) -> bool:
        """True if this peer shall make the evaluation that has no result. A microbatch takes `microbatch_s` in all stages; 0: unknown."""
        first_s = max(FIRST_TAKEOVER_S, self._num_microbatches * microbatch_s)
        after_s = first_s if self._expected_s is None else max(LEAST_TAKEOVER_S, TAKEOVER_TIMES * self._expected_s)
        return self._due is not None and is_my_turn(live, self._due[0], now_s - self._due[1], after_s)


def is_my_turn(live: LiveView, step: int, waited_s: float, takeover_s: float) -> bool:
    """True if this peer shall evaluate `step`, due for `waited_s`: the trainer of rank k begins after `takeover_s` times k."""
    able = (record.peer for record in those_who_train(live) if not record.leaving)
    ranked = sorted(able, key=lambda peer: digest("evaluates", peer, step, size=8))
    return live.me in ranked and waited_s >= takeover_s * ranked.index(live.me)
