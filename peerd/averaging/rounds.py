"""Rounds of butterfly all-reduce over a roster: rules 7 (propose) and 8 (exchange) of docs/protocol.md.

The accumulators are cut into one slice for each member that reduces, and each slice into chunks. A reducer receives every member's part of
its slice, adds the parts in roster order and gives the sum to each, chunk by chunk, so all members end with the same bits. A round lasts
for as long as its links need; it ends without a member that could send something and does not.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial

import structlog
from torch import Tensor

from peerd.averaging.absences import Absences
from peerd.averaging.asking import Asking, first_refusal
from peerd.averaging.compression import Compression
from peerd.averaging.early_calls import EarlyCalls
from peerd.averaging.exchange import Exchange
from peerd.averaging.farewell import Farewell
from peerd.averaging.fetcher import AverageFetcher
from peerd.averaging.host import RoundHost
from peerd.averaging.kept import KeptAverages
from peerd.averaging.known_rounds import KnownRounds
from peerd.averaging.large_parts import LargeParts
from peerd.averaging.layout import RoundLayout
from peerd.averaging.log import AverageLog
from peerd.averaging.open_round import BEATS, OpenRound
from peerd.averaging.proposing import Proposing
from peerd.averaging.slices import Signatures
from peerd.averaging.sums import RoundSums, SumOf
from peerd.averaging.surroundings import Surroundings
from peerd.background import INTERNAL_ERRORS, Tasks, start
from peerd.config.codec import Codec
from peerd.errors import BadMessageError, RemoteError, WrongStateError
from peerd.link.few_each import FewEach
from peerd.policy.round.debts import AtFault
from peerd.policy.round.edges import PastEdges
from peerd.policy.step.judging import why_unheeded
from peerd.policy.step.part_sizes import WHY_TOO_LARGE
from peerd.policy.step.roster import Roster, why_never
from peerd.stage.executor import Executor, Priority
from peerd.stage.results import HeldAverage
from peerd.stage.state import StageState
from peerd.table.record import AverageId, PeerId
from peerd.timeline.spans import SpanRing
from peerd.wire.clients import AveragingClient
from peerd.wire.handlers import Frames, Tell
from peerd.wire.messages import Beat, Frame, ProposalAnswer, Verified

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
        # Sums have a thread of their own: on the torch thread each would wait for a pass of the next step, or for an evaluation's.
        self.arithmetic = Executor("averaging")
        spans = spans or SpanRing(0)
        signatures = Signatures(state.record.peer, host.sign, host.has_signed, host.run if state.certifies else None, host.kept_parts)
        self.kept, self.large = KeptAverages(state, executor, log, host), LargeParts(state, host)
        self._averaging_s = averaging_s
        self._clock = clock
        sums = state.accumulator
        self.compression = Compression(state.weight_codecs, sums.flat.dtype, sums.shapes, sums.num_exact)
        self.fetcher = AverageFetcher(state, self.arithmetic, client, averaging_s, spans, signatures, self.compression)
        self._proposing = Proposing(state.weight_codecs, averaging_s, host.rates_of, clock(), host.is_lossy, host.is_near)
        self._joining = FewEach()
        self._early = EarlyCalls(averaging_s, host.is_mate)
        self._tasks = Tasks()
        self.sums = RoundSums(state, self.compression, executor, self.arithmetic, self._tasks)
        self._opening: dict[AverageId, asyncio.Task[str]] = {}
        """The rounds of others that this peer joins now, or has joined since its leader last asked."""
        self._known = KnownRounds(self._tasks)
        self.joined = self._known.joined
        self._own_errors: list[Exception] = []
        """Bugs that ended rounds at this member since the last average was applied."""
        self.open: OpenRound | None = None
        self.last: OpenRound | None = None
        """The round that was opened last. It goes on giving sums to others after it is done here."""
        self.failed = 0
        self.num_applied = 0
        self.absences = Absences(state.record.peer, averaging_s)
        around = signatures, self.arithmetic, client, host, clock, averaging_s, spans, PastEdges(), state.num_microbatches
        self._around = Surroundings(*around)
        self._tell_closed = Farewell(self._around, self._tasks).tell
        self._host, self.mates = host, host.mates

    # As leader

    async def lead(self, roster: Roster) -> str:
        """Propose a round to the other members and open it here. Returns why it failed, or an empty string when all joined.

        Raises unexpected errors. Raises the last one again once `MOST_OWN_ERRORS` rounds have failed by bugs here: the members
        leave out another member that fails, but never their leader.
        """
        if len(self._own_errors) >= MOST_OWN_ERRORS:
            raise self._own_errors[-1]
        roster = self._state.with_parameters(roster)
        length, room = self._state.round_length(roster), self._state.room_behind(roster)
        roster = self._proposing.planned(roster, self.compression, length, self._clock(), room)
        asked = {peer: Asking(self._around, peer, roster) for peer in roster.peers if peer != self._state.record.peer}
        proposals = [start(asking.refusal()) for asking in asked.values()]
        try:
            reason = await self._known.start(roster, self._join(roster))
            for asking in asked.values():
                asking.opened = self.open
            reason = reason or await first_refusal(proposals, self._over_of(roster))
        except Exception as error:
            self._tell_closed(roster)
            await self.close(roster.average_id, f"internal error: {error!r}")
            raise
        finally:
            for proposal in proposals:
                proposal.cancel()
        if reason:
            current = self.open if self.open is not None and self.open.roster is roster else None
            self._tell_closed(roster, current.waited_in_vain_for if current is not None else "", reason)
            await self.close(roster.average_id, reason)
        return reason

    async def _over_of(self, roster: Roster) -> str:
        """Wait until the round of this roster is over."""
        if self.open is not None and self.open.roster is roster:
            await self.open.over.wait()
        return "the round is over" if self._known.is_dead(roster.average_id) else ""

    # As member

    async def propose(self, caller: PeerId, roster: Roster) -> ProposalAnswer:
        """Join a round that `caller` leads, or say why this peer does not. What takes long goes on, and the leader asks again."""
        if caller != roster.leader:
            raise BadMessageError("a roster is proposed by its leader")
        if not self._host.is_mate(caller):
            return ProposalAnswer(False, "no record here says that the proposer serves this stage", self._host.own_record())
        average_id = roster.average_id
        joining = self._opening.get(average_id)
        if joining is None:
            if self._known.is_dead(average_id) or self.runs(average_id) or average_id in self.joined:
                return ProposalAnswer(False, "this round is closed", self._host.own_record())  # or was proposed before
            if reason := why_never(self._state.record, roster, *self._state.averages_by):
                return ProposalAnswer(False, reason, self._host.own_record())
            # The task outlives this call: if the leader ends the call, the round that the state has opened still gets its end (hole 21).
            joining = self._opening[average_id] = self._known.start(roster, self._join_for(caller, roster))
        await asyncio.wait({joining}, timeout=self._averaging_s / BEATS)
        if not joining.done():
            return ProposalAnswer(False, preparing=True)
        self._opening.pop(average_id, None)
        reason = joining.result()
        return ProposalAnswer(False, reason, self._host.own_record()) if reason else ProposalAnswer(True)

    async def _join_for(self, leader: PeerId, roster: Roster) -> str:
        """Join, unless as many rosters of this leader wait for it already. It may have given one up, and proposed the next."""
        with self._joining.by(leader, MOST_JOINING) as may_join:
            return await self._join(roster) if may_join else "other proposals of the same leader wait here"

    async def _join(self, roster: Roster) -> str:
        codecs = self.compression.codecs_of(roster)
        if codecs is None:
            return "this run does not allow a codec of this roster for gradients"
        close = partial(self._state.close_round, roster.average_id)
        try:
            reason, accumulator = await self._executor.run(Priority.CONTROL, lambda: self._state.open_round(roster))
            reason = reason if accumulator is None else self._begin(roster, codecs, accumulator)
        except Exception:
            self._known.kill(roster.average_id)
            await self._executor.run(Priority.CONTROL, close)
            raise
        if reason:
            await self._executor.run(Priority.CONTROL, close)
        return reason

    def _begin(self, roster: Roster, codecs: Sequence[Codec], accumulator: Tensor) -> str:
        if self._known.is_dead(roster.average_id) or self._state.round is not roster:
            return "this round is closed"  # while the state opened it, the leader aborted it, or this peer fenced or began to join
        layout = RoundLayout(roster, accumulator.numel(), self.compression, codecs, self._state.room_behind(roster))
        sizes = self.large.norms_of(roster, layout), partial(self._leave_out, roster)
        exchange = Exchange(roster, accumulator, self.compression, layout, self.arithmetic, self._around.signatures, *sizes)
        self._retire()
        self.joined[roster.average_id] = ()
        self.sums.begins()
        within_s = self._proposing.within_s(roster, sum(layout.slice_bytes))
        self.open = self.last = OpenRound(exchange, self._around, self, within_s)
        self._early.opened()
        self._opening = {average_id: task for average_id, task in self._opening.items() if not self._known.is_dead(average_id)}
        self._known.start(roster, self._run(self.open))
        self._host.round_opened()
        return ""

    def _retire(self) -> None:
        """The last round is over for everybody, or dead."""
        if self.last is not None:
            self.last.end()
            self._tasks.start(self.arithmetic.run(Priority.CONTROL, self.last.exchange.forget))
            self.last = None

    def runs(self, average_id: AverageId) -> bool:
        """Whether a task of this peer will end this round. Rule 4 (close) ends any other (hole 21)."""
        return self._known.task_of(average_id) is not None

    async def _run(self, current: OpenRound) -> None:
        """Exchange chunks until the average is complete."""
        try:
            await current.run()
            if self.open is not current:
                return
            self.open = None
            self._proposing.exchanged(current.rates(), self._clock() - current.opened_s, current.roster.expected_s)
            self.joined[current.roster.average_id] = current.exchange.slices.all
            self.large.completed(current.exchange)
            if current.confirming.is_due:
                self._known.confirmed[current.roster.average_id] = current.confirming
            if await self.sums.take(current.exchange, current.confirming.agreeing) is not SumOf.STAGE:
                self.absences.sidelining.came_together(current.roster)  # no average names all members of a group
            else:
                self._tasks.start(self.kept.begin())
            self._host.announce()
        except Exception as error:  # a bug
            await self._fail(current, error)

    async def _fail(self, current: OpenRound, error: Exception) -> None:
        """End the round because of a bug at this member. No other member counts as missed."""
        roster = current.roster
        INTERNAL_ERRORS.report("averaging round", error, step=roster.step, leader=roster.leader)
        self._own_errors.append(error)
        current.refused = True
        if self.open is current:
            self._tell_closed(roster)
        elif self.open is None and not self._known.is_dead(roster.average_id):
            self.open = current  # counts as failed: the exchange was done, but the state has not taken the average
        await self.close(roster.average_id, f"internal error: {error!r}")

    # Streams that others open

    async def give(self, caller: PeerId, average_id: AverageId, frames: Frames, tell: Tell) -> None:
        """Take the chunks that a member sends, and tell it what has been verified."""
        current = await self._early.find(caller, partial(self._round_with, caller, average_id))
        try:
            await current.given(caller, frames, tell)
        except RemoteError:
            raise
        except Exception as error:  # a bug; handled in a task, which goes on if the caller ends this call
            self._tasks.start(self._fail(current, error))
            raise

    async def take(self, caller: PeerId, average_id: AverageId, words: AsyncGenerator[Verified]) -> AsyncGenerator[Frame]:
        """Yield this member's chunks for a member that cannot be called."""
        current = await self._early.find(caller, partial(self._round_with, caller, average_id))
        try:
            async with contextlib.aclosing(current.taken(caller, words)) as frames:
                async for frame in frames:
                    yield frame
        except RemoteError:
            raise
        except Exception as error:
            self._tasks.start(self._fail(current, error))
            raise

    def beat(self, caller: PeerId, beat: Beat) -> Beat:
        """Take what a member says that it has, and tell what is here. Raises WrongStateError where there is no such round."""
        current = self.last
        if current is None or current.roster.average_id != beat.average_id or caller not in current.lines:
            return self._known.answer(caller, beat, self._clock())
        current.beat_of(caller, beat)
        return current.own_beat(caller)

    def _round_with(self, caller: PeerId, average_id: AverageId) -> OpenRound | None:
        """The round of this id. Raises WrongStateError if it is closed for ever."""
        if self._known.is_dead(average_id):
            raise WrongStateError("this round is closed")
        if self.last is None or self.last.roster.average_id != average_id:
            return None
        if caller not in self.last.lines:
            raise BadMessageError("the caller is no member of this round")
        return self.last

    def judged(self, roster: Roster, ruling: AtFault) -> None:
        """End a round that this member judges, without one of its members."""
        member = roster.peers[ruling.member]
        LOG.warning("a round goes on without a member", member=member, step=roster.step, reason=ruling.reason)
        self._tell_closed(roster, member, ruling.reason)
        self._tasks.start(self._end_without(roster.average_id, member, ruling.reason))

    async def _end_without(self, average_id: AverageId, member: PeerId, reason: str, then: Callable[[], None] = lambda: None) -> None:
        if self.open is None and self.last is not None and self.last.roster.average_id == average_id:
            self._retire()  # this member has the average, and others fetch it
            self._known.kill(average_id)
        await self.close(average_id, reason, self._state.record.peer, member)
        then()

    def _leave_out(self, roster: Roster, member: PeerId) -> None:
        """Rule 22 (size): end a round for all, and leave this member out of the step. Others hear of that first, and then of the end."""
        self.large.found(roster, member)
        tells = partial(self._tell_closed, roster, member, WHY_TOO_LARGE)
        self._tasks.start(self._end_without(roster.average_id, member, WHY_TOO_LARGE, tells))

    def broken_by(self, roster: Roster, peer: PeerId, reason: str) -> None:
        """Close a round of which a member has sent something that breaks the rules."""
        if self.open is not None and self.open.roster is roster:
            self.open.silent.append(peer)
            self._tell_closed(roster, peer, reason)
            self._tasks.start(self.close(roster.average_id, f"{peer}: {reason}"))

    def given_up(self, roster: Roster, reason: str) -> None:
        """Leave a round of which most members hold something else."""
        self._tasks.start(self.leave(roster.average_id, reason))

    async def leave(self, average_id: AverageId, reason: str) -> None:
        """Close the round of this id, and tell the others: without this peer they cannot finish it."""
        if self.open is not None and self.open.roster.average_id == average_id:
            self._tell_closed(self.open.roster, reason=reason)
        await self.close(average_id, reason)

    async def close(self, average_id: AverageId, reason: str = "", judge: PeerId | None = None, named: PeerId | None = None) -> None:
        """Close the round of this id, if it is open, and refuse its calls for ever. The ledger is kept.

        `named`: the member that `judge` ends it without.
        """
        self._known.kill(average_id)
        current, void = self.open, None
        if current is not None and current.roster.average_id == average_id:
            self.open = None
            self.failed += 1
            self._retire()
            LOG.info("round closed", step=current.roster.step, leader=current.roster.leader, reason=reason)
            void = self.absences.count(current, judge, named, self._clock())
            self._known.cancel(average_id)
        elif self._state.round is None or self.runs(average_id):
            return  # what still opens finds that its id is dead; what has every sum takes the average
        await self._executor.run(Priority.CONTROL, lambda: self._state.close_round(average_id, void))
        self._host.announce()

    async def close_present(self, reason: str) -> None:
        for roster in (self.open.roster if self.open is not None else None, self._state.round):
            if roster is not None:
                await self.leave(roster.average_id, reason)

    def abort(self, caller: PeerId, average_id: AverageId, left_out: PeerId, reason: str) -> None:
        """Close a round: a member has left it, or a judge ends it without one. That of an id that nobody here has opened is ignored."""
        roster, current = self._known.roster_of(average_id), self.open
        if roster is None or roster.entry_of(caller) is None:
            return
        leads, named = roster.leader == self._state.record.peer, left_out or None
        if reason == WHY_TOO_LARGE:
            self.large.told(roster, caller, left_out)
        if current is None or current.roster is not roster:
            if roster.leader in (caller, self._state.record.peer):
                self._known.kill(average_id)  # it is still being opened, or has all sums
            return
        is_heeded = not why_unheeded(roster, caller, named, self._clock() - current.opened_s, self._averaging_s)
        if leads and (not is_heeded or named is None):  # a member leaves, or accuses another: it does not judge
            current.silent += [peer for peer in (caller, named) if peer in roster.peers and peer != roster.leader]
            self._tell_closed(roster)
            named = None
        if leads or is_heeded:
            self._tasks.start(self.close(average_id, reason or f"{caller} closed the round", caller, named))

    def applied(self, held: HeldAverage) -> None:
        """Record that an average was applied, and keep it for mates that missed it."""
        self._known.end_step()
        if self.last is not None and self.last.roster.step <= held.roster.step:
            self._retire()  # every stage has averaged the step: nobody needs the chunks of its round any more
        self.absences.applied(held.roster, self._clock())
        self._own_errors.clear()
        self.num_applied += 1
        self._proposing.applied(self._clock())
        self.sums.applied(held)
        self._host.applied(held)
        self._tasks.start(self.kept.hold(held))

    async def give_up_average(self) -> None:
        """Rule 18 (certify): the average that this peer holds is not the stage's. It goes on with its ledger, and gives no sums of it."""
        self._retire()
        await self._executor.run(Priority.LEDGER, self._state.give_up_average)

    def shut(self) -> None:
        self._retire()
        self._tasks.cancel()
        self.kept.close()
        self.arithmetic.close()
