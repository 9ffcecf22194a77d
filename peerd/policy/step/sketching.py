"""A peer tells others in turn what state it holds: rule 21 (prove). Times are seconds on the caller's clock.

A sketch takes a pass over the state, so a peer makes few. Who asks all the time must not get them all: a joiner that hears nothing of its
mates cannot tell a made-up state from theirs (hole 74).
"""

from __future__ import annotations

from peerd.table.record import PeerId

PAUSE = 10.0
"""After a sketch a peer makes none for so many times as long as it took."""
LATE_S = 3.0
"""A peer that comes back so much later than it was told, and a pause more, loses its place. Joiners of a large state come late: they also
apply averages, and make sketches of their own."""
NEXT_S = 0.1
"""When one asks again whose turn is not the next."""
MAKING_S = 1.0
"""And while a sketch is being made, which may have to wait for a pass."""


class SketchTurns:
    """Those that were told to come back get their sketches in the order in which they asked first."""

    def __init__(self) -> None:
        self._next_s = self._pause_s = 0.0
        self._is_making = False
        self._waiting: dict[PeerId, float] = {}
        """Until when each has its place, first come first."""

    def wait_s(self, asker: PeerId, now_s: float) -> float:
        """For how long a peer that asks now has to wait; 0: it is its turn."""
        self._waiting = {peer: until_s for peer, until_s in self._waiting.items() if peer == asker or now_s <= until_s}
        first = next(iter(self._waiting), asker)
        if now_s >= self._next_s and first == asker and not self._is_making:
            self._waiting.pop(asker, None)
            return 0.0
        wait_s = max(MAKING_S if self._is_making else NEXT_S, self._next_s - now_s)
        self._waiting[asker] = now_s + wait_s + LATE_S + self._pause_s
        return wait_s

    def begins(self) -> None:
        """A sketch is asked for. No other one is before it `took` its time, whatever becomes of who asked."""
        self._is_making = True

    def took(self, took_s: float, now_s: float) -> None:
        """It took so long to make, without the time for which it waited."""
        self._is_making = False
        self._pause_s = PAUSE * took_s
        self._next_s = now_s + self._pause_s
