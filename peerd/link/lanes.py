"""Lanes make tensors to one peer leave one after another, in the order in which they were ready.

Concurrent transfers would share the link and all end at about the same time, that of the last one. On a link as slow as the compute,
the next stage would then wait idle and get several microbatches at once. In sequence the first tensor arrives as early as possible,
and the last one no later.
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
    """Number of turns that ended because the peer could not be reached."""
    users: int = 0


@dataclass(slots=True)
class Waiting:
    """Counts the transfers that wait for their turn, in any lanes that share it."""

    count: int = 0


class Lanes:
    """One lane for each end of a link. Any hashable value may name an end."""

    def __init__(self, waiting: Waiting | None = None) -> None:
        self._lanes: dict[object, _Lane] = {}
        self._waiting = waiting or Waiting()

    def turn(self, end: object) -> Turn:
        return Turn(self._lanes, end, self._waiting)

    def __len__(self) -> int:
        """Number of lanes in which a turn is in progress or waits."""
        return len(self._lanes)


class Turn:
    """The right to send to one end, from `begin` to `end`. As a context manager it ends with the context at the latest."""

    def __init__(self, lanes: dict[object, _Lane], end: object, waiting: Waiting) -> None:
        self._lanes = lanes
        self._end = end
        self._waiting = waiting
        self._lane: _Lane | None = None

    async def begin(self) -> None:
        """Wait until all earlier turns have ended. Raises UnheardError if one of them ended because the peer could not be reached."""
        lane = self._lanes.setdefault(self._end, _Lane())
        lane.users += 1
        breaks = lane.breaks
        self._waiting.count += 1
        try:
            await lane.lock.acquire()
        except BaseException:
            self._leave(lane)
            raise
        finally:
            self._waiting.count -= 1
        self._lane = lane
        if lane.breaks != breaks:
            self.end()
            raise UnheardError("an earlier transfer to this peer did not get through")

    def end(self, broken: bool = False) -> None:
        """Let the next turn begin; if `broken`, the waiting turns raise UnheardError. Has no effect outside the turn."""
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
