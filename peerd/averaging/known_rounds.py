"""The rounds that a member knows by their id: those that its tasks open or run, and those that are closed for ever."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from typing import Any, TypeVar

from peerd.averaging.confirming import Confirming
from peerd.background import Tasks
from peerd.errors import RemoteError, WrongStateError
from peerd.policy.step.certificates import Slices
from peerd.policy.step.roster import Roster
from peerd.table.record import AverageId, PeerId
from peerd.wire.messages import Beat

MAX_DEAD_ROUNDS = 64
Result = TypeVar("Result")


class KnownRounds:
    """An id gets here by a proposal that this peer makes or takes. Other messages name ids, and add none."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._running: dict[AverageId, tuple[Roster, asyncio.Task[Any]]] = {}
        self._dead: deque[AverageId] = deque(maxlen=MAX_DEAD_ROUNDS)
        self.joined: dict[AverageId, Slices] = {}
        """The rounds of this step in which this peer has been, with their slices where they came together here. It joins none twice, so
        it signs one slice of each."""
        self.confirmed: dict[AverageId, Confirming] = {}
        """The rounds of this step of which most members have said the same: others may still wait for their words."""

    def answer(self, caller: PeerId, beat: Beat, now_s: float) -> Beat:
        """What a member hears of a round that is over here. Raises WrongStateError where there is no such round."""
        found = self.confirmed.get(beat.average_id)
        if found is None or caller not in found.roster.peers:
            raise WrongStateError("no such round is open")
        return found.answer(caller, beat, now_s)

    def end_step(self) -> None:
        """What this peer knows of the rounds of its step is of no use any more."""
        self.joined.clear()
        self.confirmed.clear()

    def start(self, roster: Roster, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Open or run a round in a task of this peer's own."""
        self._running = {average_id: known for average_id, known in self._running.items() if not known[1].done()}
        task = self._tasks.start(work, expects=(RemoteError,))
        self._running[roster.average_id] = roster, task
        return task

    def task_of(self, average_id: AverageId) -> asyncio.Task[Any] | None:
        """The task that will end this round. Rule 4 (close) ends a round that has none (hole 21)."""
        _, task = self._running.get(average_id, (None, None))
        return task if task is not None and not task.done() else None

    def cancel(self, average_id: AverageId) -> None:
        """Cancel the task that runs this round, unless that is the caller."""
        task = self.task_of(average_id)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    def roster_of(self, average_id: AverageId) -> Roster | None:
        """The roster of a round that a task opens or runs."""
        return self._running[average_id][0] if self.task_of(average_id) is not None else None

    def is_dead(self, average_id: AverageId) -> bool:
        return average_id in self._dead

    def kill(self, average_id: AverageId) -> None:
        """Refuse this id from now on. Rule 4 may say so often, while the round is being opened."""
        if average_id not in self._dead:
            self._dead.append(average_id)
