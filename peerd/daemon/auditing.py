"""Puts the audits of a seat together, where the run wants them: rule 20 (audit)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import structlog

from peerd.audit.auditor import Auditor
from peerd.audit.replays import Replays
from peerd.planner.memory import Room
from peerd.stage.witnessing import PassWitness, most_kept_bytes
from peerd.swarm.clock import clock_s
from peerd.swarm.membership import Membership
from peerd.table.record import MAX_SIDELINED, PeerId, RunId
from peerd.table.view import LiveView
from peerd.wire.audit_client import AuditClient

if TYPE_CHECKING:
    from peerd.daemon.peer import Peer
    from peerd.daemon.seat import Seat

LOG = structlog.get_logger()


class AuditingSeat:
    """A seat, as its auditor sees it."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat

    @property
    def run(self) -> RunId:
        return self._seat.run

    @property
    def me(self) -> PeerId:
        return self._seat.peer.membership.me

    @property
    def coins_seed(self) -> bytes:
        return self._seat.coins_seed

    @property
    def patience_s(self) -> float:
        return self._seat.peer.patience_s

    def sign(self, message: bytes) -> bytes:
        return self._seat.sign(message)

    def has_signed(self, peer: PeerId, message: bytes, signature: bytes) -> bool:
        return self._seat.has_signed(peer, message, signature)

    def live(self) -> LiveView:
        return self._seat.peer.membership.live()

    def pass_s(self) -> float:
        return self._seat.pass_s()

    async def keep_cases(self) -> None:
        await self._seat.peer.case_store.keep()

    def cast_out(self, peers: Sequence[PeerId]) -> None:
        """They are condemned again whenever that ends: a peer that lost its standing never gets it back."""
        cast_out(self._seat.peer.membership, peers)


def cast_out(membership: Membership, peers: Sequence[PeerId]) -> None:
    """Let peers that have lost their standing count for nothing, and refuse their calls, for as long as one that contradicts itself."""
    now_s = clock_s()
    fresh = [peer for peer in peers if not membership.view.is_condemned(peer, now_s)]
    for peer in fresh:
        membership.cast_out(peer, now_s)
    for peer in peers:
        membership.bans.add(peer, membership.view.ttl_s)
    if fresh:
        membership.wake()


async def remember_cases(peer: Peer) -> None:
    """Read the convictions that this home has kept of the run, where peers audit each other. Those that they convict count for nothing."""
    if not peer.place.manifest.swarm.audits:
        return
    num_cases = await asyncio.to_thread(peer.case_store.read)
    if num_cases:
        LOG.info("convictions of audits that this home has kept", convictions=num_cases, lost=sorted(peer.cases.losers))
    cast_out(peer.membership, sorted(peer.cases.losers - {peer.membership.me}))


def left_out(seat: Seat) -> tuple[PeerId, ...]:
    """The mates that this peer leaves out of the present step: T6 (sideline), and those that withhold receipts of their parts."""
    withholding = seat.peer.cases.withholding.left_out(seat.state.record.step)
    return tuple(sorted({*seat.rounds.absences.sidelining.peers, *withholding}))[:MAX_SIDELINED]


def witness_of(seat: Seat, room: Room) -> PassWitness | None:
    """What signs the calls of a seat; None in a run without audits."""
    manifest = seat.peer.place.manifest
    if not manifest.swarm.audits:
        return None
    return PassWitness(seat.state, seat, most_kept_bytes(manifest, room.device if room.host is None else room.host))


def auditor_of(seat: Seat) -> Auditor | None:
    """What audits the mates of a seat; None in a run without audits."""
    peer, state, witness = seat.peer, seat.state, seat.witness
    if witness is None:
        return None
    host, client = AuditingSeat(seat), AuditClient(peer.network.links, seat.run)
    replays = Replays(peer.place.manifest, state, seat.executor, witness, client, host, peer.data)
    return Auditor(state, witness, replays, client, peer.cases, host)
