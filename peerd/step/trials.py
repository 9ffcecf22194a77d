"""The stepper's reaction to a bug: try again, or end the daemon."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from typing import TypeVar

from peerd.background import INTERNAL_ERRORS
from peerd.errors import PeerdError
from peerd.stage.executor import Executor, Priority
from peerd.transfers import is_out_of_memory

MOST_ERRORS = 5
"""This many bugs between two updates of the parameters end the daemon."""
PAUSE_S = 0.25
"""The pause before the second trial, in seconds; it doubles before each further one."""
Result = TypeVar("Result")


class Trials:
    """Counts the bugs since the last update of the parameters."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._num_errors = 0
        self._half_updated = False

    async def update(self, work: Callable[[], Result]) -> Result:
        """Update the parameters on the executor's thread. `work` raises PeerdError only if it has changed nothing."""
        self._half_updated = True
        try:
            result = await self._executor.run(Priority.CONTROL, work)
        except PeerdError:
            self._half_updated = False
            raise
        self._half_updated = False
        self._num_errors = 0
        return result

    async def failed(self, error: Exception, step: int, reason: str) -> None:
        """Report the error and pause until the next trial: the cause may pass, such as another peer's record.

        Raises the error if there was no memory, which is no bug, if the parameters may be half updated, or after MOST_ERRORS bugs. A bug
        that is raised ends the daemon with exit code 1: the other peers compute what it held and do not wait for it, and at its next start
        it downloads a sound state.
        """
        if is_out_of_memory(error):
            traceback.clear_frames(error.__traceback__)  # they hold tensors
            raise error
        self._num_errors += 1
        INTERNAL_ERRORS.report("stepper", error, step=step, decision=reason)
        if self._half_updated or self._num_errors >= MOST_ERRORS:
            raise error
        await asyncio.sleep(PAUSE_S * 2 ** (self._num_errors - 1))
