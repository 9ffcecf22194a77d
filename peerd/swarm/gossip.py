"""Spreads records: to peers every period, to the DHT every second period, and at once when a phase changes, with bounded fan-out.

News that others wait for are sent at once: a change of phase and a ledger that completes a step. A commit is not: peers that wait for it
expect it (policy/route/admission.py). Other changes of this peer's ledger are collected for a moment. Only a few messages to one peer are
under way at a time; newer news waits and is sent as one message. In a swarm too large for each peer to tell all others, peers ask around
for what is new (policy/swarm/spreading.py), and only changes of phase are pushed.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Collection, Sequence

from peerd.background import keep, start
from peerd.errors import BadMessageError, RemoteError
from peerd.link.links import with_time_for
from peerd.policy.step.groups import mates_to_tell
from peerd.policy.step.roster import leader_of
from peerd.policy.swarm.coordinates import NetworkPosition
from peerd.policy.swarm.reaching import cut_off
from peerd.policy.swarm.spreading import (
    ANNOUNCED_TO,
    MOST_IN_A_TURN,
    MOST_NEWS,
    PAGE_BYTES,
    PAGE_RECORDS,
    TELLS_ALL,
    TURNS_PER_PERIOD,
    DirectoryReading,
    choose_partners,
    is_to_announce,
    is_to_store,
    page,
    to_tell,
    whom_to_ask,
)
from peerd.swarm.clock import clock_s
from peerd.swarm.directory import Directory
from peerd.swarm.liveness import Liveness
from peerd.swarm.membership import Membership
from peerd.swarm.signed import read_of_push
from peerd.swarm.telling import Telling
from peerd.table.record import PeerId, RawRecord
from peerd.table.view import LiveView
from peerd.wire.swarm_client import SwarmClient

STAGE_FAN_OUT = 16
OTHERS_FAN_OUT = 16
MIN_PUSH_GAP_S = 0.02
"""Shortest time between two pushes of this peer's ledger that nobody waits for."""
UNHURRIED_S = 0.1
"""Delay of news that nobody waits for, before all peers are told."""
CALM_GAP_S = 0.5
"""Shortest time between two announcements of a suspicion, or of being alive. In trouble every peer has many of them for all others."""
MOST_ON_THEIR_WAY = 3
"""Number of messages under way to one peer. At the end of a step a peer changes its phase three times within one or two round trips."""
PUSH_TIMEOUT_S = 3.0
FEW_STRANGERS = 16
"""More than so many are compared with the table of another peer, which is cheaper than to call them."""
LOCATING = 16
"""Peers that a newcomer asks to find out where it is: coordinates of two dimensions and a height need some, and each costs a connection."""


