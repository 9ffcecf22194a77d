"""Spreads records: every period to the DHT and the peers, at once when a phase changes, with bounded fan-out.

One message to a peer at a time: while one is on its way, newer news of mine waits and goes out as one.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

from peerd.errors import BadMessageError, RemoteError
from peerd.swarm.directory import Directory
from peerd.swarm.liveness import Liveness
from peerd.swarm.membership import Membership, clock_s
from peerd.table.record import PeerId, RawRecord
from peerd.table.view import LiveView
from peerd.wire.clients import SwarmClient
from peerd.wire.values import Description

STAGE_FAN_OUT = 16
OTHERS_FAN_OUT = 16
RELAYED_RECORDS = 16
MIN_PUSH_GAP_S = 0.02
PUSH_TIMEOUT_S = 3.0
FENCE_SHARE = 0.8
QUIET_PERIODS = 1.5


class Gossip:
    """Announces my record and passes others' on."""

    def __init__(self, membership: Membership, client: SwarmClient, directory: Directory, liveness: Liveness, period_s: float) -> None:
        self._membership = membership
        self._client = client
        self._directory = directory
        self._liveness = liveness
        self._period_s = period_s
        self._random = random.Random(membership.me)
        self._wanted = asyncio.Event()
        self._to_everybody = False
        self._sending: dict[PeerId, asyncio.Task[None]] = {}
        self._stale: set[PeerId] = set()
        self._quiet_until_s = 0.0
        self.on_fence: Callable[[str], None] = lambda _reason: None
        self.describe: Callable[[], Description] = lambda: Description((), "", 0.0)
        """What I tell anybody who asks which runs I serve."""

    def push(self, everybody: bool) -> None:
        """Send my row out soon: to my stage's peers, or to everybody within the fan-out."""
        self._to_everybody |= everybody
        self._wanted.set()

    async def tell_everybody(self) -> None:
        """Send my row to everybody within the fan-out; returns when they have it or are out of reach."""
        for peer in self._targets(self._membership.live(), everybody=True):
            self._send_to(peer)
        while self._sending:
            await asyncio.wait(self._sending.values())

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._announce())
                group.create_task(self._read_directory())
                group.create_task(self._look_around())
                group.create_task(self._push_when_wanted())
        finally:
            for task in self._sending.values():
                task.cancel()

    def gossip(self, caller: PeerId, raws: Sequence[RawRecord], want_all: bool) -> list[RawRecord]:
        """Records came in: merge them, answer with my own row, or with the whole table to a newcomer."""
        self._membership.absorb(raws)
        if want_all:
            live = {record.peer for record in self._membership.live().records}
            return [signed.raw for peer, signed in self._membership.raws.items() if peer in live]
        own = self._membership.raws.get(self._membership.me)
        return [own.raw] if own is not None else []

    async def _announce(self) -> None:
        """Every period: publish and store in the DHT. T3: fence myself when I was away. Waits for nobody."""
        last_s = clock_s()
        while True:
            now_s = clock_s()
            if now_s - last_s > FENCE_SHARE * self._membership.view.ttl_s:
                self.fence(f"this peer did not run for {now_s - last_s:.1f} s")
            last_s = now_s
            if now_s >= self._quiet_until_s:
                self._publish_and_store()
            await asyncio.sleep(max(0.0, self._period_s - (clock_s() - now_s)))

    async def _read_directory(self) -> None:
        """Peers that gossip has not brought yet; the DHT may take seconds to answer."""
        while True:
            self._membership.absorb_quietly(await self._directory.read_records(self._membership.run))
            await asyncio.sleep(self._period_s)

    async def _look_around(self) -> None:
        """Every period somebody's whole table, in a swarm within the fan-out (a larger one relays): two that have only
        friends in common learn of one another, also while the DHT is full of the dead."""
        while True:
            await asyncio.sleep(self._period_s)
            others = self._targets(self._membership.live(), everybody=True)
            if not others or self._is_large:
                continue
            try:
                table = await self._client.gossip(self._random.choice(others), [], PUSH_TIMEOUT_S, want_all=True)
            except RemoteError:
                continue  # the next push finds out what is the matter with it
            self._membership.absorb_quietly(table)

    def fence(self, reason: str) -> None:
        """Rule T3, but for what belongs to the stage: the view is cleared and this peer stays quiet for a while."""
        self._quiet_until_s = clock_s() + QUIET_PERIODS * self._period_s
        self._membership.clear_liveness()
        self.on_fence(reason)

    def _publish_and_store(self) -> None:
        signed = self._membership.publish()
        if signed is not None:
            self._directory.store_soon(self._membership.run, signed)
            self.push(everybody=True)

    async def _push_when_wanted(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            everybody, self._to_everybody = self._to_everybody, False
            if clock_s() >= self._quiet_until_s:
                for peer in self._targets(self._membership.live(), everybody):
                    self._send_to(peer)
            await asyncio.sleep(MIN_PUSH_GAP_S)

    def _targets(self, live: LiveView, everybody: bool) -> list[PeerId]:
        mine = live.mine
        others = [record for record in live.records if record.peer != live.me]
        if not others:
            return self._strangers()
        mates = [r.peer for r in others if mine is not None and r.stage == mine.stage]
        rest = [r.peer for r in others if r.peer not in mates]
        chosen = self._random.sample(mates, min(len(mates), STAGE_FAN_OUT))
        if everybody:
            chosen += self._random.sample(rest, min(len(rest), OTHERS_FAN_OUT))
        return chosen

    def _strangers(self) -> list[PeerId]:
        """Whoever was ever met: somebody who sees nobody alive still has to make itself known."""
        known = sorted({*self._membership.view.sightings, *self._membership.book} - {self._membership.me})
        return self._random.sample(known, min(len(known), OTHERS_FAN_OUT))

    def _send_to(self, peer: PeerId) -> None:
        if peer in self._sending:
            self._stale.add(peer)
            return
        task = asyncio.get_running_loop().create_task(self._send(peer))
        self._sending[peer] = task
        task.add_done_callback(lambda _task: self._sent(peer))

    def _sent(self, peer: PeerId) -> None:
        self._sending.pop(peer, None)
        if peer in self._stale:
            self._stale.discard(peer)
            self._send_to(peer)

    async def _send(self, peer: PeerId) -> None:
        try:
            self._membership.absorb(await self._client.gossip(peer, self._news(), PUSH_TIMEOUT_S))
        except BadMessageError:
            return  # counted where it was refused; the peer's next message may be sound
        except RemoteError:
            self._stale.discard(peer)
            self._liveness.report_failure(peer)

    @property
    def _is_large(self) -> bool:
        return len(self._membership.live().records) > STAGE_FAN_OUT + OTHERS_FAN_OUT

    def _news(self) -> list[RawRecord]:
        """My row, and in a swarm larger than the fan-out some others' that rose lately."""
        membership = self._membership
        own = membership.raws.get(membership.me)
        news = [own.raw] if own is not None else []
        if self._is_large:
            lately = sorted(membership.view.sightings.values(), key=lambda seen: -seen.risen_at_s)[:RELAYED_RECORDS]
            news += [membership.raws[s.record.peer].raw for s in lately if s.record.peer in membership.raws]
        return news
