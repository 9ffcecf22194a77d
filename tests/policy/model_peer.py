"""One peer of the protocol model: its table, its exact state and the actions that the step rules call for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from peerd.policy.step import acts
from peerd.policy.step.acts import Act
from peerd.policy.step.leaving import has_successors, owes_nothing
from peerd.policy.step.ledger import at_next_step, both_dropped, with_overlap
from peerd.policy.step.norms import TOLD_STEPS
from peerd.policy.step.roster import lineage_after, lineage_skipped
from peerd.policy.step.situation import Situation
from peerd.table.record import NO_AVERAGE, AverageId, Lineage, PeerId, PeerRecord, Phase, StepNorm, Suspicion, check_transition
from peerd.table.view import LiveView
from tests.policy.model_calls import Calls
from tests.policy.model_deciding import Deciding
from tests.policy.model_exchange import FAST, SUM_BYTES
from tests.policy.model_fetching import Fetching
from tests.policy.model_hearing import Hearing, KeptView
from tests.policy.model_kept import Held, Kept
from tests.policy.model_lies import Lies
from tests.policy.model_links import DeadLinks
from tests.policy.model_local import Local
from tests.policy.model_recovery import Recovery
from tests.policy.model_rounds import Rounds
from tests.policy.model_situation import own_state_of
from tests.policy.model_states import States
from tests.policy.model_theta import Average, Gradient, ThetaId
from tests.policy.model_tied import Sum, Tied
from tests.policy.model_trust import Claim, Trust

if TYPE_CHECKING:
    from tests.policy.protocol_model import World

PERIOD_S, TTL_S = 1.0, 3.0
AVERAGING_S = 1.5
TICK_S = 0.15
PUSH_S = 0.02
FENCE_S = 1.5 * PERIOD_S


class ModelPeer:
    """A process. Facts (theta, a finished average, the log) outlive a fence; claims (the ledger) do not."""

    def __init__(self, world: World, name: PeerId, stage: int) -> None:
        self.world, self.name = world, name
        self.alive, self.awake_at = True, 0.0
        self.slow_until = self.cancelled_until = self.overflows_until = self.thin_until = self.drips_until = 0.0
        self._drip = FAST
        self.forward_s = world.rng.uniform(0.02, 0.08)
        self.clock_offset_s = world.rng.uniform(-1000.0, 1000.0)
        self.view = KeptView(me=name, ttl_s=TTL_S)
        self.view.group_size = world.scenario.group_size
        self.hearing = Hearing(self, PERIOD_S)
        self.record = PeerRecord(
            peer=name, incarnation=self._next_incarnation(), stage=stage, trains=world.rng.random() < 0.7 or name == "p0"
        )
        if world.scenario.delayed:
            self.record = with_overlap(self.record)
        self.theta = world.thetas.first(stage)
        self.previous: ThetaId | None = None
        self.accumulator: list[Gradient] = []
        self.next_accumulator: list[Gradient] = []
        self.average: Average | None = None
        self.claim: Claim | None = None
        self.trust, self.averages = Trust(self), Fetching(self)
        self.kept = Kept(self)
        self.lost_since_s: float | None = None
        self.fenced_until_s = float("-inf")
        self.downloading = self.fetching = False
        self.refused: dict[tuple[PeerId, int], float] = {}
        self.unbelieved: dict[tuple[PeerId, AverageId], float] = {}
        self.unanswered: dict[tuple[PeerId, int], float] = {}
        self.found_no_donor_s = float("-inf")
        self.links = DeadLinks(self)
        self.lies = Lies(self)
        self._announced_at_s = self.now
        self._push_pending = self._poked = False
        self._to_stage: int | None = None
        self.rounds = Rounds(self)
        self.states = States(self)
        self.calls = Calls(self)
        self.recovery = Recovery(self)
        self.tied = Tied(self)
        self.local = Local(self)
        self.deciding = Deciding(self)

    @property
    def now(self) -> float:
        """My own monotonic clock; nobody else's shows the same."""
        return self.world.now + self.clock_offset_s

    @property
    def fenced(self) -> bool:
        return self.now < self.fenced_until_s

    def live(self) -> LiveView:
        return self.view.live(self.now)

    def drip(self, until: float) -> None:
        """From now on an accumulator takes seconds to send."""
        self.drips_until, self._drip = until, SUM_BYTES / self.world.rng.uniform(1.0, 8.0)

    @property
    def told_up(self) -> float:
        """Bytes per second that this peer's uplink carries, by its own word."""
        return self._drip if self.world.now < self.drips_until else FAST

    @property
    def up(self) -> float:
        return self.told_up / (100.0 if self.lies.trickles else 1.0)

    # life

    def begin(self) -> None:
        """Serve the first step of a new run."""
        self.change(phase=Phase.ACCUMULATING)
        self.start()

    def join(self, stage: int) -> None:
        """Come with nothing but what is on the disk."""
        self.change(stage=stage, phase=Phase.JOINING, checkpoints=self.recovery.on_disk(stage))
        self.theta = self.world.thetas.first(stage)
        self.start()

    def leave(self, to_stage: int | None = None) -> None:
        """Refuse new work, and go once nobody waits for anything I have; then on to another stage, if one is named."""
        if self.record.phase is not Phase.JOINING and not self.record.leaving:
            self._to_stage = to_stage
            self.change(leaving=True, trains=False)

    def _go(self) -> None:
        """Say farewell and end; a move that would leave my stage empty is called off."""
        if self._to_stage is not None and not has_successors(self.record, self.live()):
            self._to_stage = None
            self.change(leaving=False)
            return
        self.drop_ledgers()
        self.change(phase=Phase.JOINING, average_id=NO_AVERAGE)
        self._push()
        self.alive = False
        if self._to_stage is not None:
            self.world.enter(self.name, self._to_stage)

    def start(self) -> None:
        self._announce_forever()
        self._tick_forever()

    def _next_incarnation(self) -> int:
        stored = self.world.disk.get(self.name, -1)
        seen = self.view.sightings[self.name].record.incarnation if self.name in self.view.sightings else -1
        self.world.disk[self.name] = max(stored, seen) + 1
        return self.world.disk[self.name]

    # the table

    def change(self, tell: bool = True, **fields: object) -> None:
        """Change my record: the version rises, my own view has it at once, others soon, or with the next one that I tell."""
        phase = fields.get("phase", self.record.phase)
        assert isinstance(phase, Phase)
        if phase is not self.record.phase:
            check_transition(self.record.phase, phase)
            if phase is not Phase.AVERAGED:
                fields |= {"gradient_norm": None, "tied_sum": NO_AVERAGE}
        self.record = replace(self.record, version=self.record.version + 1, **fields)  # type: ignore[arg-type]
        if self.kept.number != self.record.kept_averages:
            self.record = replace(self.record, kept_averages=self.kept.number)
        self.view.merge(self.record, self.now)
        self.poke()
        if tell and not self._push_pending and not self.fenced:
            self._push_pending = True
            self.world.at(PUSH_S, self, self._push)

    def _push(self) -> None:
        self._push_pending = False
        if self.fenced:
            return
        live = self.live()
        mates = [r.peer for r in live.records if r.stage == self.record.stage and r.peer != self.name]
        others = [r.peer for r in live.records if r.stage != self.record.stage]
        for peer in mates + self.world.rng.sample(others, min(2, len(others))):
            self.world.send(self, peer, lambda _peer: None)

    def _announce_forever(self) -> None:
        self._fence_if_late()
        self.world.at(PERIOD_S * self.world.rng.uniform(0.9, 1.1), self, self._announce_forever)
        self.world.at(self.world.rng.uniform(0.05, 1.0), self, self._read_directory)
        if self.fenced:
            return
        self._announced_at_s = self.now
        self.links.look()
        self.hearing.meet()
        self.change(suspects=tuple(s for s in self.record.suspects if self._still_suspect(s)), unreached=self.links.unreached)
        records = (self.lies.told(self.name), *self.lies.ghosts())
        self.world.at(self.world.rng.uniform(0.05, 0.5), None, lambda: self.world.directory.store(records, self.world.now))

    def _read_directory(self) -> None:
        self.hearing.receive(self.world.directory.records(self.world.now))

    def suspect(self, peer: PeerId) -> None:
        """It did not answer a re-dial."""
        sighting = self.view.sightings.get(peer)
        if sighting is not None and not self.fenced:
            mark = Suspicion(peer, *sighting.record.pair)
            self.world.counts["suspicions"] += 1
            self.change(suspects=(*(s for s in self.record.suspects if s.peer != peer), mark), unreached=self.links.unreached)

    def _still_suspect(self, suspicion: Suspicion) -> bool:
        sighting = self.view.sightings.get(suspicion.peer)
        return sighting is not None and sighting.record.pair <= (suspicion.incarnation, suspicion.version)

    def _fence_if_late(self) -> None:
        """T3 (fence)."""
        if self.now - self._announced_at_s > 0.8 * TTL_S and not self.fenced:
            self.fence("I slept")
            self.view.clear()
            self.fenced_until_s = self.now + FENCE_S
            self._announced_at_s = self.fenced_until_s

    def fence(self, reason: str) -> None:
        """A new incarnation: the ledger was a claim and goes; theta and a finished average are facts and stay."""
        self.world.counts["fences"] += 1
        self.world.note(f"{self.name} fences: {reason}")
        phase = Phase.ACCUMULATING if self.record.phase is Phase.AVERAGING else self.record.phase
        self.local.fence()
        self.rounds.drop()
        self.calls.drop()
        self.lost_since_s = None
        self.recovery.clocks.restart()
        self.links.forget()
        self.rounds.sidelining.forget()
        self.change(incarnation=self._next_incarnation(), phase=phase, suspects=(), unreached=(), sidelined=())

    # the step rules

    def poke(self) -> None:
        """Look again soon, for something changed."""
        if not self._poked:
            self._poked = True
            self.world.at(0.004, self, self._tick)

    def _tick_forever(self) -> None:
        self.world.at(TICK_S, self, self._tick_forever)
        self._tick()

    def _tick(self) -> None:
        self._poked = False
        self._fence_if_late()
        if self.fenced or self.downloading or self.rounds.is_opening:
            return
        self.rounds.look(self.live().members(self.record.stage, self.record.step))
        self.trust.look()
        self.deciding.act()
        self.calls.launch(self.live())
        if self.record.leaving and owes_nothing(self.record, self.live()):
            self._go()

    def situation(self) -> Situation:
        return Situation(own_state_of(self), self.live(), self.now, self.world.rules)

    def act(self, act: Act) -> None:
        off = self.world.scenario.off
        if isinstance(act, acts.Wait):
            return
        if not isinstance(act, acts.FetchAverage):
            self.world.note(f"{self.name} {act}")
        match act:
            case acts.Propose(roster=roster):
                self.rounds.propose(roster)
            case acts.Commit(norm=norm) if not self.lies.holds_back():
                self.commit(norm)
            case acts.FetchAverage(peer=peer, step=step) if "adopt" not in off and not self.fetching:
                self.averages.fetch(peer, step)
            case acts.FetchSection():
                self.rounds.sections.fetch(act)
            case acts.FetchTied() if not self.fetching:
                self.tied.fetch(act)
            case acts.CopyTied(peer=peer) if not self.fetching and "copy" not in off:
                self.tied.replace(peer)
            case acts.Reload():
                self.reload(act)
            case acts.FetchPrevious():
                self.recovery.fetch_previous(act)
            case acts.CloseRound(reason=reason) if self.rounds.current is not None or "close unnoted" not in off:
                self.rounds.close(reason)
            case acts.GiveUpAverage():
                self.world.counts["averages given up"] += 1
                self.rounds.end_giving()
                self.average = self.claim = self.tied.held = None
                self.change(phase=Phase.ACCUMULATING, average_id=NO_AVERAGE)
            case acts.DropSums(names=names) if "overlap reset" not in off:
                self.world.counts["resets"] += 1
                self.local.drop(names)
                self.change()
            case acts.SealBatch(name=name):
                self.local.seal(name)
                self.change()
            case acts.SkipStep():
                self.world.counts["inexact"] += 1
                self.tied.skip()
                self._next_step(self.world.thetas.skipped(self.theta), lineage_skipped(self.record.lineage, self.record.step), None)
            case acts.LoadCheckpoint(step=step):
                self.recovery.load(step)
            case acts.GiveUpState():
                self.recovery.proving.give_up()
            case acts.StepBack() if "step back" not in off:
                self.recovery.step_back()
            case acts.Serve():
                self.world.check_history(self)
                self.change(phase=Phase.ACCUMULATING, checkpoints=tuple(s for s in self.record.checkpoints if s <= self.record.step))

    def adopt(self, average_id: AverageId, average: Average, claim: Claim, norm: float | None = None, tied: Sum | None = None) -> None:
        """A finished average of my present step, from my round or from a mate; a joiner applies it with the mate's `norm` and sum."""
        self.rounds.drop()
        self.average, self.claim, self.tied.held = average, claim, tied
        if self.record.phase is Phase.JOINING:
            self.change(average_id=average_id)
            self.commit(norm)
        else:
            self.change(phase=Phase.AVERAGED, average_id=average_id)
            self.tied.tell()

    def commit(self, norm: float | None) -> None:
        assert self.average is not None
        assert self.claim is not None
        assert (norm is not None) == self.world.rules.shares_norms
        self.world.check_average(self, self.average)
        held = self.tied.held if self.tied.exists else None
        self.kept.add(Held(self.record.step, self.record.average_id, self.average, self.claim, self.record.lineage, held, norm))
        self.world.counts["commits"] += 1
        self.recovery.clocks.committed(self.now)
        rounding = (self.record.average_id if self.world.scenario.rounding else b"") + (repr(held.shares).encode() if held else b"")
        self.world.check_norm(self, norm)
        theta = self.world.thetas.after(self.theta, self.average, rounding, norm)
        self.tied.apply(norm)
        self._next_step(theta, lineage_after(self.record.lineage, self.record.average_id, norm, held.id if held else None), norm)
        self.world.checkpoint(self)

    def _next_step(self, theta: ThetaId, lineage: Lineage, norm: float | None) -> None:
        self.previous = None if "previous" in self.world.scenario.off else self.theta
        self.recovery.lacks_previous = False
        self.theta = theta
        self.average = self.claim = self.tied.held = None
        self.accumulator, self.next_accumulator = self.next_accumulator, []
        self.rounds.drop()
        self.rounds.attempt = 0
        self.rounds.begin_step()
        self.trust.begin_step()
        self.lost_since_s = None
        phase = Phase.JOINING if self.record.phase is Phase.JOINING else Phase.ACCUMULATING
        norms = self._norms_with(norm)
        self.record = at_next_step(self.record)
        self.change(phase=phase, average_id=NO_AVERAGE, lineage=lineage, norms=norms, voids=())
        self.recovery.proving.check_history()

    def _norms_with(self, norm: float | None) -> tuple[StepNorm, ...]:
        if norm is None or "norms told" in self.world.scenario.off:
            return self.record.norms
        return (*self.record.norms, StepNorm(self.record.step, norm))[-TOLD_STEPS:]

    def theta_at(self, step: int) -> ThetaId | None:
        """What a step of my stage is computed with; None where I hold no such parameters."""
        if self.record.phase is Phase.JOINING:
            return None
        late = self.world.thetas.late if self.world.scenario.delayed else lambda theta: theta
        if step == self.record.step + 1 and self.record.next_ledger_no:
            return self.theta
        if step == self.record.step or "ledger fence" in self.world.scenario.off:
            return self.local.version if self.local.is_on else late(self.theta)
        return late(self.previous) if step == self.record.step - 1 and self.previous is not None else None

    def drop_ledgers(self) -> None:
        """Of this step and of the next."""
        self.accumulator, self.next_accumulator = [], []
        self.record = both_dropped(self.record)
        self.local.begin()

    # state from a mate

    def reload(self, act: acts.Reload) -> None:
        """Become a joiner; a peer that has a state gives it up only once a donor has shown the header of one of use."""
        has_state = self.record.phase is not Phase.JOINING or self.record.step
        if has_state and "header first" not in self.world.scenario.off:
            self.recovery.find_donor(act, frozenset())
        else:
            self.become_joiner()

    def become_joiner(self) -> None:
        self.world.counts.update(("reloads", f"reloads of {self.name}"))
        self.drop_ledgers()
        self.average = None
        self.rounds.drop()
        self.change(phase=Phase.JOINING, average_id=NO_AVERAGE)
        self.recovery.download(frozenset())

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        self.world.at(delay_s, self, act)
