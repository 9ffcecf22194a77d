"""A peer of the protocol model without state: it takes a mate's, or after a blackout what is on its disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerd.policy.route.admission import donors
from peerd.policy.step.acts import LoadCheckpoint, Wait
from peerd.policy.step.recovery import Beginning, plan
from peerd.table.record import PeerId, Phase

if TYPE_CHECKING:
    from tests.policy.model_peer import ModelPeer
    from tests.policy.model_rounds import Snapshot


class Recovery:
    """Offers its checkpoints, and resumes where every stage can, as the daemon's stepper does while nobody serves its stage."""

    def __init__(self, peer: ModelPeer) -> None:
        self._peer = peer
        self.going_on = False
        self._resumable: tuple[int, float] = (-1, 0.0)

    def begin(self, stage: int) -> None:
        peer = self._peer
        self.going_on = True
        kept = peer.world.checkpoints.get(peer.name, ())
        peer.change(stage=stage, checkpoints=tuple(found.step for found in kept if found.stage == stage))
        peer.start()

    def tick(self) -> None:
        peer = self._peer
        live = peer.live()
        if live.serving(peer.record.stage):
            self.download(frozenset())
            return
        seen = [sighting.record.step for name, sighting in peer.view.sightings.items() if name != peer.name]
        beginning = Beginning(founder=False)
        found = plan(peer.record, live, peer.world.scenario.num_stages, beginning=beginning, newest_seen=max(seen, default=0))
        assert isinstance(found, Wait | LoadCheckpoint), "a run under way must not begin anew"
        step = found.step if isinstance(found, LoadCheckpoint) else -1
        if step != self._resumable[0]:
            self._resumable = (step, peer.now)
        if step < 0 or peer.now - self._resumable[1] < peer.view.ttl_s:
            return
        kept = next(each for each in peer.world.checkpoints[peer.name] if (each.stage, each.step) == (peer.record.stage, step))
        self.going_on, peer.has_state = False, True
        peer.theta, peer.previous = kept.theta, kept.previous
        peer.world.counts["resumed"] += 1
        peer.change(step=kept.step, lineage=kept.lineage, norms=kept.norms, checkpoints=())
        peer.tied.take_over(kept.copy)

    def download(self, tried: frozenset[PeerId]) -> None:
        """A mate's state, from the first that gives it."""
        peer = self._peer
        peer.downloading = True
        able = [r for r in donors(peer.live(), peer.record.stage, tried) if r.peer not in tried]
        if not able:
            peer.downloading = not peer.has_state and not self.going_on
            if peer.downloading:
                peer.after(1.0, lambda: self.download(frozenset()))
            return
        donor = able[0].peer

        def arrived(snapshot: Snapshot | None) -> None:
            if snapshot is None or snapshot.stage != peer.record.stage:
                self.download(tried | {donor})
                return
            peer.downloading, peer.has_state, self.going_on = False, True, False
            peer.theta, peer.previous = snapshot.theta, snapshot.previous
            if peer.record.phase is Phase.JOINING:
                peer.change(step=snapshot.step, lineage=snapshot.lineage, norms=snapshot.norms)
                peer.tied.take_over(snapshot.copy)

        peer.rounds.fetch_state(donor, arrived)
