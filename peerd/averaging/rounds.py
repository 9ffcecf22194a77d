"""Rounds of butterfly all-reduce over a roster: rules 7 (propose) and 8 (exchange) of docs/protocol.md.

The accumulators are cut into one slice for each member that reduces (all but the spared ones). It receives every member's part of its
slice, adds the parts in roster order and answers each with the sum, so all members end with the same bits. Every part carries
the average id of the round. A part whose ledger is not the one in the roster is refused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import structlog
from torch import Tensor

from peerd.averaging.absences import Absences
from peerd.averaging.codec_choice import RoundCodec
from peerd.averaging.compression import Compression
from peerd.averaging.early_parts import EarlyParts
from peerd.averaging.exchange import Moving, Round, elements_of, own_part, part_for, reduce, whole_of
from peerd.averaging.fetcher import AverageFetcher
from peerd.averaging.host import RoundHost
from peerd.averaging.kept import KeptAverages
from peerd.averaging.known_rounds import KnownRounds
from peerd.averaging.log import AverageLog
from peerd.background import INTERNAL_ERRORS, Tasks, start
from peerd.config.codec import Codec
from peerd.errors import BadMessageError, PeerGoneError, RemoteError, WrongStateError
from peerd.link.few_each import FewEach
from peerd.policy.step.roster import Roster, why_never
from peerd.stage.executor import Executor, Priority
from peerd.stage.results import HeldAverage
from peerd.stage.state import StageState
from peerd.table.record import NO_RECORD, AverageId, PeerId, RawRecord
from peerd.timeline.spans import SpanKind, SpanRing
from peerd.wire.clients import AveragingClient
from peerd.wire.handlers import ReceivePart
from peerd.wire.messages import Part

ABORT_TIMEOUT_S = 2.0
MOST_JOINING = 2
"""Rounds of one leader that this member joins at once. Each waits for the torch thread, maybe longer than its leader does."""
MOST_OWN_ERRORS = 3
"""Number of rounds in a row that may fail by a bug at this member. After that it leads no other round."""
LOG = structlog.get_logger()


class Rounds:
    """Opens, runs and closes rounds, and implements the averaging service."""

    def __init__(
        self,
        state: StageState,
        executor: Executor,
        client: AveragingClient,
        log: AverageLog,
        averaging_s: float,
        clock: Callable[[], float],
        host: RoundHost,
        spans: SpanRing | None = None,
    ) -> None:
        self._state = state
        self._executor = executor
        # Where steps overlap, sums have a thread of their own: on the torch thread each would wait for a pass of the next step.
        self._arithmetic = Executor("averaging") if state.record.next_ledger_no else executor
        self.fetcher = AverageFetcher(state, self._arithmetic, client, averaging_s, spans or SpanRing(0))
        self.kept = KeptAverages(state, executor, self._arithmetic, log, host)
        self._client = client
        self._averaging_s = averaging_s
        self._clock = clock
        sums = state.accumulator
        self.compression = Compression(state.weight_codecs, sums.flat.dtype, sums.shapes, sums.num_exact)
        self._round_codec = RoundCodec(state.weight_codecs)
        self._joining = FewEach()
        self._early = EarlyParts(averaging_s, host.is_mate)
        self._tasks = Tasks()
        self._known = KnownRounds(self._tasks)
        self._own_errors: list[Exception] = []
        """Bugs that ended rounds at this member since the last average was applied."""
        self.open: Round | None = None
        self.failed = 0
        self.num_applied = 0
        self.absences = Absences(state.record.peer, averaging_s)
        self._host = host
        self._spans = spans or SpanRing(0)

    # As leader

    async def lead(self, roster: Roster) -> str:
        """Propose a round to the other members and open it here. Returns why it failed, or an empty string when all joined.

        Raises unexpected errors. Raises the last one again once `MOST_OWN_ERRORS` rounds have failed by bugs here: the members
        leave out another member that fails, but never their leader.
        """
        if len(self._own_errors) >= MOST_OWN_ERRORS:
            raise self._own_errors[-1]
        roster = replace(roster, codec=self._round_codec.codec(self._state.accumulator.flat.numel()))
        others = [peer for peer in roster.peers if peer != self._state.record.peer]
        proposals = [start(self._propose_to(peer, roster)) for peer in others]
        try:
            reason = await self._known.start(roster, self._join(roster))
            answers = [reason] if reason else await asyncio.gather(*proposals)
        except Exception as error:
            self._spread_abort(roster)
            await self.close(roster.average_id, f"internal error: {error!r}")
            raise
        finally:
            for proposal in proposals:
                proposal.cancel()
        refusals = [answer for answer in answers if answer]
        if refusals:
            self._spread_abort(roster)
            await self.close(roster.average_id, refusals[0])
            return refusals[0]
        return ""

    async def _propose_to(self, peer: PeerId, roster: Roster) -> str:
        try:
            joined, reason, record = await self._client.propose(peer, roster, self._averaging_s)
        except RemoteError as error:
            self._host.report_failure(peer)
            if self.open is not None and self.open.roster is roster:
                self.open.silent.append(peer)
            return f"{peer}: {error.message}"
        if joined:
            return ""
        if self.open is not None and self.open.roster is roster:
            self.open.refused = True
        self._host.learn(record)
        return f"{peer}: {reason}"

    def _spread_abort(self, roster: Roster) -> None:
        """Send ABORT to all members if this peer leads; otherwise to the leader, which tells the others."""
        me = self._state.record.peer
        for peer in roster.peers if roster.leader == me else (roster.leader,):
            if peer != me:
                self._tasks.start(self._abort_at(peer, roster.average_id))

    async def _abort_at(self, peer: PeerId, average_id: AverageId) -> None:
        try:
            await self._client.abort(peer, average_id, ABORT_TIMEOUT_S)
        except RemoteError:
            return  # the member's own timer closes the round there

    # As member

    async def propose(self, caller: PeerId, roster: Roster) -> tuple[bool, str, RawRecord]:
        """Join a round that `caller` leads. Returns whether this peer joined; if not, also the reason and its present record."""
        if caller != roster.leader:
            raise BadMessageError("a roster is proposed by its leader")
        if not self._host.is_mate(caller):
            return False, "no record here says that the proposer serves this stage", self._host.own_record()
        if self._known.is_dead(roster.average_id) or self.runs(roster.average_id):
            return False, "this round is closed", self._host.own_record()  # or was proposed before
        # The task outlives this call: if the leader ends the call, the round that the state has opened still gets its end (hole 21).
        reason = why_never(self._state.record, roster, self._state.num_microbatches)
        reason = reason or await asyncio.shield(self._known.start(roster, self._join_for(caller, roster)))
        return (False, reason, self._host.own_record()) if reason else (True, "", NO_RECORD)

    async def _join_for(self, leader: PeerId, roster: Roster) -> str:
        """Join, unless as many rosters of this leader wait for it already. It may have given one up, and proposed the next."""
        with self._joining.by(leader, MOST_JOINING) as may_join:
            return await self._join(roster) if may_join else "other proposals of the same leader wait here"

    async def _join(self, roster: Roster) -> str:
        codec = self.compression.codec_of(roster.codec)
        if codec is None:
            return f"this run does not allow the codec {roster.codec} for gradients"
        close = partial(self._state.close_round, roster.average_id)
        try:
            reason, accumulator = await self._executor.run(Priority.CONTROL, lambda: self._state.open_round(roster))
            reason = reason if accumulator is None else self._begin(roster, codec, accumulator)
        except Exception:
            await self._executor.run(Priority.CONTROL, close)
            raise
        if reason:
            await self._executor.run(Priority.CONTROL, close)
        return reason

    def _begin(self, roster: Roster, codec: Codec, accumulator: Tensor) -> str:
        if self._known.is_dead(roster.average_id) or self._state.round is not roster:
            return "this round is closed"  # while the state opened it, the leader aborted it, or this peer fenced or began to join
        me, reducers = self._state.record.peer, roster.reducers
        mine = reducers.index(me) if me in reducers else -1
        slices = self.compression.slices(accumulator.numel(), len(reducers), codec)
        ledger, now_s = roster.entries[roster.peers.index(me)].done, self._clock()
        self.open = Round(roster, mine, accumulator, slices, ledger, opened_s=now_s, progress_s=now_s)
        self._early.opened()
        self._known.start(roster, self._run(self.open))
        self._host.round_opened()
        return ""

    def runs(self, average_id: AverageId) -> bool:
        """Whether a task of this peer will end this round. Rule 4 (close) ends any other (hole 21)."""
        return self._known.task_of(average_id) is not None

    async def _run(self, current: Round) -> None:
        """Exchange slices until the average is complete. A failed call closes the round at once; rule 4 (close) ends one that hangs."""
        try:
            await self._finish(current)
        except RemoteError as error:
            await self.close(current.roster.average_id, error.message)
        except Exception as error:  # a bug
            await self._fail(current, error)

    async def _finish(self, current: Round) -> None:
        began_s = self._clock()
        await self._fetch_slices(current)
        if len(current.roster.entries) > 1:
            self._round_codec.exchanged(current.slices_of[0].codec, self._clock() - began_s)
        if self.open is not current:
            return
        self.open = None
        if self._arithmetic is not self._executor:
            await self._arithmetic.run(Priority.CONTROL, lambda: whole_of(current))
        await self._executor.run(Priority.CONTROL, lambda: self._take(current))
        self._host.announce()

    def _take(self, current: Round) -> None:
        if self._state.round is current.roster:  # else it was closed meanwhile
            self._state.take_average(current.roster, whole_of(current))

    async def _fail(self, current: Round, error: Exception) -> None:
        """End the round because of a bug at this member. No other member counts as missed."""
        roster = current.roster
        INTERNAL_ERRORS.report("averaging round", error, step=roster.step, leader=roster.leader)
        self._own_errors.append(error)
        current.refused = True
        if self.open is current:
            self._spread_abort(roster)
        elif self.open is None and not self._known.is_dead(roster.average_id):
            self.open = current  # counts as failed: the exchange was done, but the state has not taken the average
        await self.close(roster.average_id, f"internal error: {error!r}")

    async def _fetch_slices(self, current: Round) -> None:
        """Fetch all slices concurrently; the first failure cancels the others."""
        slices = [self._fetch_slice(current, number, peer) for number, peer in enumerate(current.roster.reducers)]
        tasks = [start(work, expects=(RemoteError,)) for work in slices]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _fetch_slice(self, current: Round, number: int, peer: PeerId) -> None:
        if number == current.mine:
            await self._add_part(current, peer, lambda: own_part(current, self.compression))
            current.slices[number] = (await asyncio.shield(current.reduced)).total
            return
        encode = partial(part_for, current, number, self.compression)
        encoded = self.compression.allowed.is_lossy  # otherwise the part is sent straight from memory
        part = await self._arithmetic.run(Priority.CONTROL, encode) if encoded else encode()
        size = sum(len(chunk) for chunk in part)
        header = Part(current.roster.average_id, number, current.ledger, size)
        began_s = time.monotonic()
        try:
            told, patience_s = Moving(current, size, self._clock).told, 2 * self._averaging_s
            chunks = await self._client.reduce(peer, header, part, patience_s, told, current.num_streams)
        except RemoteError:
            self._host.report_failure(peer)
            raise
        self._spans.add(SpanKind.EXCHANGE, began_s, current.roster.step, -1, peer, 2 * size)
        current.progress_s = self._clock()
        where, place = elements_of(current, number)
        self.compression.count(where.codec, size)
        current.slices[number] = await self._arithmetic.run(Priority.CONTROL, lambda: self.compression.received(chunks, where, into=place))

    # As reducer

    async def reduce(self, caller: PeerId, part: Part, receive: ReceivePart) -> Sequence[memoryview]:
        current = await self._early.find(caller, partial(self._open_round_of, part.average_id))
        entry = current.roster.entry_of(caller)
        where = current.slices_of[current.mine]
        size = self.compression.num_bytes(where)
        if entry is None or entry.done != part.ledger or part.slice_index != current.mine or part.num_bytes != size:
            raise BadMessageError("this part is not what the roster says")
        with current.takes_part_of(caller):
            chunks = await receive(lambda num_bytes: current.hears(num_bytes, size, self._clock()), current.num_streams)
        try:
            await self._add_part(current, caller, lambda: self.compression.received(chunks, where))
        except RemoteError:
            raise
        except Exception as error:  # a bug; handled in a task, which goes on if the caller ends this call
            self._tasks.start(self._fail(current, error))
        while not current.reduced.done():
            left_s = current.progress_s + 2 * self._averaging_s - self._clock()
            if left_s <= 0:
                raise PeerGoneError("the round did not come together")
            await asyncio.wait({current.reduced}, timeout=left_s)
        self.compression.count(where.codec, size)
        return current.reduced.result().chunks

    def arrived(self, average_id: AverageId) -> int:
        return self.open.arrived if self.open is not None and self.open.roster.average_id == average_id else 0

    async def _add_part(self, current: Round, peer: PeerId, made: Callable[[], Tensor]) -> None:
        """Run `made` to get a part, and after the last part sum them: one job, because each hand-over costs as much as a small slice."""

        loop = asyncio.get_running_loop()

        def add() -> None:
            if current.complete:  # a part sent twice must not be added twice
                return
            current.parts[peer] = made()
            current.complete = len(current.parts) == len(current.roster.entries)
            if current.complete:  # done here, as the sender of the last part may have given up and the others still need the sum
                loop.call_soon_threadsafe(current.made, reduce(current, self.compression))

        await self._arithmetic.run(Priority.CONTROL, add)
        current.progress_s = self._clock()

    def _open_round_of(self, average_id: AverageId) -> Round | None:
        """The open round of this id. Raises WrongStateError if it is closed for ever."""
        if self._known.is_dead(average_id):
            raise WrongStateError("this round is closed")
        return self.open if self.open is not None and self.open.roster.average_id == average_id else None

    # Closing, adopting

    async def close(self, average_id: AverageId, reason: str = "the round was closed") -> None:
        """Close the round of this id, if it is open, and refuse its parts for ever. The ledger is kept."""
        self._known.kill(average_id)
        current, void = self.open, None
        if current is not None and current.roster.average_id == average_id:
            self.open = None
            self.failed += 1
            LOG.debug("round closed", step=current.roster.step, leader=current.roster.leader, reason=reason)
            void = self.absences.count(current, self._clock())
            if not current.reduced.done():
                current.reduced.set_exception(PeerGoneError(reason))
                current.reduced.exception()  # marks it as retrieved, in case nobody waits for it
            work = self._known.task_of(average_id)
            if work is not None and work is not asyncio.current_task():
                work.cancel()
        elif self._state.round is None or self.runs(average_id):
            return  # what still opens finds that its id is dead; what has every slice takes the average
        await self._executor.run(Priority.CONTROL, lambda: self._state.close_round(average_id, void))
        self._host.announce()

    async def close_present(self, reason: str) -> None:
        for roster in (self.open.roster if self.open is not None else None, self._state.round):
            if roster is not None:
                await self.close(roster.average_id, reason)

    def abort(self, caller: PeerId, average_id: AverageId) -> None:
        """Close a round early. Members obey their leader; the leader obeys any member, counts it as missed and tells the others.

        The abort of a round that nobody here has opened is ignored: anybody may make up an id.
        """
        roster, current = self._known.roster_of(average_id), self.open
        leads = roster is not None and roster.leader == self._state.record.peer and roster.entry_of(caller) is not None
        if roster is None or not (leads or roster.leader == caller):
            return
        if current is None or current.roster is not roster:
            self._known.kill(average_id)  # it is still being opened, or has all slices
        elif leads:
            current.silent.append(caller)
            self._spread_abort(roster)
            self._tasks.start(self.close(average_id, f"{caller} gave the round up"))
        else:
            self._tasks.start(self.close(average_id))

    def applied(self, held: HeldAverage) -> None:
        """Record that an average was applied, and keep it for mates that missed it."""
        length = held.flat_sum.numel()
        self.absences.applied(held.roster, self._clock())
        self._own_errors.clear()
        self.num_applied += 1
        self._round_codec.applied(self._clock())
        if self.compression.allowed.is_lossy:  # queued on the thread of the sums, before any sum of the next round
            self._tasks.start(self._arithmetic.run(Priority.CONTROL, lambda: self.compression.applied(held.roster.average_id, length)))
        self._host.applied(held.roster)
        if self.kept.hold(held):
            self._tasks.start(self.kept.write(held))

    def shut(self) -> None:
        self._tasks.cancel()
        if self._arithmetic is not self._executor:
            self._arithmetic.close()
