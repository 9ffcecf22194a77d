"""What an asker hears of the run's peers: their offers, with the time that calls take on the way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from peerd.daemon.asking import UNKNOWN_S, RunPeers
from peerd.daemon.peer import Peer
from peerd.policy.inference.paths import TextOffer
from peerd.table.record import PeerId

ME, NEAR, FAR, NEW = PeerId("me"), PeerId("near"), PeerId("far"), PeerId("new")
ROUND_TRIPS_S = {NEAR: 0.02, FAR: 0.3, NEW: None}


class Client:
    async def offer(self, peer: PeerId, _stage: int, _timeout_s: float) -> TextOffer:
        return TextOffer(peer=peer, steps=frozenset({7}), wait_s=0.5)


def peers_here() -> RunPeers:
    records = [SimpleNamespace(peer=peer, leaving=False) for peer in (NEW, FAR, ME, NEAR)]
    live = SimpleNamespace(serving=lambda _stage: records)
    membership = SimpleNamespace(me=ME, live=lambda: live, find={record.peer: record for record in records}.get)
    position = SimpleNamespace(round_trip_s=lambda record: ROUND_TRIPS_S[record.peer])
    reception = SimpleNamespace(offer_text=lambda peer, _stage: TextOffer(peer=peer, steps=frozenset({7}), wait_s=0.5))
    place = SimpleNamespace(signed=SimpleNamespace(run="run"))
    here: Any = SimpleNamespace(membership=membership, gossip=SimpleNamespace(position=position), reception=reception, place=place)
    here.network, here.patience_s = SimpleNamespace(links=None), 1.0
    found = RunPeers(cast(Peer, here))
    found._client = cast(Any, Client())
    return found


async def test_an_offer_tells_how_far_its_peer_is_and_the_nearest_are_asked_first() -> None:
    """So that of two peers which answer at once the nearer one computes."""
    here = peers_here()
    assert here.candidates(0) == [ME, NEAR, FAR, NEW]
    offers = {peer: await here.offer(peer, 0) for peer in here.candidates(0)}
    assert {peer: offer.round_trip_s for peer, offer in offers.items()} == {ME: 0.0, NEAR: 0.02, FAR: 0.3, NEW: UNKNOWN_S}
    assert {(offer.steps, offer.wait_s) for offer in offers.values()} == {(frozenset({7}), 0.5)}
