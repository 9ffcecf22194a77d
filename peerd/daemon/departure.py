"""The way out of a stage: draining, leaving the swarm, moving to another stage."""

from __future__ import annotations

import asyncio
from typing import Any

import structlog

from peerd.daemon.node import Node
from peerd.table.record import Phase

DRAIN_TIMEOUT_S = 60.0
QUIET_BEFORE_REFUSING_S = 0.3
LOG = structlog.get_logger()


class Left(Exception):  # noqa: N818 - it is no error
    """Raised inside the TaskGroup to end the daemon."""


class Moved(Exception):  # noqa: N818 - it is no error
    """Raised inside the TaskGroup to go on in another stage."""

    def __init__(self, stage: int) -> None:
        super().__init__(stage)
        self.stage = stage


class Departure:
    """The way out: drain first, or at once when asked a second time."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._asked = asyncio.Event()
        self._at_once = asyncio.Event()
        self._gone = asyncio.Event()
        self._destination: int | None = None

    def ask(self) -> None:
        """A signal: the first drains, the second leaves now."""
        if self._destination is not None:
            self._destination = None  # already draining
        elif self._asked.is_set():
            self._at_once.set()
        else:
            LOG.info("leaving", how="finishing what is queued; once more leaves now")
        self._asked.set()

    def ask_now(self) -> None:
        self._at_once.set()
        self._asked.set()

    async def leave(self, now: bool) -> None:
        """The control verb: returns when the daemon is about to end."""
        self._destination = None
        self._asked.set()
        if now:
            self._at_once.set()
        await self._gone.wait()

    def move(self, stage: int) -> None:
        """Leave this stage at a step boundary to serve another one."""
        if not self._asked.is_set():
            self._destination = stage
            self._asked.set()

    async def run(self) -> None:
        """Ends with Left or Moved; a move that would leave the stage without anybody is called off."""
        while True:
            await self._asked.wait()
            drained = await self._leave_stage()
            if self._destination is None or self._at_once.is_set():
                self._gone.set()
                raise Left
            if drained and self._mates():
                raise Moved(self._destination)
            LOG.warning("the move is called off", reason="nobody else would serve this stage")
            self._node.leaving = self._node.service.leaving = False
            self._node.announce()
            self._destination = None
            self._asked.clear()

    async def _leave_stage(self) -> bool:
        """Drain; False when it took too long or was cut short."""
        drain = asyncio.ensure_future(self._drain())
        at_once = asyncio.ensure_future(self._at_once.wait())
        try:
            done, _ = await asyncio.wait({drain, at_once}, timeout=DRAIN_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            drain.cancel()
            at_once.cancel()
        return drain in done

    async def _drain(self) -> None:
        """Take nothing new, finish the queue, take part in the average, then go: nothing is replayed because of it."""
        node = self._node
        node.leaving = True
        node.announce()
        await self._until(lambda: node.service.queue == 0)
        await asyncio.sleep(QUIET_BEFORE_REFUSING_S)  # for peers that have not heard yet
        await self._until(lambda: node.service.queue == 0)
        node.service.leaving = True
        await self._until(self._owes_nothing)

    async def _until(self, done: Any) -> None:
        while not done():
            await self._node.membership.changed(0.1)

    def _owes_nothing(self) -> bool:
        """My ledger is empty, or nobody is there to average it with."""
        node = self._node
        record = node.state.record
        idle = record.phase is Phase.JOINING or (record.phase is Phase.ACCUMULATING and record.done == 0)
        return idle or not self._mates()

    def _mates(self) -> bool:
        """Whether somebody else serves my stage and stays."""
        record = self._node.state.record
        serving = self._node.membership.live().serving(record.stage)
        return any(r.peer != record.peer and not r.leaving and r.step >= record.step for r in serving)
