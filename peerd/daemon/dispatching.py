"""How a seat sends microbatches on to the next stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerd.wire.clients import StageClient
from peerd.wire.dispatch import Dispatcher
from peerd.wire.receipts import NoWitness

if TYPE_CHECKING:
    from peerd.daemon.seat import Seat

LEAST_UNTAKEN_S, UNTAKEN_TIMES = 600.0, 3
"""A microbatch that no peer of the next stage takes for so long, or for so many times as long as one takes in all stages, is given up here:
peers of that stage may come back meanwhile, and what was computed of it is lost then."""


def dispatcher_of(seat: Seat) -> Dispatcher:
    peer = seat.peer
    train = peer.place.manifest.train
    return Dispatcher(
        StageClient(peer.network.links, seat.run, peer.spans),
        peer.membership,
        peer.liveness,
        seat.link_codecs,
        train.num_stages,
        train.microbatches_per_step,
        peer.patience_s,
        lambda: max(LEAST_UNTAKEN_S, UNTAKEN_TIMES * seat.pass_s()),
        seat.witness or NoWitness(),
        seat.own_records,
    )
