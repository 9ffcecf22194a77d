"""What a member does with the sum of a round that is done: it is the step's average, a section of that, or the sum of this member's group.

The errors of lossy codecs go along: those of a group's round are made up for in the next round of the same step, and count as not made
where the sum is given up.
"""

from __future__ import annotations

import enum
from functools import partial

from torch import Tensor

from peerd.averaging.compression import Compression
from peerd.averaging.exchange import Exchange
from peerd.background import Tasks
from peerd.link.links import Bytes
from peerd.policy.step.certificates import Slices
from peerd.policy.step.confirming import SignedOutcome
from peerd.policy.step.roster import Roster, is_whole
from peerd.stage.executor import Executor, Priority
from peerd.stage.results import HeldAverage
from peerd.stage.sections import SectionOfAverage
from peerd.stage.state import StageState
from peerd.table.record import AverageId, PeerId


class SumOf(enum.Enum):
    """What a round has summed."""

    GROUP = "a group"
    SECTION = "a section of the stage's average"
    STAGE = "a stage"


class RoundSums:
    """Its calls are in the order of the rounds. `arithmetic` runs all work on chunks, so each queues what it says of errors there."""

    def __init__(self, state: StageState, compression: Compression, executor: Executor, arithmetic: Executor, tasks: Tasks) -> None:
        self._state = state
        self._compression = compression
        self._executor = executor
        self._arithmetic = arithmetic
        self._tasks = tasks
        self.num_of_groups = 0
        """Number of sums of groups that this peer has made with others."""
        self.num_of_sections = 0
        """Number of sections of averages that it has made with others."""
        self._group: Roster | None = None
        """The round that made the last sum of a group."""
        self._step = -1
        """The step of the last one. A commit may be done before its average is told to be applied."""

    def begins(self) -> None:
        """A round begins. Where the sum that a group's round of this step made has been given up, so are that round's errors."""
        mine = self._state.record
        if mine.step == self._step:
            self._hold(mine.group)

    def _hold(self, group: AverageId) -> None:
        if self._compression.allowed.is_lossy:
            self._tasks.start(self._arithmetic.run(Priority.CONTROL, lambda: self._compression.hold(group)))

    async def take(self, exchange: Exchange, outcomes: tuple[SignedOutcome, ...] = ()) -> SumOf | None:
        """Give the state the sum of a round that is done, unless the state has left it. Returns what that is the sum of.

        `outcomes`: what its members have signed of it, where they do.
        """
        roster, made = exchange.roster, (exchange.accumulator, exchange.slices.all, exchange.encoded, outcomes)
        found = await self._executor.run(Priority.CONTROL, partial(self._take, roster, *made))
        if found is SumOf.GROUP:
            self.num_of_groups += 1
            self._step = roster.step
            self._hold(roster.average_id)
        self.num_of_sections += found is SumOf.SECTION
        return found

    def members_of(self, group: AverageId) -> tuple[PeerId, ...]:
        """The members of the round that made the sum of a group which this peer holds."""
        return self._group.peers if self._group is not None and self._group.average_id == group else ()

    def _take(
        self, roster: Roster, total: Tensor, slices: Slices, encoded: tuple[Bytes, ...], outcomes: tuple[SignedOutcome, ...]
    ) -> SumOf | None:
        state = self._state
        if state.round is not roster:
            return None  # it was closed meanwhile
        if roster.num_sections > 1:
            state.close_round(roster.average_id)
            start, end = state.bounds_of(roster)
            state.take_section(SectionOfAverage(roster, total[start:end], encoded, slices, outcomes), total)
            return SumOf.SECTION
        if is_whole(roster.entries, state.num_microbatches):
            state.take_average(roster, total, slices=slices)
            return SumOf.STAGE
        self._group = roster
        state.take_sum(roster, total)
        return SumOf.GROUP

    def applied(self, held: HeldAverage) -> None:
        """The average was applied."""
        if self._compression.allowed.is_lossy:
            work = partial(self._compression.applied, held.rounds, held.group)
            self._tasks.start(self._arithmetic.run(Priority.CONTROL, work))
