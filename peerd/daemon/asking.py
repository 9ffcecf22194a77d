"""Puts the two sides of texts together: what the stage of a seat goes on with, and the peers that this daemon's user asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from peerd.link.links import Bytes
from peerd.planner.memory import Room
from peerd.policy.inference.paths import TextOffer
from peerd.policy.inference.sessions import SessionLimits
from peerd.stage.text_turns import TextTurns
from peerd.stage.texts import ROOM_SHARE, StageTexts
from peerd.table.record import PeerId
from peerd.wire.messages import chunks_of
from peerd.wire.text_messages import Extended, TextCall
from peerd.wire.texts import TextClient

if TYPE_CHECKING:
    from peerd.daemon.peer import Peer
    from peerd.daemon.seat import Seat

UNKNOWN_S = 1.0
"""The round trip to a peer to which none has been measured, longer than nearly all."""


def texts_of(seat: Seat, room: Room) -> StageTexts:
    """What goes on with texts in a seat, within a part of the memory that its stage may take."""
    peer = seat.peer
    limits, turns = SessionLimits(most_bytes=int(ROOM_SHARE * room.device)), TextTurns(peer.governor.limits.inference)
    return StageTexts(peer.place.manifest, seat.state, seat.executor, limits, turns, peer.membership.is_known)


class RunPeers:
    """The peers of the run, for an asker. This daemon's own stage is asked without a network."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._me = peer.membership.me
        self._client = TextClient(peer.network.links, peer.place.signed.run)

    def candidates(self, stage: int) -> list[PeerId]:
        serving = [record for record in self._peer.membership.live().serving(stage) if not record.leaving]
        away_s = {record.peer: self._away_s(record.peer) for record in serving}
        return sorted(away_s, key=lambda peer: (away_s[peer], peer))

    def _away_s(self, peer: PeerId) -> float:
        """The round trip to a peer; long if it is not known."""
        record = self._peer.membership.find(peer)
        if peer == self._me or record is None:
            return 0.0
        round_trip_s = self._peer.gossip.position.round_trip_s(record)
        return UNKNOWN_S if round_trip_s is None else round_trip_s

    async def offer(self, peer: PeerId, stage: int) -> TextOffer:
        if peer == self._me:
            return self._peer.reception.offer_text(peer, stage)
        offer = await self._client.offer(peer, stage, self._peer.patience_s)
        return replace(offer, round_trip_s=self._away_s(peer))

    async def extend(self, peer: PeerId, call: TextCall) -> Extended:
        if peer != self._me:
            return await self._client.extend(peer, call, self._peer.patience_s)

        async def receive() -> Sequence[Bytes]:
            return [*chunks_of(call.tensors)]

        return await self._peer.reception.extend_text(peer, call, receive)

    async def forget(self, peer: PeerId, text: bytes) -> None:
        if peer == self._me:
            await self._peer.reception.forget_text(peer, text)
        else:
            await self._client.forget(peer, text, self._peer.patience_s)

    async def changed(self, timeout_s: float) -> bool:
        return await self._peer.membership.changed(timeout_s)
