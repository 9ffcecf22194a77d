"""Since when a question has had the same answer: rules that give something up wait until it has been the same at every look."""

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
