"""How long somebody gets to answer before it counts as gone: longer for one who was wrong lately.

Local health, as in Lifeguard (Dadgar, Phillips, Currey, 2018): who is short of processor time or whose link is full sees
others fail that are well. So each suspicion that proves wrong makes me more patient for a while; one that was right does not.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_PATIENT = 8
"""Times the usual wait."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Of one who judges others. Times are seconds of the caller's clock."""

    forgiven_s: float
    """After so long a mistake counts half."""
    wrong: float = 0.0
    """Mistakes, at `at_s`."""
    at_s: float = 0.0

    def factor(self, now_s: float) -> float:
        """By how much to wait longer than usual: 1 for who was not wrong lately."""
        return min(MOST_PATIENT, 1 + self._left(now_s))

    def after_mistake(self, now_s: float) -> Patience:
        return Patience(self.forgiven_s, min(MOST_PATIENT, 1 + self._left(now_s)), now_s)

    def _left(self, now_s: float) -> float:
        return self.wrong * 0.5 ** (max(0.0, now_s - self.at_s) / self.forgiven_s) if self.wrong else 0.0
