"""A peer of the protocol model without state: it takes a mate's, or what is on its disk."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from peerd.policy.route.admission import donors
from peerd.policy.step.acts import Act, FetchPrevious, LoadCheckpoint, Reload, Wait
from peerd.policy.step.clocks import StepClocks
from peerd.policy.step.recovery import Beginning, plan
from peerd.policy.step.situation import OwnState, Situation, StepRules
from peerd.policy.step.stepping import decide
from peerd.table.record import NO_AVERAGE, Lineage, PeerId, Phase
from tests.policy.model_proving import Proving
from tests.policy.model_states import Snapshot

if TYPE_CHECKING:
    from peerd.table.view import LiveView
    from tests.policy.model_peer import ModelPeer


PREVIOUS_S = 1.0
"""How long a joiner waits for an average that gives it the previous parameters before it fetches them."""


class Recovery:
    """Offers its checkpoints, and resumes where every stage can, as the daemon's stepper does while nobody serves its stage."""

    def __init__(self, peer: ModelPeer) -> None:
        self._peer = peer
        self.clocks = StepClocks()
        self.proving = Proving(peer)
        self.lacks_previous = False
        """Its state is downloaded, and it has applied no average since."""

    @property
    def _rules(self) -> StepRules:
        world = self._peer.world
        return replace(world.rules, ties_stages=False) if "sum of the step before" in world.scenario.off else world.rules

    def on_disk(self, stage: int) -> tuple[int, ...]:
        return tuple(found.step for found in self._peer.world.checkpoints.get(self._peer.name, ()) if found.stage == stage)

    def decide(self, now: Situation) -> Act:
        """As the daemon's stepper does. Records of dead peers are believed for one life of a record."""
        peer, mine, rules = self._peer, now.mine, self._rules
        if peer.lies.pretends and mine.phase is Phase.JOINING:
            return Wait("it has nothing to load")
        if mine.phase is Phase.JOINING and mine.step == 0 and not now.live.serving(mine.stage):
            seen = [sighting.record.step for name, sighting in peer.view.sightings.items() if name != peer.name]
            act: Act = plan(mine, now.live, rules, beginning=Beginning(founder=False), newest_seen=max(seen, default=0))
        else:
            act = decide(now)
        settled = self.clocks.once_settled(act, rules, peer.now)
        return Wait(act.reason) if isinstance(settled, LoadCheckpoint) and "bring" in peer.world.scenario.off else settled

    def believed(self, live: LiveView) -> LiveView:
        off = "doubt checkpoints" in self._peer.world.scenario.off
        return live if off else self.clocks.claims.believed(live, self._peer.record, self._rules, self._peer.now)

    def load(self, step: int) -> None:
        peer = self._peer
        kept = next(each for each in peer.world.checkpoints[peer.name] if (each.stage, each.step) == (peer.record.stage, step))
        peer.theta, peer.previous = kept.theta, kept.previous
        self.lacks_previous = False
        self.proving.end()
        peer.world.resumes_at(step)
        peer.change(step=kept.step, lineage=kept.lineage, norms=kept.norms)
        peer.tied.take_over(kept.copy)

    def noted(self, own: OwnState, live: LiveView) -> OwnState:
        """With the times that the rules wait for."""
        off = self._peer.world.scenario.off
        if self.lacks_previous and "wait for previous" not in off:
            own = replace(own, lacks_previous=True, previous_s=PREVIOUS_S)
        own = self.proving.noted(own, live)
        noted = self.clocks.noted(own, live, self._rules, self._peer.now)
        noted = replace(noted, complete_since_s=None) if "take turns" in off else noted
        noted = replace(noted, last_in_turn=own.last_in_turn) if "remember the mute" in off else noted
        return replace(noted, averaged_since_s=None) if "wait for the late" in off else noted

    def step_back(self) -> None:
        """Rule 14 (step back): hold the first weights, and offer what is on the disk."""
        peer = self._peer
        peer.world.counts["stepped back"] += 1
        self.proving.end()
        self.begin_anew()
        peer.drop_ledgers()
        peer.rounds.drop()
        peer.average = None
        nothing = Lineage()
        peer.change(phase=Phase.JOINING, step=0, average_id=NO_AVERAGE, lineage=nothing, norms=(), tied=nothing, tied_sums=(), voids=())

    def begin_anew(self) -> None:
        """Go with the record, which says that this peer has the first weights."""
        peer = self._peer
        self.lacks_previous = False
        if "first weights" not in peer.world.scenario.off:
            peer.theta, peer.previous = peer.world.thetas.first(peer.record.stage), None

    def find_donor(self, act: Reload, tried: frozenset[PeerId]) -> None:
        """Ask one mate after another for the header of a state of use, and become a joiner when one shows it."""
        peer, mine = self._peer, self._peer.record
        able = [r for r in donors(peer.live(), mine.stage, tried, peer.world.rules.certifies) if r.peer not in tried]
        peer.downloading = bool(able)
        if not able:
            peer.found_no_donor_s = peer.now
            for record in peer.live().serving(mine.stage):
                if act.is_claimed_by(record, mine) and "doubt claims" not in peer.world.scenario.off:
                    peer.view.doubt(record.peer, peer.now)
            return
        donor = able[0].peer

        def answered(found: object) -> None:
            if not isinstance(found, Snapshot) or not act.is_met_by(found.step, found.lineage, mine):
                self.find_donor(act, tried | {donor})
                return
            peer.downloading = False
            now = peer.record
            if (now.incarnation, now.step, now.phase) == (mine.incarnation, mine.step, mine.phase):
                peer.become_joiner()

        peer.rounds.ask(donor, lambda mate: mate.states.give(peer.name, 0.0), answered)

    def download(self, tried: frozenset[PeerId]) -> None:
        """A mate's state, from the first that gives it."""
        peer = self._peer
        peer.downloading = True

        def ended() -> None:
            peer.downloading = False

        able = [r for r in donors(peer.live(), peer.record.stage, tried, peer.world.rules.certifies) if r.peer not in tried]
        able = [r for r in able if r.peer not in self.proving.distrusted] or able
        if not able:
            peer.after(1.0, ended)
            return
        donor = able[0].peer

        def arrived(snapshot: Snapshot | None) -> None:
            if snapshot is None or snapshot.stage != peer.record.stage:
                self.download(tried | {donor})
                return
            ended()
            peer.theta, peer.previous = snapshot.theta, None
            self.lacks_previous = snapshot.step > 0
            self.proving.begin(donor)
            if peer.record.phase is Phase.JOINING:
                peer.change(step=snapshot.step, lineage=snapshot.lineage, norms=snapshot.norms)
                peer.tied.take_over(snapshot.copy)

        peer.states.fetch(donor, arrived)

    def fetch_previous(self, act: FetchPrevious) -> None:
        """The parameters of the step before, from a mate that is at the same step."""
        peer, mine = self._peer, self._peer.record
        peer.downloading = True
        trusted = [m.peer for m in donors(peer.live(), mine.stage, frozenset(), peer.world.rules.certifies) if m.step == mine.step]
        giver = next((each for each in (act.peer, *trusted) if each not in self.proving.distrusted), act.peer)

        def arrived(found: object) -> None:
            peer.downloading = False
            now = peer.record
            if (now.phase, now.step, now.lineage) != (Phase.JOINING, mine.step, mine.lineage) or not self.lacks_previous:
                return
            if isinstance(found, Snapshot) and (found.step, found.lineage) == (mine.step, mine.lineage):
                peer.previous, self.lacks_previous = found.previous, False
                self.proving.begin(giver, previous=True)
                peer.world.counts["previous fetched"] += 1

        def answered(found: object) -> None:
            peer.after(peer.world.rng.uniform(0.0, 2.0), lambda: arrived(found))

        peer.rounds.ask(giver, lambda mate: mate.states.give(peer.name, 0.0), answered)