class Gossip:
    """Announces this peer's record and passes on those of others."""

    def __init__(
        self,
        membership: Membership,
        client: SwarmClient,
        directory: Directory,
        liveness: Liveness,
        period_s: float,
        num_stages: int,
        group_size: int = 0,
    ) -> None:
        """`group_size`: the most members of a stage that average in one round; 0: all do."""
        self._membership = membership
        self._client = client
        self._directory = directory
        self._liveness = liveness
        self._period_s = period_s
        self._stages = range(num_stages)
        self._group_size = group_size
        self.position = NetworkPosition(membership.me)
        """Where this peer is in the network, by the answers to its news and questions."""
        self._partners: list[PeerId] = []
        self._announced_s = float("-inf")
        self._stored_s = float("-inf")
        self._random = random.Random(membership.me)
        self._pushed_s = float("-inf")
        self._calmly_s = float("-inf")
        self._compared_s = float("-inf")
        self._soon: dict[bool, asyncio.TimerHandle] = {}
        """Timers of pushes that wait: under True to all peers, under False to the peers of this stage."""
        self._sending: dict[PeerId, set[asyncio.Task[None]]] = {}
        self._stale: set[PeerId] = set()
        self._telling = Telling(membership, client, lambda: self._targets(membership.live(), everybody=True), period_s)
        self._has_ended = False

    def announce(self, urgent: bool = True) -> None:
        """Publish this peer's record and send it to all peers within the fan-out."""
        self._membership.publish()
        self.push(everybody=True, urgent=urgent)

    def push(self, everybody: bool, urgent: bool = True) -> None:
        """Send this peer's record to the peers of its stage, or to all within the fan-out: now, or soon in the state it has by then."""
        if everybody:
            self._announced_s = clock_s()
        if urgent:
            self._push_now(everybody)
        elif everybody not in self._soon:
            wait_s = UNHURRIED_S if everybody else max(0.0, self._pushed_s + MIN_PUSH_GAP_S - clock_s())
            self._push_in(wait_s, everybody)

    def tell_calmly(self) -> None:
        """Publish this peer's suspicions, or that it is alive, and tell all peers within the fan-out, at most once per CALM_GAP_S."""
        self._membership.publish()
        if True not in self._soon:
            wait_s = max(0.0, self._calmly_s + CALM_GAP_S - clock_s())
            self._announced_s = self._calmly_s = clock_s() + wait_s
            self._push_in(wait_s, everybody=True)

    async def tell_everybody(self) -> None:
        """Send this peer's record to all peers within the fan-out. Returns when they have it or cannot be reached."""
        for peer in self._targets(self._membership.live(), everybody=True):
            self._send_to(peer, MOST_ON_THEIR_WAY)
        while under_way := set().union(*self._sending.values()):
            await asyncio.wait(under_way)

    async def run(self) -> None:
        self._has_ended = False
        try:
            async with asyncio.TaskGroup() as group:
                for part in (self._keep_word, self._announce, self._read_directory, self._ask_around, self._telling.run):
                    group.create_task(keep(part))
        finally:
            self._has_ended = True
            self._membership.runs_no_more()
            for timer in self._soon.values():
                timer.cancel()
            for task in set().union(*self._sending.values()):
                task.cancel()

    async def locate(self) -> None:
        """Ask some peers twice, so that this peer knows where it is. Until the slowest has answered, or for one announce period."""
        known = [r.peer for r in self._membership.live().records if r.coordinate is not None and r.peer != self._membership.me]
        asked = self._random.sample(known, min(len(known), LOCATING))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._period_s), asyncio.TaskGroup() as group:
                for peer in asked:
                    group.create_task(self._ask_twice(peer))

    async def _ask_twice(self, peer: PeerId) -> None:
        """The first question may open a connection, which takes longer than an answer."""
        with contextlib.suppress(RemoteError):
            for _ in range(2):
                await self._hear_news_of(peer)

    def gossip(self, caller: PeerId, raws: Sequence[RawRecord]) -> list[RawRecord]:
        """Merge the record of a caller: those of others come when this peer asks.

        Returns this peer's own record, and a higher one of a caller that lost its incarnation.
        """
        self._membership.absorb(read_of_push(caller, raws), caller)
        held = (self._membership.raws.get(peer) for peer in (self._membership.me, caller))
        return [signed.raw for signed in held if signed is not None and signed.raw not in raws]

    def table(self, caller: PeerId, after: PeerId) -> tuple[list[RawRecord], PeerId]:
        """Return a page of the live records, and the last peer of the page; an empty id ends the table."""
        self._membership.called_by(caller)
        raws, live = self._membership.raws, self._membership.live().records
        proofs = [] if after else self._membership.contradictions.told
        known = [(each.peer, raws[each.peer].raw) for each in live if each.peer in raws and self._membership.view.is_proven(each.peer)]
        rows, last = page(known, after, PAGE_RECORDS - len(proofs))
        return proofs + rows, last

    def news(self, caller: PeerId, known: Collection[bytes]) -> list[RawRecord]:
        """Return records that changed lately and that the caller does not name as known."""
        self._membership.called_by(caller)
        live = self._membership.live()
        record = live.find(caller)
        return self._membership.news.unknown_to(known, record.stage if record is not None and live.is_summarised else None, clock_s())

    async def reaches(self, caller: PeerId, accused: PeerId) -> bool:
        """Ask a peer that does not answer the caller. Returns whether it is there."""
        self._membership.called_by(caller)
        return self._membership.live().find(caller) is not None and await self._liveness.reaches(accused)

    async def _keep_word(self) -> None:
        """Announce at once what cannot wait for the next period."""
        while True:
            word = await self._membership.word.due()
            own = self._membership.row.record()
            if own is not None and word.superseded_by >= own.incarnation:
                self._membership.fence("this identity was seen with a higher version")
            if word.tell:
                self.tell_calmly()

    async def _announce(self) -> None:
        """Publish every period, and store in the DHT every second one. Apply T3 (fence) after a time without running. Waits for no peer."""
        while True:
            now_s = clock_s()
            self._membership.ran()
            if not self._membership.is_quiet:
                self._publish_and_store()
            await asyncio.sleep(max(0.0, self._period_s - (clock_s() - now_s)))

    async def _read_directory(self) -> None:
        """Read records that gossip has not brought yet; the DHT may take seconds to answer. Reads are rare if no peer joins or leaves."""
        reading = DirectoryReading(self._membership.live())
        while True:
            reading = reading.after(self._membership.live(), len(self._stages))
            if reading.is_now:
                stages = [self._random.choice(self._stages)] if self._membership.periods > 1 else self._stages
                await self._membership.absorb_quietly(await self._directory.read_records(self._membership.run, stages))
            await asyncio.sleep(self._period_s * self._membership.periods)

    async def _ask_around(self) -> None:
        """In a small swarm ask a peer for its whole table every period; in a larger one ask a peer for its news several times a period."""
        turn = 0
        while True:
            often = TURNS_PER_PERIOD if cut_off(self._membership.live()) else 1
            await asyncio.sleep(self._membership.news.turn_s(clock_s()) if self._is_large else self._period_s / often)
            if not self._is_large:
                turn = 0
                await self._ask_for_table()
                continue
            if self._is_to_compare():
                await self._ask_for_table()
            if turn % TURNS_PER_PERIOD == 0:
                self._partners = choose_partners(self._membership.live(), len(self._stages))
            turn += 1
            await self._ask_for_news()

    async def _ask_for_table(self) -> None:
        """Let two peers that share only neighbours learn of each other, even while the DHT holds mostly records of dead peers."""
        live = self._membership.live()
        others, cut = self._targets(live, everybody=True), cut_off(live)
        others = [peer for peer in others if peer not in cut] or others
        if not others:
            return
        other = self._random.choice(others)
        with contextlib.suppress(RemoteError):  # the next push finds out whether it is alive
            async for records in self._client.table(other, with_time_for(PUSH_TIMEOUT_S, PAGE_BYTES)):
                await self._membership.absorb_quietly(records, other)

    def _is_to_compare(self) -> bool:
        """True if it knows many strangers, as a newcomer does after its first table, and has asked for no other one lately: T8 (proof)."""
        now_s = clock_s()
        if now_s - self._compared_s < self._membership.view.ttl_s or len(self._membership.strangers()) <= FEW_STRANGERS:
            return False
        self._compared_s = now_s
        return True

    async def _ask_for_news(self) -> None:
        """Ask a peer for news, and another one if the answer is full. If one does not answer, liveness finds out whether it is there."""
        for _ in range(MOST_IN_A_TURN):
            peer = self._whom_to_ask() if not self._membership.is_quiet else None
            if peer is None:
                return
            try:
                if await self._hear_news_of(peer) < MOST_NEWS:
                    return
            except BadMessageError:
                return
            except RemoteError:
                self._liveness.report_failure(peer)
                return

    async def _hear_news_of(self, peer: PeerId) -> int:
        """Returns the number of records that came."""
        asked_s, known = time.monotonic(), self._membership.news.tags(clock_s())
        news = await self._client.ask_for_news(peer, known, PUSH_TIMEOUT_S)
        self._answered(peer, asked_s)
        await self._membership.absorb_quietly(news, peer)
        self._membership.reached(peer)
        return len(news)

    def _whom_to_ask(self) -> PeerId | None:
        live = self._membership.live()
        mine, cut = live.mine, cut_off(live)
        there = [peer for peer in self._partners if live.find(peer) is not None and peer not in cut]
        far = [r.peer for stage in self._stages for r in live.speakers(stage)] if live.is_summarised else []
        return whom_to_ask(mine is not None and mine.summary is not None, there, far, (self._random.random(), self._random.random()))

    def _publish_and_store(self) -> None:
        """Publish and store this peer's record. In a large swarm only when that is due; peers that ask around spread it."""
        live = self._membership.live()
        now_s = clock_s()
        if not is_to_announce(self._membership.periods, (now_s - self._announced_s) / self._period_s):
            if self._is_large:
                self._membership.current()  # what changed is news for mates: sections that were fetched, a ledger told to nobody
            return
        signed = self._membership.publish()
        if signed is None:
            return
        if is_to_store(signed.record, live, (now_s - self._stored_s) / self._period_s):
            self._stored_s = now_s
            self._directory.store_soon(self._membership.run, signed)
        if self._is_large:
            self._announced_s = now_s
            for peer in self._random.sample(self._partners, min(ANNOUNCED_TO, len(self._partners))):
                self._send_to(peer, 1)
        else:
            self.push(everybody=True)

    def _push_in(self, wait_s: float, everybody: bool) -> None:
        most = MOST_ON_THEIR_WAY if everybody else 1
        self._soon[everybody] = asyncio.get_running_loop().call_later(wait_s, self._push_now, everybody, most)

    def _push_now(self, everybody: bool, most_on_their_way: int = MOST_ON_THEIR_WAY) -> None:
        for waiting in {everybody, False} & self._soon.keys():  # all peers include those of this stage
            self._soon.pop(waiting).cancel()
        if self._has_ended or self._membership.is_quiet:
            return
        self._pushed_s = clock_s()
        for peer in self._targets(self._membership.live(), everybody):
            self._send_to(peer, most_on_their_way)

    def _targets(self, live: LiveView, everybody: bool) -> list[PeerId]:
        mine = live.mine
        others = [record for record in live.records if record.peer != live.me]
        if not others:
            return self._ever_met()
        mates = [r.peer for r in others if mine is not None and r.stage == mine.stage]
        rest = [r.peer for r in others if mine is None or r.stage != mine.stage]
        known = self._partners if live.is_summarised else to_tell(live.me, mates)
        members = live.members(mine.stage, mine.step) if mine is not None else ()
        waiting = mates_to_tell(mine, members, self._group_size) if mine is not None else []
        leader = leader_of(waiting) if len(mates) > STAGE_FAN_OUT else None  # it proposes as soon as it has seen all ledgers
        first = [leader] if leader is not None and leader != live.me else []
        if len(waiting) < len(members):
            if live.is_summarised and not everybody:
                return first  # a ledger that rests is news for the others
            known = list(dict.fromkeys([*known, *(r.peer for r in waiting if r.peer != live.me)]))
        chosen = list(dict.fromkeys([*self._random.sample(known, min(len(known), STAGE_FAN_OUT)), *first]))
        if everybody and not live.is_summarised:
            far = to_tell(live.me, rest)
            chosen += self._random.sample(far, min(len(far), OTHERS_FAN_OUT))
        return chosen

    def _ever_met(self) -> list[PeerId]:
        """Return a few of all peers ever met: a peer that sees no other peer alive still has to make itself known."""
        met = {peer for peer in self._membership.view.sightings if self._membership.view.is_proven(peer)}
        known = sorted({*(met - {self._membership.me} or self._membership.view.strangers), *self._membership.book} - {self._membership.me})
        return self._random.sample(known, min(len(known), OTHERS_FAN_OUT))

    def _send_to(self, peer: PeerId, most_on_their_way: int) -> None:
        """Send this peer's record as it is now, or later if too many are under way. Their order does not matter: the newer one counts."""
        under_way = self._sending.setdefault(peer, set())
        if len(under_way) >= most_on_their_way:
            self._stale.add(peer)
            return
        task = start(self._send(peer))
        under_way.add(task)
        task.add_done_callback(lambda task: self._sent(peer, task))

    def _sent(self, peer: PeerId, task: asyncio.Task[None]) -> None:
        under_way = self._sending[peer]
        under_way.discard(task)
        if not under_way:
            del self._sending[peer]
        if peer in self._stale:
            self._stale.discard(peer)
            self._send_to(peer, MOST_ON_THEIR_WAY)

    async def _send(self, peer: PeerId) -> None:
        own, asked_s = self._membership.raws.get(self._membership.me), time.monotonic()
        try:
            told = await self._client.tell(peer, [own.raw] if own is not None else [], PUSH_TIMEOUT_S)
            self._answered(peer, asked_s)
            self._membership.absorb(told, peer)
            self._membership.reached(peer)
        except BadMessageError:
            return  # counted where it was refused; the peer's next message may be sound
        except RemoteError:
            self._stale.discard(peer)
            self._liveness.report_failure(peer)

    def _answered(self, peer: PeerId, asked_s: float) -> None:
        """Count the round trip of a question that has just been answered."""
        record = self._membership.find(peer)
        if record is not None:
            self.position.answered(peer, time.monotonic() - asked_s, record.coordinate)

    @property
    def _is_large(self) -> bool:
        return len(self._membership.live().records) > TELLS_ALL
