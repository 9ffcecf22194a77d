"""How long a peer waits for an answer before it suspects another: longer if its suspicions were wrong lately.

This is local health as in Lifeguard (Dadgar, Phillips, Currey, 2018). A peer that is short of processor time, or whose link is
full, sees healthy peers fail. So each suspicion that proves wrong makes it more patient for a while.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from peerd.table.record import PeerId

MOST_PATIENT = 8
"""The largest factor by which the usual wait is multiplied."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How patient this peer is with others. Times are seconds on the caller's clock."""

    forgiven_s: float
    """The time after which a mistake counts half."""
    wrong: float = 0.0
    """Mistakes, at `at_s`."""
    at_s: float = 0.0

    def factor(self, now_s: float) -> float:
        """The factor by which to wait longer than usual; 1 without recent mistakes."""
        return min(MOST_PATIENT, 1 + self._left(now_s))

    def after_mistake(self, now_s: float) -> Patience:
        return Patience(self.forgiven_s, min(MOST_PATIENT, 1 + self._left(now_s)), now_s)

    def _left(self, now_s: float) -> float:
        return self.wrong * 0.5 ** (max(0.0, now_s - self.at_s) / self.forgiven_s) if self.wrong else 0.0


UNANSWERED = 2
"""Questions in a row that must stay without an answer at a peer that lives."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0


@dataclass(slots=True)
class DeadLines:
    """When this peer gives up its connection to another one and dials it anew. Nothing says that a connection is dead: a router may have
    forgotten it, or the other peer may have another address.

    Giving up a connection ends the calls on it, at both ends. So it is done where nothing at all comes back over it in the time that an
    answer has, and ever more rarely where it did not help. A question that failed at once went over no connection: the next one dials anew.
    """

    _next_s: dict[PeerId, tuple[float, float]] = field(default_factory=dict)
    """The earliest time at which to give up the next connection to a peer, and the pause after that."""

    def is_to_be_given_up(
        self, peer: PeerId, now_s: float, *, unanswered: int, was_waited_for: bool, is_heard: bool, line_is_heard: bool
    ) -> bool:
        """Whether to do it now, after so many questions in a row. `was_waited_for`: the last one had its whole time; `is_heard`: bytes
        came since then, over whichever connection."""
        due_s, pause_s = self._next_s.get(peer, (now_s, FIRST_PAUSE_S))
        if not was_waited_for or line_is_heard or now_s < due_s or (is_heard and unanswered < UNANSWERED):
            return False
        self._next_s[peer] = (now_s + pause_s, min(2 * pause_s, LONGEST_PAUSE_S))
        return True

    def answers(self, peer: PeerId) -> None:
        self._next_s.pop(peer, None)
