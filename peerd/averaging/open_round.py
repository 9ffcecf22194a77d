"""One open round at this member: the lines to the others, the beats by which they tell each other what has arrived, and its judges."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any

from peerd.averaging.carrying import Carrying
from peerd.averaging.confirming import Confirming
from peerd.averaging.exchange import Exchange
from peerd.averaging.judging import Judge
from peerd.averaging.line import PairLine
from peerd.averaging.surroundings import Outcome, Surroundings
from peerd.background import Tasks
from peerd.errors import BadMessageError, PeerGoneError, RemoteError, WrongStateError
from peerd.policy.round.debts import BEHIND, HEARD, AtFault, Edge
from peerd.policy.round.leads import SentRate
from peerd.policy.step.judging import judges_of, lost_after_s
from peerd.policy.step.roster import Roster
from peerd.table.record import PeerId
from peerd.timeline.spans import SpanKind
from peerd.wire.handlers import Frames, Tell
from peerd.wire.messages import Beat, Frame, Verified

BEATS = 8
"""Beats in an averaging time."""
FIRST_PAUSE_S = 0.05
"""Before a stream that broke is opened anew. The pause doubles while it breaks, up to the time after which an edge is told."""
RECORDS_RISE = 0.7
"""Averaging times within which the record of a peer that lives rises: an announce period, and some more for the way."""


class OpenRound:
    """The round at this member until all others have what they get from here. `within_s`: how long it may take at the rates assumed."""

    def __init__(self, exchange: Exchange, around: Surroundings, outcome: Outcome, within_s: float) -> None:
        roster, now_s = exchange.roster, around.clock()
        self.roster: Roster = roster
        self.judges = judges_of(roster)
        self.exchange = exchange
        self._around = around
        self._outcome = outcome
        self.carrying = Carrying(exchange)
        self.lines = {
            peer: PairLine(number, exchange, self.carrying, self) for number, peer in enumerate(roster.peers) if peer != around.me
        }
        is_judge = around.me in self.judges and len(roster.entries) > 1
        self._judge = Judge(exchange, around.averaging_s, within_s, around.past_edges, now_s) if is_judge else None
        self.confirming = Confirming(exchange, around)
        self.opened_s = self.progress_s = now_s
        """When it opened; and when something of it last moved anywhere."""
        self._judges_heard_s = dict.fromkeys(self.judges, now_s)
        self.joined: set[PeerId] = set()
        """Members that are known to have opened the round."""
        self.preparing: set[PeerId] = set()
        """Members that open the round once what they compute now is done, as they have told this leader."""
        self.silent: list[PeerId] = []
        """Members that gave the round up, or are accused of it."""
        self.refused = False
        self._tasks = Tasks()
        self.over = asyncio.Event()
        """Set once this member's part is over."""
        self._bug: Exception | None = None
        self.ruling: AtFault | None = None
        """Whom this member, as a judge, has ended the round without."""

    @property
    def leads(self) -> bool:
        return self.roster.leader == self._around.me

    # Its life

    async def run(self) -> None:
        """Exchange chunks until every sum is here, and most members say that the same came of it where they have to.

        What others still lack is sent on in the background, until `end`.
        """
        for peer, line in self.lines.items():
            self._tasks.start(self._guarded(partial(self._give, peer, line)))
            self._tasks.start(self._guarded(partial(self._take, peer, line)))
        if self.lines:
            self._tasks.start(self._guarded(self._beat))
        await self.exchange.begin()
        await self.exchange.done.wait()
        if self._bug is None:
            await self.confirming.until_settled()
        if self._bug is not None:
            raise self._bug
        if self._judge is not None and self.confirming.is_due:  # others may hear of it from nobody else
            await self._beat_with_all(self.confirming.lacking(self.lines), self._around.averaging_s / BEATS)

    async def _guarded(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a part of the round. What another member says may end the part; a bug in it ends the round here."""
        with contextlib.suppress(RemoteError):
            try:
                await work()
            except RemoteError:
                raise
            except Exception as error:
                if self.exchange.is_done and not self.confirming.is_open:
                    raise
                self._bug = error
                self.exchange.done.set()
                self.confirming.fail()

    def end(self) -> None:
        """Stop to send and to take. The round is dead, or its step is over."""
        self.over.set()
        self.exchange.is_over = True
        self._tasks.cancel()
        if self._judge is not None:
            peers = self.roster.peers
            self._around.past_edges.end_step((peers[edge.source], peers[edge.target]) for edge in self._judge.edges)
        for line in self.lines.values():
            line.wake()

    @property
    def lost(self) -> frozenset[PeerId]:
        """Members whose records have not risen for so long that they count as gone."""
        after_s = lost_after_s(self._around.averaging_s)
        now_s, rose_s = self._around.clock(), self._around.host.rose_s
        return frozenset(peer for peer in self.lines if now_s - rose_s(peer) > after_s)

    @property
    def giving_to(self) -> frozenset[PeerId]:
        """Members that have not verified all that this one sends them."""
        return frozenset(peer for peer, line in self.lines.items() if not line.is_given)

    @property
    def still_s(self) -> float:
        """For how long nothing of the round has moved anywhere, as far as this member knows."""
        return self._around.clock() - self.progress_s

    @property
    def waited_in_vain_for(self) -> str:
        """The member that gave this leader no answer for so long that others should know; empty if there is none."""
        waited = self._around.clock() - self.opened_s >= BEHIND * self._around.averaging_s
        return next(iter(self.silent), "") if waited else ""

    @property
    def judge_silent_s(self) -> float:
        """For how long no judge but this member has said anything; infinite where there is none."""
        heard = [at_s for peer, at_s in self._judges_heard_s.items() if peer != self._around.me]
        return self._around.clock() - max(heard, default=-math.inf)

    # Streams that this member opens

    async def _give(self, peer: PeerId, line: PairLine) -> None:
        """Send the other its chunks, over one stream after another."""
        pause_s, is_noted = FIRST_PAUSE_S, False
        while True:
            if line.is_given:
                if not is_noted:
                    self._note_span(peer, line)
                is_noted = True
                await line.until_more()
                continue
            if line.num_taken:
                await line.untaken()
                continue
            given = line.num_given
            await self._give_once(peer, line)
            pause_s = FIRST_PAUSE_S if line.num_given > given else min(2 * pause_s, BEHIND * self._around.averaging_s)
            if not line.is_given:
                await asyncio.sleep(pause_s)

    async def _give_once(self, peer: PeerId, line: PairLine) -> None:
        try:
            with line.sending() as frames:
                await self._around.client.give(peer, self.roster.average_id, frames, line.told)
        except PeerGoneError:
            if not (line.num_incoming or line.num_taken):  # else it is there, and its calls pass
                self._around.host.report_failure(peer)
        except BadMessageError as error:
            self._outcome.broken_by(self.roster, peer, error.message)
        except RemoteError:
            return  # it has not opened the round yet, or not any more, or has no room for the call

    async def _take(self, peer: PeerId, line: PairLine) -> None:
        """Ask the other for its chunks, as long as it opens no stream for them itself."""
        pause_s = self._around.averaging_s / BEATS
        while True:
            await asyncio.sleep(pause_s)
            if line.num_incoming or not line.has_to_get:
                continue
            with line.coming_in():
                await self._take_once(peer, line)

    async def _take_once(self, peer: PeerId, line: PairLine) -> None:
        try:
            await self._around.client.take(peer, self.roster.average_id, line.words(), line.size_of, line.takes)
        except BadMessageError as error:
            self._outcome.broken_by(self.roster, peer, error.message)
        except RemoteError:
            return

    def _note_span(self, peer: PeerId, line: PairLine) -> None:
        self._around.spans.add(SpanKind.EXCHANGE, line.began_s, self.roster.step, -1, peer, line.num_bytes)

    # Streams that others open

    async def given(self, caller: PeerId, frames: Frames, tell: Tell) -> None:
        """Take the chunks that a member sends, and `tell` what has been verified."""
        line = self.lines[caller]

        async def words() -> None:
            async with contextlib.aclosing(line.words()) as told:
                async for held in told:
                    tell(held)

        with line.coming_in():
            telling = self._tasks.start(words())
            try:
                await self._until_over(self._read(line, frames))
            except BadMessageError as error:
                self._outcome.broken_by(self.roster, caller, error.message)
                raise
            finally:
                telling.cancel()

    @staticmethod
    async def _read(line: PairLine, frames: Frames) -> None:
        async with contextlib.aclosing(frames(line.size_of)) as coming:
            async for frame in coming:
                await line.takes(frame)

    async def taken(self, caller: PeerId, words: AsyncGenerator[Verified]) -> AsyncGenerator[Frame]:
        """Yield this member's chunks for another that cannot be called, which tells what it has verified."""
        line = self.lines[caller]

        async def hear() -> None:
            async with contextlib.aclosing(words):
                async for held in words:
                    line.told(held)
            line.wake()  # who tells no more takes no more

        with line.taken():
            hearing = self._tasks.start(hear(), expects=(RemoteError,))
            try:
                with line.sending() as sent:
                    async with contextlib.aclosing(sent) as frames:
                        async for frame in frames:
                            yield frame
                            if self.over.is_set():
                                raise WrongStateError("this round is closed")
            finally:
                hearing.cancel()

    async def _until_over(self, work: Coroutine[Any, Any, None]) -> None:
        """Run what a call of another member does. It ends with the round. Raises WrongStateError then."""
        task = self._tasks.start(work, expects=(RemoteError,))
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()
        if task.cancelled():
            raise WrongStateError("this round is closed")
        task.result()

    # What moves

    def rates(self) -> dict[PeerId, SentRate]:
        """What this round has shown of members' lines, as far as this member judges."""
        rates = self._judge.rates(self._around.clock()) if self._judge is not None else {}
        return {self.roster.peers[member]: rate for member, rate in rates.items()}

    def part_came(self, author: int, reducer: int, chunks: int) -> None:
        self._moved()
        if self._judge is not None:
            self._judge.debts.told_part(author, reducer, chunks, self.progress_s)

    def sum_came(self, reducer: int, member: int, chunks: int) -> None:
        self._moved()
        if self._judge is not None:
            self._judge.debts.told_sum(reducer, member, chunks, self.progress_s)

    def delivered(self, member: int, num_bytes: int, took_s: float) -> None:
        self._around.host.delivered(self.roster.peers[member], num_bytes, took_s)

    def more_to_send(self) -> None:
        for line in self.lines.values():
            line.look_again()

    def forged(self, author: int, reason: str) -> None:
        self._outcome.broken_by(self.roster, self.roster.peers[author], reason)

    def told_of(self, member: int, told: Verified) -> None:
        self.lines[self.roster.peers[member]].told(told)

    def _moved(self) -> None:
        self.progress_s = self._around.clock()

    # Beats

    def own_beat(self, to: PeerId | None = None) -> Beat:
        """What this member tells a member; None: what it has, for itself."""
        exchange = self.exchange
        carriers = self.carrying.mates if self._judge is not None else {}
        given_parts, given_sums = [0] * len(self.roster.entries), [0] * len(self.roster.entries)
        for line in self.lines.values():
            given_parts[line.number], given_sums[line.number] = line.own.part, line.own.sum
        here, sums = tuple(exchange.parts_here), tuple(exchange.sums_here)
        given = tuple(given_parts), tuple(given_sums)
        words = self.confirming.words_for(to) if to is not None else ()
        beat = (self.roster.average_id, here, sums, self.still_s, *given, carriers, self.carrying.carried())
        return Beat(*beat, words, self.confirming.heard)

    def beat_of(self, peer: PeerId, beat: Beat) -> None:
        """Take what another member has told. Raises BadMessageError for words that their authors have not signed."""
        now_s = self._around.clock()
        try:
            self.confirming.told(peer, beat, now_s)
        except BadMessageError as error:
            self._outcome.broken_by(self.roster, peer, error.message)
            raise
        if self.confirming.is_due and not beat.parts:
            return  # the round is over there: it says what came of it, and nothing else
        self.joined.add(peer)
        if self._judge is not None and self._judge.told(self.roster.peers.index(peer), beat, now_s):
            self.progress_s = now_s
        if peer in self._judges_heard_s:
            self._judges_heard_s[peer] = now_s
            self.progress_s = max(self.progress_s, now_s - beat.still_s)
        if peer == self.roster.leader or (peer in self._judges_heard_s and self._lacks_leader(now_s)):
            self._carry(beat.carriers)

    def _lacks_leader(self, now_s: float) -> bool:
        """Whether the leader is not heard here, so that its words come by other judges."""
        return not self.leads and now_s - self._judges_heard_s[self.roster.leader] > HEARD * self._around.averaging_s

    async def _beat(self) -> None:
        """Tell the judges, or as a judge everybody, what has arrived here, and look who holds the round up."""
        period_s = self._around.averaging_s / BEATS
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(period_s):
                    await self.confirming.news.wait()
            self.confirming.news.clear()
            others = self.lines if self._judge is not None else [peer for peer in self.judges if peer in self.lines]
            await self._beat_with_all(others, period_s)
            if self._judge is not None:
                self._look(self._judge)
            if self.confirming.is_given_up(self._around.clock()):
                self._outcome.given_up(self.roster, "most members hold something else of it")
            is_done = self.exchange.is_done if self._judge is None else self._judge.debts.is_done and not self._unaware
            if is_done and not self.confirming.is_open:
                return

    @property
    def _unaware(self) -> list[PeerId]:
        """Members that may not know what came of the round, where they have to be told."""
        return self.confirming.lacking(self.lines) if self.confirming.is_due else []

    async def _beat_with_all(self, peers: Iterable[PeerId], within_s: float) -> None:
        await asyncio.gather(*(self._beat_with(peer, within_s) for peer in peers))

    async def _beat_with(self, peer: PeerId, within_s: float) -> None:
        try:
            self.beat_of(peer, await self._around.client.beat(peer, self.own_beat(peer), within_s))
        except PeerGoneError:
            return
        except RemoteError:
            return  # it answers, and is not in the round, or not yet

    def _look(self, judge: Judge) -> None:
        now_s = self._around.clock()
        judge.told(self.exchange.me, self.own_beat(), now_s)
        may_join_s = max(self._around.averaging_s, 2 * self._around.host.pass_s())
        for peer, line in self.lines.items():
            may_wait = peer in self.preparing if self.leads else peer not in self.joined and now_s - self.opened_s < may_join_s
            if may_wait:
                continue  # it has not opened the round yet, and owes nothing
            if now_s - self._around.host.rose_s(peer) < RECORDS_RISE * self._around.averaging_s:
                judge.debts.heard(line.number, now_s)
        edges = judge.look(now_s)
        if self.leads:
            self._carry(judge.mates_for(edges, self._around.host.cut_links(), now_s))
        ruling = judge.ruling(edges, now_s)
        if ruling is None and (fault := self.confirming.at_fault(now_s, self.judges.index(self._around.me))) is not None:
            ruling = AtFault(*fault)
        if ruling is not None and self.ruling is None:
            self.ruling = ruling
            self._outcome.judged(self.roster, ruling)

    def _carry(self, carriers: Mapping[Edge, int]) -> None:
        """Let mates carry what does not pass, as the leader says."""
        peers, me = self.roster.peers, self.exchange.me
        changed = self.carrying.take_over(carriers)
        for edge in changed:
            if edge.source == me:
                self.carrying.told[edge] = self.lines[peers[edge.target]].own
            if self._judge is not None and not self.leads:
                self._judge.debts.carry(edge, carriers[edge], self._around.clock())
        for line in self.lines.values() if changed else ():
            line.carried_anew()
