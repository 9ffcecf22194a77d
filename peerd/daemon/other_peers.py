"""What the parts of a seat ask about other peers, and what they tell about them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import structlog

from peerd.policy.route.admission import why_refuse_caller
from peerd.policy.step.roster import cut_links
from peerd.policy.swarm.dialling import is_on_this_machine
from peerd.policy.swarm.pace import way_s
from peerd.table.record import PeerId, RawRecord

if TYPE_CHECKING:
    from peerd.daemon.peer import Peer

LOG = structlog.get_logger()


class OtherPeers:
    """The other peers as seen from a stage of this one."""

    def __init__(self, peer: Peer, stage: int) -> None:
        self.peer, self.stage = peer, stage

    def learn(self, *records: RawRecord) -> None:
        self.peer.membership.absorb(records)

    def absorb(self, records: Sequence[RawRecord], sender: PeerId) -> None:
        self.peer.membership.absorb(records, sender)

    def pass_s(self) -> float:
        """Computing time of a microbatch in all stages together, at the slowest peer of each, s. 0 while no peer knows what one takes."""
        train = self.peer.place.manifest.train
        return way_s(self.peer.membership.live(), train.num_stages, train.microbatch_size)

    def rose_s(self, peer: PeerId) -> float:
        known = self.peer.membership.view.sightings.get(peer)
        return known.risen_at_s if known is not None else -math.inf

    def cut_links(self) -> tuple[tuple[PeerId, PeerId], ...]:
        return cut_links(self.peer.membership.live(), self.stage)

    def is_lossy(self, peer: PeerId) -> bool:
        return self.peer.network.links.is_lossy(peer)

    def is_near(self, peer: PeerId) -> bool:
        """True for this peer itself and for those of this machine."""
        if peer == self.peer.membership.me or self.peer.network.links.is_local(peer):
            return True
        record = self.peer.membership.find(peer)
        return record is not None and is_on_this_machine(record.addresses)

    def rates_of(self, peer: PeerId) -> tuple[float | None, float | None]:
        record = self.peer.membership.find(peer)
        return (None, None) if record is None else self.peer.network.links.traffic.line.rates_of(record)

    def is_mate(self, peer: PeerId) -> bool:
        known = self.peer.membership.view.sightings.get(peer)
        return known is not None and known.record.stage == self.stage and peer not in self.peer.membership.contradictory

    def why_refuse_caller(self, caller: PeerId, stage: int) -> str | None:
        """The reason why a peer may send no microbatches to a stage; None if it may."""
        membership = self.peer.membership
        known = None if caller in membership.contradictory else membership.find(caller)
        return why_refuse_caller(known, membership.live(), stage)

    def too_large(self, peer: PeerId, step: int) -> None:
        self.peer.cases.withholding.withheld(peer, step, enough=1)
        LOG.warning("a mate's part of an average is far larger than its mates': it is left out", mate=peer, step=step)

    def mates(self) -> Iterable[PeerId]:
        live = self.peer.membership.live()
        known = (*live.of_stage(self.stage), *live.suspected, *live.expired)
        return {self.peer.membership.me, *(record.peer for record in known if record.stage == self.stage)}

    def delivered(self, peer: PeerId, num_bytes: int, took_s: float) -> None:
        self.peer.network.links.traffic.line.delivered_to(peer, num_bytes, took_s)

    def report_failure(self, peer: PeerId) -> None:
        self.peer.liveness.report_failure(peer)
