"""Since when a question has had the same answer: rules that give something up wait until it has been the same at every look.

Rules that only let others begin count all the time in which it was so: a peer that makes the answer another one for a moment, again and
again, would else stop them (hole 64).
"""

from __future__ import annotations

from collections.abc import Hashable


class Steady:
    """Remembers the last answer, and since when it has been the answer. Times are seconds on the caller's clock."""

    def __init__(self) -> None:
        self._answer: Hashable = None
        self._since_s = 0.0

    @property
    def holds(self) -> bool:
        """Whether there was an answer at the last look."""
        return self._answer is not None

    def since_s(self, answer: Hashable, now_s: float) -> float | None:
        """The time since which every look has given this answer; None if the answer is None."""
        if answer != self._answer:
            self._answer, self._since_s = answer, now_s
        return None if answer is None else self._since_s


class TotalTime:
    """Remembers since when something has been so, less the time in which it was not. Times are seconds on the caller's clock."""

    def __init__(self) -> None:
        self._key: Hashable = None
        self._since_s: float | None = None
        self._paused_s: float | None = None

    @property
    def holds(self) -> bool:
        """Whether it was so at the last look."""
        return self._since_s is not None and self._paused_s is None

    def since_s(self, key: Hashable, is_so: bool, now_s: float) -> float | None:
        """The time since which it has been so, moved on by each pause; None while it is not so. Another key begins anew."""
        if key != self._key:
            self._key, self._since_s, self._paused_s = key, None, None
        if not is_so:
            if self.holds:
                self._paused_s = now_s
            return None
        if self._since_s is None:
            self._since_s = now_s
        elif self._paused_s is not None:
            self._since_s += now_s - self._paused_s
        self._paused_s = None
        return self._since_s
