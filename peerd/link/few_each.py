"""What each caller has of something at once, and what all strangers have of it together: a key costs nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from peerd.table.record import PeerId


def everybody(_peer: PeerId) -> bool:
    """True: no peer is a stranger."""
    return True


class FewEach:
    """Counts what callers have. Nothing stays of a caller that has nothing."""

    def __init__(self, is_known: Callable[[PeerId], bool] = everybody) -> None:
        """`is_known` tells whether a peer is no stranger."""
        self._is_known = is_known
        self._of: Counter[PeerId] = Counter()
        self._strangers: set[PeerId] = set()
        """Callers that have something and were strangers when they got it."""
        self.total = 0

    @property
    def num_callers(self) -> int:
        return len(self._of)

    @contextmanager
    def by(self, caller: PeerId, most: int, most_of_strangers: int | None = None) -> Iterator[bool]:
        """Count one more while the block runs. Yields False, and counts nothing, if the caller has all that it may have.

        All strangers together may have `most_of_strangers`; as much as one caller, unless that is given.
        """
        is_stranger = not self._is_known(caller)
        if self._of[caller] >= most or (is_stranger and self._of_strangers() >= (most if most_of_strangers is None else most_of_strangers)):
            yield False
            return
        if is_stranger:
            self._strangers.add(caller)
        self._of[caller] += 1
        self.total += 1
        try:
            yield True
        finally:
            self.total -= 1
            self._of[caller] -= 1
            if not self._of[caller]:
                del self._of[caller]
                self._strangers.discard(caller)

    def _of_strangers(self) -> int:
        """What strangers have together. One that has become known since does not count."""
        self._strangers = {each for each in self._strangers if not self._is_known(each)}
        return sum(self._of[each] for each in self._strangers)
