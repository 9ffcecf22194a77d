"""Which chunk of a file is asked of which donor, where several give the same file.

Each donor has a few chunks to send at any moment and gets another one when one has come, so a donor sends as much as its line carries.
Chunks of a donor that is gone are asked of others. When nothing is left that nobody was asked for, a donor that is done is asked for chunks
that others have yet to send, so that none of them is waited for, however slow it is.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable

LEAST_ASKED, MOST_ASKED = 2, 16
"""Chunks that one donor has to send. What waits at a donor goes before what is urgent there, so there are no more than fill the line."""
RECENT = 8
"""A donor's rate is that of the last so many chunks."""
MOST_TWICE = 2
"""A chunk is asked of at most so many donors."""


class AskingPace:
    """How many chunks to ask one donor for at once: what its line carries in the time from a request until the chunk is here. Times are
    seconds on one clock."""

    def __init__(self) -> None:
        self._asked_s: deque[float] = deque()
        self._least_s = math.inf
        self._came_s: deque[float] = deque(maxlen=RECENT)
        """When the last chunks came; the first one is when the first request was made after a pause."""
        self.most = LEAST_ASKED

    def asked(self, now_s: float) -> None:
        if not self._asked_s:
            self._came_s.clear()
            self._came_s.append(now_s)
        self._asked_s.append(now_s)

    def came(self, now_s: float) -> None:
        """The first of the chunks that were asked for is here."""
        self._least_s = min(self._least_s, now_s - self._asked_s.popleft())
        self._came_s.append(now_s)
        each_s = max(now_s - self._came_s[0], 1e-6) / (len(self._came_s) - 1)
        self.most = min(max(LEAST_ASKED, 1 + math.ceil(self._least_s / each_s)), MOST_ASKED)

    @property
    def num_asked(self) -> int:
        return len(self._asked_s)


class ChunkShares:
    """The chunks of one file, by number, and the donors that were asked for them."""

    def __init__(self, num_chunks: int) -> None:
        self._missing = deque(range(num_chunks))
        """Those that no donor was asked for."""
        self._asked: dict[int, list[Hashable]] = {}
        """Those that are under way, the one that was asked for first before the others, and of whom they were asked."""
        self.num_left = num_chunks
        """The number of chunks that have not come."""

    def next_for(self, donor: Hashable) -> int | None:
        """A chunk to ask this donor for, which is noted; None if there is none for it now."""
        if self._missing:
            number = self._missing.popleft()
            self._asked[number] = [donor]
            return number
        for number in reversed(self._asked):  # what was asked for last comes last
            donors = self._asked[number]
            if donor not in donors and len(donors) < MOST_TWICE:
                donors.append(donor)
                return number
        return None

    def is_due(self, number: int) -> bool:
        """Whether this chunk has not come yet."""
        return number in self._asked

    def came(self, number: int) -> None:
        """A chunk that was asked for has come, and is sound. It came before if `is_due` does not hold; then this changes nothing."""
        if self._asked.pop(number, None) is not None:
            self.num_left -= 1

    def gone(self, donor: Hashable) -> None:
        """What this donor was asked for will not come from it."""
        for number, donors in reversed([*self._asked.items()]):
            if donor in donors:
                donors.remove(donor)
                if not donors:
                    del self._asked[number]
                    self._missing.appendleft(number)
