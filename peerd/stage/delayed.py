"""Delayed parameter updates (ZeRO-Offload, arXiv 2101.06840): step t's update is made while step t+1 is computed without it.

Step t+1 is computed with the parameters that lack the update of step t, so every gradient is one update late; which update
that is does not depend on how long anything took. The update runs on a thread of its own and on parameters that nobody else
reads until it is made: then those of step t+2 are computed with them, as soon as nothing of step t+1 is left to launch.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from peerd.models.module import StageModule
from peerd.stage.parameters import copy_parameters


class DelayedUpdate:
    """The parameters that all updates so far lead to: those of the next step. Methods are jobs for the executor's thread but for `made`."""

    def __init__(self, module: StageModule) -> None:
        self._module = copy.deepcopy(module)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="update")
        self._work: Future[None] | None = None

    def wait(self) -> StageModule:
        """The module, once the update under way is made. Raises what the update raised, each time: such parameters are half made."""
        if self._work is not None:
            self._work.result()
            self._work = None
        return self._module

    async def made(self) -> None:
        """Returns once the update under way is over, so that whoever wants its outcome does not hold the executor's thread meanwhile."""
        work = self._work
        if work is not None:
            await asyncio.wait([asyncio.wrap_future(work)])

    def advance(self, spare: StageModule, update: Callable[[], None]) -> StageModule:
        """Give this step's update away and begin the next, on `spare` and from there. Returns the parameters to compute with."""
        ready, self._module = self.wait(), spare

        def work() -> None:
            copy_parameters(ready, spare)
            update()

        self._work = self._pool.submit(work)
        return ready
