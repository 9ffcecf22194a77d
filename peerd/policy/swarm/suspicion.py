"""How long a peer waits for an answer before it suspects another: longer if its suspicions were wrong lately.

This is local health as in Lifeguard (Dadgar, Phillips, Currey, 2018). A peer that is short of processor time, or whose link is
full, sees healthy peers fail. So each suspicion that proves wrong makes it more patient for a while.
"""

from __future__ import annotations

import math
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
LATE = 3.0
"""A connection is dead after so many times the longest that an answer has taken of late."""
FORGOTTEN_S = 60.0
"""The time after which the longest answer counts half."""


@dataclass(slots=True)
class AnswerTimes:
    """How long the peers of this one have taken for an answer of late: seconds where machines are short of processor time."""

    _longest_s: float = 0.0
    _at_s: float = 0.0

    def took(self, answer_s: float, now_s: float) -> None:
        self._longest_s, self._at_s = max(answer_s, self.longest_s(now_s)), now_s

    def longest_s(self, now_s: float) -> float:
        return self._longest_s * math.exp2(-max(0.0, now_s - self._at_s) / FORGOTTEN_S)


@dataclass(slots=True)
class DeadLines:
    """When this peer gives up its connection to another one and dials it anew. Nothing says that a connection is dead: a router may have
    forgotten it, or the other peer may have another address.

    Giving up a connection ends the calls on it, at both ends. So it is done where nothing at all comes back over it for far longer than
    answers take, and ever more rarely where it did not help. A question that failed at once went over no connection: the next one dials
    anew.
    """

    _next_s: dict[PeerId, tuple[float, float]] = field(default_factory=dict)
    """The earliest time at which to give up the next connection to a peer, and the pause after that."""
    _silent_since_s: dict[PeerId, float] = field(default_factory=dict)
    """When the first question was asked after which nothing came back."""

    def is_to_be_given_up(
        self,
        peer: PeerId,
        asked_s: float,
        now_s: float,
        longest_s: float,
        *,
        unanswered: int,
        was_waited_for: bool,
        is_heard: bool,
        line_is_heard: bool,
    ) -> bool:
        """Whether to do it now, after so many questions in a row, the last one asked at `asked_s`.

        `longest_s`: how long answers of all peers have taken of late. `was_waited_for`: the last question had its whole time. `is_heard`:
        bytes came since then, over whichever connection.
        """
        if line_is_heard or not was_waited_for:
            self._silent_since_s.pop(peer, None)
            return False
        silent_s = now_s - self._silent_since_s.setdefault(peer, asked_s)
        due_s, pause_s = self._next_s.get(peer, (now_s, FIRST_PAUSE_S))
        if now_s < due_s or silent_s < LATE * longest_s or (is_heard and unanswered < UNANSWERED):
            return False
        del self._silent_since_s[peer]
        self._next_s[peer] = (now_s + pause_s, min(2 * pause_s, LONGEST_PAUSE_S))
        return True

    def answers(self, peer: PeerId) -> None:
        self._next_s.pop(peer, None)
        self._silent_since_s.pop(peer, None)
