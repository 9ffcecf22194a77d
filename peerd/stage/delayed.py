"""Delayed parameter updates (ZeRO-Offload, arXiv 2101.06840): the update of step t runs while step t+1 is computed without it.

Every gradient is thus exactly one update late, however long anything takes. The update runs on a thread of its own, on
parameters that nobody else reads until it is complete. Step t+2 is computed with them, once everything of step t+1 is launched.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from peerd.models.module import StageModule
from peerd.stage.parameters import copy_parameters


class DelayedUpdate:
    """The parameters after all updates so far: those of the next step. Methods except `made` are jobs for the executor's thread."""

    def __init__(self, module: StageModule) -> None:
        self._module = copy.deepcopy(module)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="update")
        self._work: Future[None] | None = None

    def wait(self) -> StageModule:
        """Wait for the running update and return the module. If the update failed, each call raises its error: the module is unusable."""
        if self._work is not None:
            self._work.result()
            self._work = None
        return self._module

    def close(self) -> None:
        """Wait for the running update, however it ends. There is no other after it."""
        self._pool.shutdown()

    async def made(self) -> None:
        """Return once the running update is over, so that a later `wait` does not block the executor's thread."""
        work = self._work
        if work is not None:
            await asyncio.wait([asyncio.wrap_future(work)])

    def advance(self, spare: StageModule, update: Callable[[], None]) -> StageModule:
        """Wait for the running update and start this step's, on a copy in `spare`. Returns the module to compute the next step with."""
        ready, self._module = self.wait(), spare

        def work() -> None:
            copy_parameters(ready, spare)
            update()

        self._work = self._pool.submit(work)
        return ready
