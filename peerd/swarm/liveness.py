"""Finds dead peers fast but fallibly, rule T5 (suspicion): a peer is suspect if its connection broke and it does not answer a re-dial.

A re-dial and its answer may wait behind tensors on a busy line. So a peer from which any bytes came since the question was asked lives,
and is asked again. That is proven by what arrives, and ends when nothing does. The question goes over the connection that there is. If
nothing at all comes back over that one for far longer than answers take of late, it is given up, and the next call dials the peer where its
record says it is. Before a peer is suspected, others are asked whether they reach it: maybe only the link to it is dead.
Sure and slow liveness is the record's TTL, in table/. A wrong suspicion costs replays, never exactness, and makes the next
slower (policy/swarm/suspicion.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import Protocol

import structlog

from peerd.background import start
from peerd.errors import PeerGoneError, RemoteError, UnansweredError, UnwelcomeError
from peerd.policy.swarm.reaching import has_moved, hosts_among, is_in_round_with, is_out_of_reach, is_reached, witnesses
from peerd.policy.swarm.suspicion import UNANSWERED, AnswerTimes, DeadLines
from peerd.swarm.clock import clock_s
from peerd.swarm.membership import Membership
from peerd.table.record import PeerId, PeerRecord, Reach
from peerd.wire.swarm_client import SwarmClient

REDIAL_TIMEOUT_S, RELAYED_REDIAL_TIMEOUT_S = 1.0, 4.0
"""Through a relay it takes half a dozen round trips, each of them longer."""
ASK_AGAIN_S = 0.2
WORD_OF_OTHERS_S = 0.5
"""Time for the way to a peer that is asked whether it reaches another one, beside that for its own question."""
LOOK_PERIOD_S = 1.0
LOG = structlog.get_logger()


class Lines(Protocol):
    """The connections over which questions are asked (`Links`)."""

    answered_s: dict[PeerId, float]
    """When bytes last came from each peer over them (`time.monotonic`)."""
    refused_s: dict[PeerId, float]
    """When the machine of a peer last refused a connection."""
    answer_times: AnswerTimes

    async def hang_up(self, peer: PeerId) -> None: ...

    async def leave_address(self, peer: PeerId) -> None: ...


class Liveness:
    """Re-dials peers that failed and tells the swarm about those that do not answer."""

    def __init__(self, membership: Membership, client: SwarmClient, heard_s: Mapping[PeerId, float], lines: Lines) -> None:
        """`heard_s` tells when bytes last came from each peer, by whichever way (`time.monotonic`)."""
        self._membership = membership
        self._client = client
        self._heard_s = heard_s
        self._lines = lines
        self._dead_lines = DeadLines()
        self._probes: dict[PeerId, asyncio.Task[None]] = {}
        self._asked: dict[PeerId, asyncio.Task[bool]] = {}
        """Peers of which others want to know whether they are there: all who ask at one time get one answer."""
        self.faults_seen = 0
        """Number of peers that did not answer and had not announced that they leave."""

    def report_failure(self, peer: PeerId) -> None:
        """Find out whether a peer is alive after a call to it failed or its connection broke."""
        live = self._membership.live()
        record = live.find(peer) or next((r for r in live.suspected if r.peer == peer), None)
        if peer in self._probes or record is None or peer == live.me or is_out_of_reach(live.mine, record):
            return
        task = start(self._probe(peer, record.pair))
        self._probes[peer] = task
        task.add_done_callback(lambda _task: self._probes.pop(peer, None))

    async def follow(self, broken: asyncio.Queue[PeerId]) -> None:
        """Check the peers in the queue, whose connections broke, until cancelled."""
        while True:
            self.report_failure(await broken.get())

    async def follow_accusations(self) -> None:
        """Ask accused peers from which bytes came lately whether they live, until cancelled: another peer's word may be wrong."""
        while True:
            peer = await self._membership.doubted.get()
            if time.monotonic() - self._heard_s.get(peer, float("-inf")) < self._membership.view.ttl_s:
                self.report_failure(peer)

    async def follow_moves(self) -> None:
        """Leave the old addresses of peers that moved, as their records say: connections to them are dead, and nothing else tells it."""
        known: dict[PeerId, tuple[str, ...]] = {}
        while True:
            for record in self._membership.live().records:
                peer, addresses = record.peer, record.addresses
                if known.get(peer) == addresses:
                    continue
                if peer != self._membership.me and has_moved(known.setdefault(peer, addresses), addresses):
                    LOG.info("a peer has another address", moved=peer)
                    start(self._lines.leave_address(peer))
                if hosts_among(addresses):
                    known[peer] = addresses
            for peer in known.keys() - self._membership.view.sightings.keys():
                del known[peer]
            await asyncio.sleep(LOOK_PERIOD_S)

    def close(self) -> None:
        for task in (*self._probes.values(), *self._asked.values()):
            task.cancel()

    async def _probe(self, peer: PeerId, pair: tuple[int, int]) -> None:
        unanswered, record = 0, self._unchanged(peer, pair)
        while record is not None:
            asked_s, silence = time.monotonic(), await self._silence_of(record)
            if silence is None:
                self._membership.reached(peer)
                self._dead_lines.answers(peer)
                return
            unanswered += 1
            is_heard = self._heard_s.get(peer, 0.0) > asked_s
            self._give_up_if_dead(peer, asked_s, unanswered, silence, is_heard)
            if self._membership.find(peer) is None:
                return  # its row had to make room meanwhile
            lives = self._membership.not_reached(peer, may_be_slow=is_heard)
            record = self._unchanged(peer, pair) if unanswered >= UNANSWERED or not is_heard else self._membership.find(peer)
            if is_heard:
                await asyncio.sleep(ASK_AGAIN_S)
            elif record is not None:
                if not (lives or self._is_waited_for(record) or await self._others_reach(record)):
                    record = self._unchanged(peer, pair)
                    if record is not None:
                        self._suspect(record)
                return

    def _give_up_if_dead(self, peer: PeerId, asked_s: float, unanswered: int, silence: PeerGoneError, is_heard: bool) -> None:
        if self._dead_lines.is_to_be_given_up(
            peer,
            asked_s,
            time.monotonic(),
            self._lines.answer_times.longest_s(time.monotonic()),
            unanswered=unanswered,
            was_waited_for=isinstance(silence, UnansweredError),
            is_heard=is_heard,
            line_is_heard=self._lines.answered_s.get(peer, 0.0) > asked_s,
        ):
            LOG.info("no answer: the connection is given up", to=peer)
            start(self._lines.hang_up(peer))

    def _unchanged(self, peer: PeerId, pair: tuple[int, int]) -> PeerRecord | None:
        """Return the peer's record, None if it is known to have risen above `pair`."""
        record = self._membership.find(peer)
        return record if record is not None and record.pair <= pair else None

    async def answers(self, record: PeerRecord) -> bool:
        """Tell a peer of this one, and find out whether it answers. If it refuses this peer's calls, it is asked why."""
        return await self._silence_of(record) is None

    async def _silence_of(self, record: PeerRecord) -> PeerGoneError | None:
        """As `answers`, with the error of a peer that gives no answer."""
        own = self._membership.raws.get(self._membership.me)
        try:
            told = await self._client.gossip(record.peer, [own.raw] if own else [], self._patience_s(record))
            self._membership.absorb(told, record.peer)
        except PeerGoneError as error:
            return error
        except UnwelcomeError:
            with contextlib.suppress(RemoteError):
                await self._client.learn_list(record.peer, self._patience_s(record))
        except RemoteError:
            pass  # whatever its answer is, it lives
        return None

    def _patience_s(self, record: PeerRecord) -> float:
        """How long a peer has to answer a re-dial."""
        usual_s = RELAYED_REDIAL_TIMEOUT_S if record.reach is Reach.RELAYED else REDIAL_TIMEOUT_S
        return usual_s * self._membership.patience.factor(clock_s())

    async def reaches(self, peer: PeerId) -> bool:
        """Find out for others whether a peer is there."""
        record = self._membership.find(peer)
        if record is None or peer == self._membership.me:
            return record is not None
        task = self._asked.get(peer)
        if task is None:
            task = self._asked[peer] = start(self._is_there(record))
            task.add_done_callback(lambda _task: self._asked.pop(peer, None))
        return await asyncio.shield(task)

    async def _is_there(self, record: PeerRecord) -> bool:
        """Whether a peer answers, or bytes come from it meanwhile: its answer may be late."""
        asked_s = time.monotonic()
        return await self.answers(record) or self._heard_s.get(record.peer, 0.0) > asked_s

    async def _others_reach(self, record: PeerRecord) -> bool:
        """Ask others whether they reach a peer that does not answer this one. One that leaves is not asked for."""
        asked = () if record.leaving else witnesses(self._membership.live(), record)
        within_s = self._patience_s(record) + WORD_OF_OTHERS_S
        waiting, words = {start(self._word_of(witness, record.peer, within_s)) for witness in asked}, list[bool]()
        try:
            while (found := is_reached(len(asked), words)) is None:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                words += [task.result() for task in done]
        finally:
            for task in waiting:
                task.cancel()
        if found:
            LOG.info("no answer, but others reach it", to=record.peer)
        return found

    async def _word_of(self, witness: PeerId, accused: PeerId, within_s: float) -> bool:
        try:
            return await self._client.reaches(witness, accused, within_s)
        except RemoteError:
            return False

    def _is_waited_for(self, record: PeerRecord) -> bool:
        """Whether a peer is in a round with this one, and nothing says that it is gone: its link may be dead for a while."""
        is_refused = self._lines.refused_s.get(record.peer, 0.0) > self._heard_s.get(record.peer, 0.0)
        return is_in_round_with(self._membership.live().mine, record) and not (is_refused or record.leaving)

    def _suspect(self, record: PeerRecord) -> None:
        if not self._membership.suspect(record):
            return  # another call to it failed meanwhile
        if record.leaving:
            LOG.info("a peer has left", left=record.peer)
        else:
            LOG.warning("suspect: no answer to a re-dial", suspect=record.peer)
            self.faults_seen += 1
