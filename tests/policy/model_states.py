"""Whole states between peers of the protocol model: long downloads of snapshots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from peerd.table.record import Lineage, PeerId, Phase, StepNorm
from tests.policy.model_theta import ThetaId
from tests.policy.model_tied import Copy

if TYPE_CHECKING:
    from tests.policy.model_peer import ModelPeer


@dataclass(frozen=True, slots=True)
class Snapshot:
    stage: int
    step: int
    lineage: Lineage
    theta: ThetaId
    previous: ThetaId | None
    norms: tuple[StepNorm, ...]
    copy: Copy
    """Of a tied weight."""


class States:
    """What a peer gives of its state, and gets of others'."""

    def __init__(self, peer: ModelPeer) -> None:
        self._peer = peer

    def fetch(self, donor: PeerId, arrived: Callable[[Snapshot | None], None]) -> None:
        """A long download of a snapshot that does not change; it fails when the donor dies under it."""
        peer = self._peer
        whole_s = peer.world.rng.lognormvariate(peer.world.scenario.download, 0.8)
        peer.world.counts["downloads"] += 1

        def answered(found: object) -> None:
            if not isinstance(found, Snapshot):
                arrived(None)
                return
            source = peer.world.peers[donor]
            peer.after(whole_s, lambda: arrived(self._whole(source, found) if source.alive else None))

        peer.rounds.ask(donor, lambda mate: mate.states.give(peer.name, whole_s), answered)

    def give(self, joiner: PeerId, lasts_s: float) -> Snapshot | None:
        peer = self._peer
        if peer.record.phase is Phase.JOINING:
            return None
        peer.kept.give_state(joiner, lasts_s)
        return peer.lies.state(self.now())

    def now(self) -> Snapshot:
        peer, record = self._peer, self._peer.record
        return Snapshot(record.stage, record.step, record.lineage, peer.theta, peer.previous, record.norms, peer.tied.now)

    def _whole(self, donor: ModelPeer, found: Snapshot) -> Snapshot:
        if "snapshot" not in donor.world.scenario.off:
            return found
        torn = donor.world.thetas.torn(found.theta, donor.theta)
        return replace(found, theta=torn)
