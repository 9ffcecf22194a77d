"""How long a peer waits for an answer before it suspects another: longer if its suspicions were wrong lately.

This is local health as in Lifeguard (Dadgar, Phillips, Currey, 2018). A peer that is short of processor time, or whose link is
full, sees healthy peers fail. So each suspicion that proves wrong makes it more patient for a while.
"""

from __future__ import annotations

from dataclasses import dataclass

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
