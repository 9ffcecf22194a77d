"""Fetches what a peer needs from others to finish its step, and remembers which peers not to ask again for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import structlog

from peerd.averaging.rounds import Rounds
from peerd.background import Tasks, start
from peerd.errors import (
    BadMessageError,
    BusyError,
    HopelessError,
    OtherLineageError,
    RemoteError,
    StageError,
    UnbelievedError,
    WrongStateError,
)
from peerd.policy.step.acts import CopyTied, FetchAverage, FetchPrevious, FetchSection, FetchTied, Reload
from peerd.policy.step.roster import Roster
from peerd.stage.download import Downloader
from peerd.stage.executor import Executor, Priority
from peerd.stage.snapshots import Downloaded
from peerd.stage.state import StageState
from peerd.step.believing import Belief
from peerd.step.joining import Joining
from peerd.step.trials import Trials
from peerd.swarm.clock import clock_s
from peerd.table.record import AverageId, Lineage, PeerId, Phase

Key = TypeVar("Key")

FORGET_REFUSAL_S = 2.0
LOOK_S, PAUSE_S = 0.5, 0.5
BUSY_S = 0.25
"""A donor of sections that is busy refuses at once. Another one is asked after this time."""
LOG = structlog.get_logger()


@dataclass(slots=True)
class _Shown:
    """Whether a mate has shown the header of an average. It may break off later, as lines do."""

    by_header: Callable[[Roster, AverageId], None]
    is_shown: bool = False

    def believe(self, roster: Roster, average_id: AverageId) -> None:
        self.is_shown = True
        self.by_header(roster, average_id)


class Fetching:
    """Performs the acts that fetch. A peer that refuses or does not answer is remembered by (peer, step) for FORGET_REFUSAL_S."""

    def __init__(
        self,
        state: StageState,
        executor: Executor,
        rounds: Rounds,
        downloader: Downloader,
        trials: Trials,
        joining: Joining,
        belief: Belief,
    ) -> None:
        self._state = state
        self._executor = executor
        self._rounds = rounds
        self._downloader = downloader
        self._trials = trials
        self._joining = joining
        self._belief = belief
        self._refused: dict[tuple[PeerId, int], float] = {}
        self._unanswered: dict[tuple[PeerId, int], float] = {}
        self._unbelieved: dict[tuple[PeerId, AverageId], float] = {}
        self._tasks = Tasks()
        self.sections: frozenset[tuple[PeerId, int]] = frozenset()
        """(mate, section): sections of the average that are on their way."""
        self.previous_s = 0.0
        """How long the previous parameters would take to download, by the last download."""
        self._found_no_donor_s = float("-inf")
        self._nobody_has: tuple[int, Lineage] | None = None
        """The step and lineage of which no mate has the previous parameters, as it has just begun."""

    @property
    def remembers(self) -> bool:
        return bool(self._refused or self._unanswered or self._unbelieved) or self.reloads_in_vain

    @property
    def reloads_in_vain(self) -> bool:
        return clock_s() - self._found_no_donor_s <= FORGET_REFUSAL_S

    def refused(self) -> frozenset[tuple[PeerId, int]]:
        return _recent(self._refused)

    def unanswered(self) -> frozenset[tuple[PeerId, int]]:
        return _recent(self._unanswered)

    def unbelieved(self) -> frozenset[tuple[PeerId, AverageId]]:
        return _recent(self._unbelieved)

    def forget(self) -> None:
        self._unbelieved.clear()
        self._refused.clear()
        self._unanswered.clear()

    def forget_refusals(self) -> None:
        self._refused.clear()

    async def average(self, act: FetchAverage) -> None:
        """Fetch a mate's average of this peer's step; it is ignored if this peer has moved on meanwhile."""
        asked, began_s, failed, shown = (
            self._state.record,
            clock_s(),
            partial(self._note, act.step),
            _Shown(self._belief.by_header(act.peer)),
        )
        try:
            found = await self._rounds.fetcher.fetch(act.peer, act.step, act.others, failed, shown.believe)
            now = self._state.record
            if (now.incarnation, now.ledger_no, now.step) != (asked.incarnation, asked.ledger_no, asked.step):
                return
            if not self._belief.takes(act.peer, found):
                self._disbelieve(act.peer, act.step)
            elif (is_better := self._belief.is_better(found)) is False:
                self._refused[act.peer, act.step] = clock_s()
            elif now.phase is Phase.JOINING:
                await self._trials.update(lambda: self._state.catch_up(found))
                self._joining.applied(clock_s() - began_s)
                self._rounds.applied(found)
            else:
                taken = partial(self._state.take_average, found.roster, found.flat_sum, found.tied, found.slices, sections=found.sections)
                await self._executor.run(Priority.LEDGER, partial(taken, is_better=is_better))
        except RemoteError as error:
            self._note(act.step, act.peer, error)
            if isinstance(error, OtherLineageError | UnbelievedError):
                self._belief.disbelieves(act.peer)
            if isinstance(error, HopelessError) or not (
                shown.is_shown or isinstance(error, BadMessageError | BusyError | OtherLineageError)
            ):
                self._belief.kept_back(act.peer)

    def _note(self, step: int, peer: PeerId, error: RemoteError) -> None:
        """Remember that a peer did not give what it was asked for."""
        if isinstance(error, BadMessageError):
            self._belief.caught(peer, error.message)
        if isinstance(error, UnbelievedError):
            self._disbelieve(peer, step)
            return
        if told := self._belief.told_by(peer):
            self._unbelieved[peer, told] = clock_s()
        is_refused = isinstance(error, WrongStateError | BadMessageError | BusyError)
        (self._refused if is_refused else self._unanswered)[peer, step] = clock_s()

    def _disbelieve(self, peer: PeerId, step: int) -> None:
        """Remember an average that this peer does not believe: of the present step it is asked for again as soon as it counts."""
        if told := self._belief.told_by(peer):
            self._unbelieved[peer, told] = clock_s()
        else:
            self._refused[peer, step] = clock_s()

    def begin_section(self, act: FetchSection, ended: Callable[[], None]) -> None:
        """Fetch a section of the average while this peer does other things. `ended` is called when it is here, or does not come."""
        under_way = (act.peer, act.section)
        self.sections |= {under_way}

        def end(_task: asyncio.Task[None]) -> None:
            self.sections -= {under_way}
            ended()

        self._tasks.start(self._section(act)).add_done_callback(end)

    async def _section(self, act: FetchSection) -> None:
        asked = self._state.record
        try:
            taken = await self._rounds.fetcher.fetch_section(act.peer, act.step, act.section)
            now = self._state.record
            if not self._belief.takes_section(act.peer, taken):
                self._refused[act.peer, act.step] = clock_s()
            elif (now.incarnation, now.step, now.lineage) == (asked.incarnation, asked.step, asked.lineage):
                await self._executor.run(Priority.LEDGER, lambda: self._state.take_section(taken))
        except RemoteError as error:
            self._note(act.step, act.peer, error)
            if isinstance(error, WrongStateError | BadMessageError | BusyError):
                await asyncio.sleep(BUSY_S)

    def stop(self) -> None:
        """End what is still on its way."""
        self._tasks.cancel()

    async def tied(self, act: FetchTied) -> None:
        """Fetch the gradients of a tied weight that this peer's average lacks."""
        average_id = self._state.record.average_id
        try:
            values = await self._rounds.fetcher.fetch_tied(act.peer, act.step, act.given, act.others, act.least)
        except RemoteError as error:
            self._note(act.step, act.peer, error)
        else:
            await self._executor.run(Priority.LEDGER, lambda: self._state.take_tied(average_id, act.wanted, act.given, values))

    def lacks_previous(self, first_step: int) -> bool:
        """Whether this peer is a joiner with a state to which the parameters of the step before belong, and lacks them.

        Nobody needs those before `first_step`, at which the run begins.
        """
        record = self._state.record
        is_downloaded = record.phase is Phase.JOINING and record.step > first_step
        return is_downloaded and self._state.holdings.previous is None and self._nobody_has != (record.step, record.lineage)

    async def previous(self, act: FetchPrevious, is_over: Callable[[], bool], taken: Callable[[], object]) -> None:
        """Fetch the parameters of the step before this joiner's, until it `is_over`: the stage has gone on, and a mate has the average.

        `taken` is called once this peer has them.
        """
        stage = self._state.record.stage
        fetching = start(self._downloader.download_previous(stage, act.peer), expects=(RemoteError, StageError))
        try:
            while not fetching.done() and not is_over():
                await asyncio.wait({fetching}, timeout=LOOK_S)
            if not fetching.done():
                return
            found = fetching.result()
        except (RemoteError, StageError) as error:
            LOG.info("the previous parameters could not be fetched", error=error.message)
            await asyncio.sleep(PAUSE_S)
            return
        finally:
            fetching.cancel()
        if found.tensors:
            await self._trials.update(lambda: self._take_previous(found))
            taken()
        else:
            self._nobody_has = found.step, found.lineage

    def _take_previous(self, found: Downloaded) -> None:
        """They are ignored if this peer has moved on, or has them."""
        mine, held = self._state.record, self._state.holdings
        if (mine.phase, mine.step, mine.lineage) == (Phase.JOINING, found.step, found.lineage) and held.previous is None:
            held.take_previous(found.tensors)

    async def donor(self, act: Reload) -> PeerId | None:
        """Return a peer that gives a state of use, as its header says, if this peer is still where it was when that has come."""
        asked = self._state.record
        try:
            found = await self._downloader.find_donor(
                asked.stage,
                act.peer,
                lambda header: act.is_met_by(header.step, header.lineage, asked),
                lambda record: act.is_claimed_by(record, asked),
            )
        except StageError as error:
            LOG.info("no state to reload", reason=act.reason, error=error.message)
            self._found_no_donor_s = clock_s()
            return None
        now = self._state.record
        return found if (now.incarnation, now.step, now.phase) == (asked.incarnation, asked.step, asked.phase) else None

    async def copy_of_tied(self, act: CopyTied) -> None:
        """Replace this peer's copy of a tied weight with the other stage's."""
        step = self._state.record.step
        LOG.warning("the copies of the tied weight differ: downloading the other stage's", step=step, peer=act.peer)
        try:
            found = await self._downloader.download(act.stage, act.peer, tied_only=True)
            if not self._downloader.is_of_most(act.stage):
                raise StageError("too few peers of the other stage hold this copy of the tied weight", "it is asked for again")
            await self._trials.update(lambda: self._state.copy_tied(found.tensors, found.step))
        except (RemoteError, StageError):
            self._refused[act.peer, step] = clock_s()


def _recent(asked: dict[Key, float]) -> frozenset[Key]:
    """Remove entries older than FORGET_REFUSAL_S, in place, and return the rest."""
    now_s = clock_s()
    for key in [key for key, at_s in asked.items() if now_s - at_s > FORGET_REFUSAL_S]:
        del asked[key]
    return frozenset(asked)
