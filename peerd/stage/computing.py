"""How long this peer computes a microbatch, and at which one it is. The clock is `time.monotonic`."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

from peerd.policy.swarm.pace import KNOWN_AFTER_S
from peerd.stage.executor import FORWARD_SHARE
from peerd.stage.results import Ticket

MEASURED_MICROBATCHES = 15
"""The time of a microbatch is the median over this many of the last ones."""
FEWEST_MEASURED = 3
"""With fewer the time is unknown, unless it is long (KNOWN_AFTER_S)."""
AHEAD_BELOW_S = 0.05
"""The thread that computes does not wait for forward passes that are shorter. That hides the launch of the next pass, some milliseconds.

A backward pass that comes meanwhile waits for one forward pass more, which would hold up the pipeline where that is long.
"""
UNUSUAL, MOST_UNUSUAL = 3.0, 10.0
"""A microbatch under way counts once it has taken this many times the usual time, and up to so many times."""


@dataclass(frozen=True, slots=True)
class Present:
    """The microbatch that the torch thread computes now."""

    step: int
    index: int
    since_s: float
    """When its computing would have begun if it had gone on without a break."""


class Computing:
    """The torch thread notes its passes here, and the event loop the microbatches that are done."""

    def __init__(self) -> None:
        self._took_s: deque[float] = deque(maxlen=MEASURED_MICROBATCHES)
        """Computing times of the last microbatches, forward and backward."""
        self._guess_s = 0.0
        """What a long forward pass makes of a whole microbatch."""
        self.present: Present | None = None

    def began(self, ticket: Ticket, now_s: float) -> None:
        self.present = Present(ticket.step, ticket.index, now_s - ticket.computed_s)

    def ended(self, ticket: Ticket, took_s: float, *, is_whole: bool) -> None:
        """Note the end of a pass. `is_whole`: it was the whole work on the microbatch; otherwise a forward pass has its share."""
        if not is_whole and not ticket.computed_s:
            self._guess_s = took_s / FORWARD_SHARE
        ticket.computed_s += took_s
        self.present = None

    def ended_late(self, ticket: Ticket) -> float:
        """Note the end of a forward pass that the device had not finished when its job ended. Returns the seconds that it took."""
        if ticket.ahead is None:
            return 0.0
        took_s, ticket.ahead = ticket.ahead.seconds(), None
        self._guess_s = took_s / FORWARD_SHARE
        ticket.computed_s += took_s
        return took_s

    @property
    def may_go_ahead(self) -> bool:
        """Whether forward passes are so short that a thread which waits for each would leave the device idle."""
        return 0.0 < self.usual_s() * FORWARD_SHARE < AHEAD_BELOW_S

    def done(self, ticket: Ticket) -> None:
        """Note a microbatch that was added."""
        self._took_s.append(ticket.computed_s)

    def usual_s(self) -> float:
        """The computing time of a microbatch; 0: not known yet."""
        if len(self._took_s) >= FEWEST_MEASURED:
            return statistics.median(self._took_s)
        known_s = statistics.median(self._took_s) if self._took_s else self._guess_s
        return known_s if known_s > KNOWN_AFTER_S else 0.0

    def microbatch_s(self, now_s: float) -> float:
        """The usual time, or what the microbatch under way has taken if that is much longer; 0: not known yet."""
        usual_s, present = self.usual_s(), self.present
        so_far_s = now_s - present.since_s if present is not None else 0.0
        if so_far_s <= max(KNOWN_AFTER_S, UNUSUAL * usual_s):
            return usual_s
        return min(so_far_s, MOST_UNUSUAL * usual_s) if usual_s else so_far_s
