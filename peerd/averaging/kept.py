"""The averages that a member keeps for mates that missed them: in memory until they are on disk, then in the log."""

from __future__ import annotations

from collections.abc import Coroutine, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from peerd.averaging.handover import packed, packed_section
from peerd.averaging.host import RoundHost
from peerd.averaging.lent_averages import LentAverages, LentFile
from peerd.averaging.log import AverageLog
from peerd.errors import PeerGoneError, WrongStateError
from peerd.link.links import CHUNK_BYTES
from peerd.stage.executor import Executor, Priority
from peerd.stage.results import HeldAverage
from peerd.stage.state import StageState
from peerd.table.record import AverageId
from peerd.wire.chunks import CutFile
from peerd.wire.messages import Average
from peerd.wire.tensors import views_of_flat

MOST_HASHED = 16


class KeptAverages:
    """Holds and serves finished averages. The log has a thread of its own: it waits for no pass, and no pass waits for a disk."""

    def __init__(self, state: StageState, executor: Executor, log: AverageLog, host: RoundHost) -> None:
        self._state = state
        self._executor = executor
        self._disk = Executor("averages")
        self._log = log
        self._host = host
        self._unlogged: dict[int, HeldAverage] = {}
        """Averages applied, by step, until they are on disk."""
        self._hashes: dict[tuple[AverageId, AverageId], tuple[bytes, ...]] = {}
        """Of the chunks of what was given last, by the ids of the average and of the tied sum after it."""
        self._lent = LentAverages()

    @property
    def num_kept(self) -> int:
        """The number of finished steps, from the last one back, whose averages this peer can give."""
        step, applied = self._state.record.step, self._state.applied
        held = {*self._log.steps, *self._unlogged} | ({applied.roster.step} if applied is not None else set())
        return next(number for number in range(step + 1) if step - 1 - number not in held)

    async def get_average(self, stage: int, step: int, section: int | None = None) -> tuple[Average, CutFile, bool]:
        """Serve the average of a step to a mate that missed it, from memory or from the log, or one section of it.

        The last value says whether the step is unfinished here, so that others may wait for that mate. Raises WrongStateError if there is
        no such average, PeerGoneError if the disk fails.
        """

        def find() -> tuple[Average, CutFile] | None:
            if section is not None:
                part = packed_section(self._state, step, section)
                return None if part is None else self._lent_to_one(*part)
            is_finished, found = step < self._state.record.step, next(self._in_memory(step), None)
            stored = self._log.stored(step) if found is None and is_finished else None
            found = found or (self._log.get(step) if stored is None else None)
            if found is not None:
                stored = packed(found if is_finished else replace(found, tied=None, norm=None))
            return None if stored is None else self._lent_to_one(*stored)

        given = await self._disk.run(Priority.CONTROL, find) if stage == self._state.record.stage else None
        if given is None:
            raise WrongStateError(f"this peer holds no average of stage {stage}, step {step}")
        return *given, step == self._state.record.step

    def _lent_to_one(self, average: Average, file: CutFile) -> tuple[Average, CutFile]:
        given, file = self._hashed(average, file)
        return given, self._lent.lend(given, file)

    def _hashed(self, average: Average, file: CutFile) -> tuple[Average, CutFile]:
        """Add the hashes of the chunks to the header. Those of what was given last are kept: all who ask for it share them."""
        key = average.id, average.tied_sum
        try:
            known = self._hashes.pop(key, None) or file.hashes()
        except OSError as error:
            raise PeerGoneError(f"this peer's disk fails: {error}") from None
        self._hashes[key] = known
        if len(self._hashes) > MOST_HASHED:
            del self._hashes[next(iter(self._hashes))]
        return replace(average, chunk_hashes=known), file

    async def get_tied(self, step: int, wanted: AverageId) -> LentFile:
        """Serve gradients of a tied weight by their id: this stage's averaged ones, or the sum of both stages.

        Raises WrongStateError if there are none of that id.
        """

        def find() -> LentFile:
            if (known := self._lent.tied(wanted)) is not None:
                return known
            for held in self._of_step(step):
                values = None
                if held.tied is not None and held.tied.id == wanted:
                    values = held.tied.values
                elif held.id == wanted and self._state.holdings.tied_names:
                    values = self._state.accumulator.tied_of(held.flat_sum)
                if values is not None:
                    return self._lent.lend_tied(step, wanted, CutFile(views_of_flat(values), chunk_bytes=CHUNK_BYTES))
            raise WrongStateError(f"this peer holds no such gradients of a tied weight at step {step}")

        return await self._disk.run(Priority.CONTROL, find)

    async def begin(self) -> None:
        """Write the sum of the average that this peer has just taken. Little is left to write once it is applied."""
        held = self._state.average
        if held is not None:
            await self._disk.run(Priority.CONTROL, partial(self._log.begin, held))

    def hold(self, held: HeldAverage) -> Coroutine[Any, Any, None]:
        """Keep it in memory until what this returns has written it.

        Where a disk takes longer than a step, others wait for it: they are given up but for the last, or memory would fill with them.
        """
        self._unlogged = {held.roster.step: held}
        self._state.applied = None
        return self._write(held)

    async def _write(self, held: HeldAverage) -> None:
        """Write an average to the log, so that it takes no memory beside the next step's gradients.

        If no mate can need any of them, only this one stays, for a mate that comes just now.
        """
        step, is_tied, is_needed = held.roster.step, held.tied is not None, self._is_needed(held)
        needed_from, last = self._host.averages_needed_from(), [held]
        del held
        try:
            kept = await self._disk.run(Priority.CONTROL, partial(self._put, last[0], needed_from, is_alone=not is_needed))
            if is_tied and not kept:
                await self._executor.run(Priority.CONTROL, lambda: self._state.forget_sum(step))
        finally:
            if self._is_wanted(last[0]):
                del self._unlogged[step]
        await self._disk.run(Priority.CONTROL, partial(self._take_back, step))
        await self._disk.run(Priority.CONTROL, last.clear)  # to free 220 MB takes 20 ms, for which the event loop would stand still
        if not is_needed:
            self._log.forget_trouble()

    def _take_back(self, step: int) -> None:
        if self._lent.are_read:
            self._lent.finished(step, self._log.stored(step), self._log.steps)

    def _put(self, held: HeldAverage, needed_from: int | None, *, is_alone: bool) -> bool:
        return self._is_wanted(held) and self._log.put(held, needed_from, is_alone=is_alone)

    def _is_wanted(self, held: HeldAverage) -> bool:
        """Whether it still waits for the disk."""
        return self._unlogged.get(held.roster.step) is held

    def close(self) -> None:
        self._disk.close()

    def _of_step(self, step: int) -> Iterator[HeldAverage]:
        """Yield the averages of a step, those in memory first."""
        yield from self._in_memory(step)
        logged = self._log.get(step)
        if logged is not None:
            yield logged

    def _in_memory(self, step: int) -> Iterator[HeldAverage]:
        for held in (self._state.average, self._state.applied, *self._unlogged.values()):
            if held is not None and held.roster.step == step:
                yield held

    def _is_needed(self, held: HeldAverage) -> bool:
        """Where nobody else has a part in it and no joiner is there, no mate can have missed it, but for one that comes just now."""
        return len(held.roster.entries) > 1 or held.tied is not None or self._host.averages_needed_from() is not None
