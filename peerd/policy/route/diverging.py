"""When a trainer launches a microbatch again whose values were not finite.

Such a microbatch is nobody's fault, and it is not done: the step waits for it. One peer's word proves nothing, so the trainer tries it by
other ways, ever more seldom. Once that has failed `TRIES` times the trainer's record says so. While no microbatch of the step is done,
nothing else of it is launched. If a peer was at fault, a try by another way succeeds and all goes on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from peerd.policy.route.launching import Standstill
from peerd.policy.step.ledger import full

TRIES = 3
FIRST_PAUSE_S, MOST_PAUSE_S = 1.0, 600.0
"""The pause before the second try; it doubles before each further one, up to the second number."""
Key = tuple[int, int]
"""(step, index)"""


@dataclass(slots=True)
class Diverging:
    """One trainer's microbatches that were not finite. Times are seconds on the caller's clock."""

    _failed: dict[Key, tuple[int, float]] = field(default_factory=dict)
    """How often each failed, and when it is due again."""

    def failed(self, key: Key, now_s: float) -> None:
        count = self._failed.get(key, (0, 0.0))[0] + 1
        self._failed[key] = count, now_s + min(MOST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(count - 1, 32))

    def succeeded(self, key: Key) -> None:
        self._failed.pop(key, None)

    def begin(self, step: int) -> None:
        """Forget what is older than the step before this one."""
        self._failed = {key: failure for key, failure in self._failed.items() if key[0] >= step - 1}

    def held_back(self, step: int, still: Standstill, num_microbatches: int, now_s: float) -> int:
        """The bitmap of what is not to be launched now of a step. `still` says what is missing."""
        due_s = {index: due_s for (failed_step, index), (_, due_s) in self._failed.items() if failed_step == step}
        if not due_s:
            return 0
        everything = full(num_microbatches)
        others = everything if (still.step, still.absent) == (step, everything) else 0
        return (others & ~sum(1 << index for index in due_s)) | sum(1 << index for index, at_s in due_s.items() if at_s > now_s)

    def step(self, still: Standstill) -> int | None:
        """The step that cannot be finished, as far as this trainer knows; None: there is none. `still` says what is missing."""
        tried = [index for (step, index), (count, _) in self._failed.items() if count >= TRIES and step == still.step]
        return still.step if any(still.absent >> index & 1 for index in tried) else None
