"""A byte stream over several connections at once, its strands: which block goes over which, and the order in which they leave.

Each strand keeps the order and loses nothing, so how many blocks came over it says which. A strand gets its next block once it has few
under way: so each carries as much as it can, and none holds much back. A block that is late on one goes over another one, too. No input or
output happens here; times are seconds of a monotonic clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from peerd.errors import BadMessageError
from peerd.policy.route.parallel import MOST

BLOCK_BYTES = 1 << 14
EACH = 2
"""Blocks under way on a strand, 32 KB. It is no limit where more than 0.3 % of segments are lost: a connection carries 1,800 bytes /
sqrt(loss) in a round trip there (Mathis)."""
LATE = 3
"""A block is late after so many times the mean time that one takes to be told of."""
FIRST_S, WEIGHT = 1.0, 0.1
"""That mean before anything is known, and the weight of each time in it."""


def window(num_strands: int) -> int:
    """Blocks that may be ahead of the first one that the other end has not passed on, with so many strands.

    What is under way on all strands is what leaves in the time that one block takes (rate x round trip). The first block may take
    `LATE` such times until it is late, and one more over another strand; meanwhile the others go on.
    """
    return (LATE + 1) * EACH * num_strands


WINDOW = window(MOST)
"""The largest, 4 MB: a block that is further ahead is refused."""


@dataclass(eq=False, slots=True)
class Strand:
    """One connection of a bundle, at one end."""

    under_way: deque[tuple[int, float]] = field(default_factory=deque)
    """Numbers of the blocks sent over it that the other end has not told of, and when they left."""
    told: int = 0
    """Blocks sent over it that the other end has told of."""
    came: int = 0
    """Blocks that came over it."""
    must_tell: bool = False
    """Whether there is something to tell the other end."""


class Outgoing:
    """The blocks that this end sends."""

    def __init__(self) -> None:
        self._blocks: dict[int, bytes] = {}
        """Those that have not arrived."""
        self._left_s: dict[int, float] = {}
        """When each of them last left."""
        self._waiting: deque[int] = deque()
        """Those that are under way nowhere."""
        self._next = self._passed_on = 0
        self._mean_s = FIRST_S

    def has_room(self, num_strands: int) -> bool:
        return self._next < self._passed_on + window(num_strands)

    @property
    def late_s(self) -> float:
        return LATE * self._mean_s

    def put(self, data: bytes) -> None:
        self._blocks[self._next] = data
        self._waiting.append(self._next)
        self._next += 1

    def take(self, strand: Strand, now_s: float) -> tuple[int, bytes] | None:
        """The block that goes over this strand now; None if none does."""
        if len(strand.under_way) >= EACH:
            return None
        number = self._due(now_s)
        if number is None or any(number == each for each, _ in strand.under_way):
            return None
        strand.under_way.append((number, now_s))
        self._left_s[number] = now_s
        return number, self._blocks[number]

    def _due(self, now_s: float) -> int | None:
        while self._waiting:
            number = self._waiting.popleft()
            if number in self._blocks:
                return number
        first = next(iter(self._blocks), None)
        return first if first is not None and now_s - self._left_s[first] > self.late_s else None

    def arrived(self, strand: Strand, came: int, passed_on: int, now_s: float) -> None:
        """The other end says how many blocks came over this strand, and up to which one all are passed on."""
        for _ in range(min(came - strand.told, len(strand.under_way))):
            number, left_s = strand.under_way.popleft()
            strand.told += 1
            self._mean_s += WEIGHT * (now_s - left_s - self._mean_s)
            self._forget(number)
        if self._passed_on < passed_on <= self._next:
            for number in range(self._passed_on, passed_on):
                self._forget(number)
            self._passed_on = passed_on

    def lost(self, strand: Strand) -> None:
        """The strand broke: what was under way on it goes over another one."""
        for number, _ in reversed(strand.under_way):
            if number in self._blocks:
                self._waiting.appendleft(number)
        strand.under_way.clear()

    def _forget(self, number: int) -> None:
        self._blocks.pop(number, None)
        self._left_s.pop(number, None)


class Incoming:
    """The blocks that come to this end."""

    def __init__(self) -> None:
        self._blocks: dict[int, bytes] = {}
        self.passed_on = 0
        """Blocks that were taken from here, in order."""

    def put(self, number: int, data: bytes) -> None:
        """Raises BadMessageError for a block that is not due yet, or too long."""
        if len(data) > BLOCK_BYTES or number >= self.passed_on + WINDOW:
            raise BadMessageError("a block that is too long, or not due yet")
        if number >= self.passed_on:
            self._blocks.setdefault(number, data)

    def next(self) -> bytes | None:
        """The next block; None if it is not here. Once it is passed on, count it in `passed_on`."""
        return self._blocks.pop(self.passed_on, None)
