"""A peer of the protocol model that comes back from a blackout with nothing but what is on its disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerd.policy.recovery import Beginning, plan

if TYPE_CHECKING:
    from tests.policy.model_peer import ModelPeer


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
            peer.download(frozenset())
            return
        seen = [sighting.record.step for name, sighting in peer.view.sightings.items() if name != peer.name]
        beginning = Beginning(founder=False)
        found = plan(peer.record, live, peer.world.scenario.num_stages, beginning=beginning, newest_seen=max(seen, default=0))
        assert not found.begin, "a run under way must not begin anew"
        if found.load != self._resumable[0]:
            self._resumable = (found.load if found.load is not None else -1, peer.now)
        if found.load is None or peer.now - self._resumable[1] < peer.view.ttl_s:
            return
        kept = next(each for each in peer.world.checkpoints[peer.name] if (each.stage, each.step) == (peer.record.stage, found.load))
        self.going_on, peer.has_state = False, True
        peer.theta, peer.previous = kept.theta, kept.previous
        peer.world.counts["resumed"] += 1
        peer.change(step=kept.step, lineage=kept.lineage, norms=kept.norms, checkpoints=())
        peer.tied.take_over(kept.copy)
