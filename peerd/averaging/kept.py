"""The averages that a member keeps for mates that missed them: in memory until they are on disk, then in the log."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace

from peerd.averaging.handover import packed
from peerd.averaging.host import RoundHost
from peerd.averaging.log import AverageLog
from peerd.errors import WrongStateError
from peerd.link.links import Bytes
from peerd.stage.executor import Executor, Priority
from peerd.stage.results import HeldAverage
from peerd.stage.state import StageState
from peerd.table.record import AverageId
from peerd.wire.chunks import digest_of
from peerd.wire.messages import Average
from peerd.wire.tensors import views_of_flat

LOG_PAUSE_S = 0.2
MOST_DIGESTS = 16


class KeptAverages:
    """Holds and serves finished averages. The log is read and written on the thread of `arithmetic`."""

    def __init__(self, state: StageState, executor: Executor, arithmetic: Executor, log: AverageLog, host: RoundHost) -> None:
        self._state = state
        self._executor = executor
        self._arithmetic = arithmetic
        self._log = log
        self._host = host
        self._unlogged: dict[int, HeldAverage] = {}
        """Averages applied, by step, until they are on disk; one that need not be written, until the next one."""
        self._digests: dict[tuple[AverageId, AverageId], bytes] = {}
        """Of what was given last, by the ids of the average and of the tied sum after it: hashing takes the thread of the sums."""

    @property
    def num_kept(self) -> int:
        """The number of finished steps, from the last one back, whose averages this peer can give."""
        step, applied = self._state.record.step, self._state.applied
        held = {*self._log.steps, *self._unlogged} | ({applied.roster.step} if applied is not None else set())
        return next(number for number in range(step + 1) if step - 1 - number not in held)

    async def get_average(self, stage: int, step: int) -> tuple[Average, bytes, Sequence[Bytes]]:
        """Serve the average of a step to a mate that missed it, from memory or from the log. Raises WrongStateError if there is none."""

        def find() -> tuple[Average, bytes, Sequence[Bytes]] | None:
            found = next(self._of_step(step), None)
            if found is None:
                return None
            average, chunks = packed(found if step < self._state.record.step else replace(found, tied=None, norm=None))
            return average, self._digest_of(average, chunks), chunks

        given = await self._arithmetic.run(Priority.CONTROL, find) if stage == self._state.record.stage else None
        if given is None:
            raise WrongStateError(f"this peer holds no average of stage {stage}, step {step}")
        return given

    def _digest_of(self, average: Average, chunks: Sequence[Bytes]) -> bytes:
        key = average.roster.average_id, average.tied_sum
        known = self._digests.pop(key, None) or digest_of(chunks)
        self._digests[key] = known
        if len(self._digests) > MOST_DIGESTS:
            del self._digests[next(iter(self._digests))]
        return known

    async def get_tied(self, step: int, wanted: AverageId) -> tuple[bytes, Sequence[Bytes]]:
        """Serve gradients of a tied weight by their id: this stage's averaged ones, or the sum of both stages.

        Returns their hash and chunks. Raises WrongStateError if there are none of that id.
        """

        def find() -> Sequence[Bytes]:
            for held in self._of_step(step):
                if held.tied is not None and held.tied.id == wanted:
                    return views_of_flat(held.tied.values)
                if held.roster.average_id == wanted and self._state.holdings.tied_names:
                    return views_of_flat(self._state.accumulator.tied_of(held.flat_sum))
            raise WrongStateError(f"this peer holds no such gradients of a tied weight at step {step}")

        chunks = await self._arithmetic.run(Priority.CONTROL, find)
        return await asyncio.to_thread(digest_of, chunks), chunks

    def hold(self, held: HeldAverage) -> bool:
        """Keep it in memory. Returns whether the log is to be changed, by `write`."""
        self._unlogged = {step: other for step, other in self._unlogged.items() if self._is_logged(other)} | {held.roster.step: held}
        self._state.applied = None
        if not self._is_logged(held):
            self._log.forget_trouble()
            return bool(self._log.steps)
        return True

    async def write(self, held: HeldAverage) -> None:
        """Write an average to the log, or empty the log if no mate can need any of it.

        After a pause, so that the first microbatch of the next step does not wait for the disk.
        """
        await asyncio.sleep(LOG_PAUSE_S)
        if not self._is_logged(held):
            await self._arithmetic.run(Priority.IDLE, self._log.clear)
            return
        try:
            needed_from = self._host.averages_needed_from()
            kept = await self._arithmetic.run(Priority.IDLE, lambda: self._log.put(held, needed_from))
            if held.tied is not None and not kept:
                await self._executor.run(Priority.CONTROL, lambda: self._state.forget_sum(held.roster.step))
        finally:
            if self._unlogged.get(held.roster.step) is held:
                del self._unlogged[held.roster.step]

    def _of_step(self, step: int) -> Iterator[HeldAverage]:
        """Yield the averages of a step, those in memory first."""
        for held in (self._state.average, self._state.applied, *self._unlogged.values()):
            if held is not None and held.roster.step == step:
                yield held
        logged = self._log.get(step)
        if logged is not None:
            yield logged

    def _is_logged(self, held: HeldAverage) -> bool:
        """Where nobody else has a part in it and no joiner is there, no mate can have missed it, but for one that comes just now."""
        return len(held.roster.entries) > 1 or held.tied is not None or self._host.averages_needed_from() is not None
