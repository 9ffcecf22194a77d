"""A peer of the protocol model without state: it takes a mate's, or what is on its disk."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from peerd.policy.route.admission import donors
from peerd.policy.step.acts import LoadCheckpoint, Wait
from peerd.policy.step.recovery import Beginning, plan, step_to_bring, step_to_go_back_to
from peerd.policy.step.situation import StepRules
from peerd.table.record import NO_AVERAGE, Lineage, PeerId, Phase

if TYPE_CHECKING:
    from peerd.table.view import LiveView
    from tests.policy.model_peer import ModelPeer
    from tests.policy.model_rounds import Snapshot


class Recovery:
    """Offers its checkpoints, and resumes where every stage can, as the daemon's stepper does while nobody serves its stage."""

    def __init__(self, peer: ModelPeer) -> None:
        self._peer = peer
        self.going_on = False
        self._resumable: tuple[LoadCheckpoint | None, float] = (None, 0.0)
        self._going_back: tuple[int | None, float] = (None, 0.0)

    @property
    def _rules(self) -> StepRules:
        world = self._peer.world
        return replace(world.rules, ties_stages=False) if "sum of the step before" in world.scenario.off else world.rules

    def begin(self, stage: int) -> None:
        peer = self._peer
        self.going_on = True
        peer.change(stage=stage, checkpoints=self.on_disk(stage))
        peer.start()

    def on_disk(self, stage: int) -> tuple[int, ...]:
        return tuple(found.step for found in self._peer.world.checkpoints.get(self._peer.name, ()) if found.stage == stage)

    def tick(self) -> None:
        peer = self._peer
        live, rules = peer.live(), self._rules
        if live.serving(peer.record.stage):
            brought = step_to_bring(peer.record, live, rules) if "bring" not in peer.world.scenario.off else None
            if brought is not None:
                self._load(brought)
            elif step_to_go_back_to(peer.record, live, rules) is None:
                self.download(frozenset())
            return
        seen = [sighting.record.step for name, sighting in peer.view.sightings.items() if name != peer.name]
        beginning = Beginning(founder=False)
        found = plan(peer.record, live, rules, beginning=beginning, newest_seen=max(seen, default=0))
        assert isinstance(found, Wait | LoadCheckpoint), "a run under way must not begin anew"
        if isinstance(found, Wait):
            return
        if found != self._resumable[0]:
            self._resumable = (found, peer.now)
        if peer.now - self._resumable[1] >= (rules.ttl_s if found.is_lossless else rules.lost_wait_s):
            self._load(found.step)

    def _load(self, step: int) -> None:
        peer = self._peer
        kept = next(each for each in peer.world.checkpoints[peer.name] if (each.stage, each.step) == (peer.record.stage, step))
        self.going_on, peer.has_state = False, True
        peer.theta, peer.previous = kept.theta, kept.previous
        peer.world.counts["resumed"] += 1
        peer.change(step=kept.step, lineage=kept.lineage, norms=kept.norms)
        peer.tied.take_over(kept.copy)

    def back_since_s(self, live: LiveView) -> float | None:
        """Since when rule 14 (step back) has named the same step; None while it names none."""
        step = step_to_go_back_to(self._peer.record, live, self._rules)
        if step != self._going_back[0]:
            self._going_back = (step, self._peer.now)
        return self._going_back[1] if step is not None else None

    def step_back(self) -> None:
        """Rule 14 (step back): hold nothing any more, and offer what is on the disk."""
        peer = self._peer
        peer.world.counts["stepped back"] += 1
        peer.drop_ledgers()
        peer.rounds.drop()
        peer.average, peer.has_state, self.going_on = None, False, True
        peer.theta, peer.previous = peer.world.thetas.first(peer.record.stage), None
        peer.change(phase=Phase.JOINING, step=0, average_id=NO_AVERAGE, lineage=Lineage(), norms=(), tied=Lineage(), tied_sums=(), voids=())

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
