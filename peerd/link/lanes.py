"""Tensors to one peer leave one after another, in the order in which they were ready.

Side by side they would share the link, and all arrive when the last one does: on a link that is as slow as the compute, the next
stage then waits for three microbatches at once and has three at once afterwards. One after another the first arrives as early as it
can, and the last no later.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import TracebackType

from peerd.errors import PeerGoneError, UnheardError


@dataclass(slots=True)
class _Lane:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    breaks: int = 0
    """How many turns ended with a peer that could not be reached."""
    users: int = 0


class Lanes:
    """One lane for each end; an end is whatever names a link."""

    def __init__(self) -> None:
        self._lanes: dict[object, _Lane] = {}

    def turn(self, end: object) -> Turn:
        return Turn(self._lanes, end)

    def __len__(self) -> int:
        """Lanes in which somebody is or waits."""
        return len(self._lanes)


class Turn:
    """The right to send to one end, from `begin` to `end`; as a context it ends at the latest with the context."""

    def __init__(self, lanes: dict[object, _Lane], end: object) -> None:
        self._lanes = lanes
        self._end = end
        self._lane: _Lane | None = None

    async def begin(self) -> None:
        """Returns when all who began before have ended. UnheardError where one of them found that nothing gets through."""
        lane = self._lanes.setdefault(self._end, _Lane())
        lane.users += 1
        breaks = lane.breaks
        try:
            await lane.lock.acquire()
        except BaseException:
            self._leave(lane)
            raise
        self._lane = lane
        if lane.breaks != breaks:
            self.end()
            raise UnheardError("what was to be sent before did not get through")

    def end(self, broken: bool = False) -> None:
        """The next may begin, or, where the lane is broken, those who wait are told so. Without effect outside of the turn."""
        lane, self._lane = self._lane, None
        if lane is not None:
            lane.breaks += broken
            lane.lock.release()
            self._leave(lane)

    async def __aenter__(self) -> Turn:
        await self.begin()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end(broken=isinstance(error, PeerGoneError))

    def _leave(self, lane: _Lane) -> None:
        lane.users -= 1
        if not lane.users:
            self._lanes.pop(self._end, None)
