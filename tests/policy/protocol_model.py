"""A seeded discrete-event model of the whole step protocol, driving the very functions that the daemon calls.

The world: virtual time, a network that delays, loses and cuts, a directory that answers late, peers that die, sleep,
come back and join (`model_faults`). A peer's table and step rules are in `model_peer`, calls and trainers in `model_calls`, rounds in
`model_rounds`, `model_exchange` and `model_judge`, downloads in `model_states`, deaths of many at once in `model_outages`, parameters as
symbols in `model_theta`.

Checked, by the invariants of docs/protocol.md:
  I1  every applied average of a step counts each microbatch once, computed with that step's parameters
  I2  peers of a stage at the same step and with equal lineage have the same history
  I3  no divergence persists
  I4  while an up-to-date peer of each stage survives, every step is finished in bounded time, and none stays inexact
  I5  where gradient norms are shared, every stage applies the same norm of a step (but for rounding)
  I6  where the first and the last stage hold copies of one weight, both apply the whole step to it, copies with one history
      are the same, and no difference persists
  I7  where averages are certified, no honest peer applies numbers that a peer made up (I1), and no honest peer is blamed for them
  I8  where steps are local, those that live know all that it takes to compute an applied average again
  I9  where peers audit, no honest peer loses its standing (I7), and a liar is out of every honest view within some steps
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from peerd.policy.step.situation import StepRules
from peerd.policy.step.tied import sum_told
from peerd.policy.swarm.choosing import Joiner, choose_stage
from peerd.table.record import AverageId, Lineage, PeerId, Phase
from tests.policy.model_directory import Directory
from tests.policy.model_exchange import Plan
from tests.policy.model_faults import LIES, OUTAGES, TAKES_AWAY, Fault, Kind, Scenario, Survivor
from tests.policy.model_local import why_not_replayed
from tests.policy.model_network import Network
from tests.policy.model_outages import Outages
from tests.policy.model_peer import AVERAGING_S, TTL_S, ModelPeer
from tests.policy.model_states import Snapshot
from tests.policy.model_theta import Average, ThetaId, Thetas, why_wrong
from tests.policy.model_tied import Share

DIVERGENCE_S = 30.0
HEARD_WITHIN_S = 1.5
CHECKPOINT_EVERY, CHECKPOINTS_KEPT = 3, 4
MOST_RELOADS = 200
"""More in one run means that somebody asks again and again without waiting."""

RULES_OFF = (
    *("overlap reset", "ledger fence", "adopt", "repeats renew", "roster content", "snapshot", "bit after gradient", "norms told"),
    *("sums told", "wait before lost", "close unnoted"),
)
"""What a scenario may switch off to be noticed within a few dozen random runs; other rules take a scripted one."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to. `stalled` says why it did not finish in time, with every peer's state."""

    violations: tuple[str, ...]
    stalled: str
    counts: Counter[str]
    ended_at_s: float

    @property
    def problems(self) -> tuple[str, ...]:
        return self.violations + ((self.stalled,) if self.stalled else ())


class World:
    """Virtual time and everything that is not inside a peer."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.rng = random.Random(scenario.seed)
        self.now = 0.0
        self.thetas = Thetas()
        self.peers: dict[PeerId, ModelPeer] = {}
        self.directory = Directory()
        self.disk: dict[PeerId, int] = {}
        self.plans: dict[AverageId, Plan] = {}
        """What each roster says of its exchange."""
        self.logs: dict[AverageId, set[ThetaId]] = {}
        """By round: what its members know of local steps."""
        self.signed: set[tuple[PeerId, AverageId, bytes]] = set()
        """Which hashes of slices of which round a peer has signed: nobody else can."""
        self.falsified: set[tuple[PeerId, int, int]] = set()
        """Microbatches (peer, step, index) whose gradients a liar made up."""
        self.checkpoints: dict[PeerId, list[Snapshot]] = {}
        self.banned: set[PeerId] = set()
        """Those on the organiser's list. A peer that starts has the list."""
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []
        self.trace: list[str] = []
        self.rules = StepRules(
            num_stages=scenario.num_stages,
            num_microbatches=scenario.num_microbatches,
            ttl_s=TTL_S,
            averaging_s=AVERAGING_S,
            last_step=scenario.last_step,
            shares_norms=scenario.shares_norms,
            ties_stages=scenario.ties_stages and scenario.num_stages > 1,
            group_size=scenario.group_size,
            num_sections=scenario.num_sections,
            local_batch=scenario.local_batch,
            local_after=scenario.local_after,
            certifies=scenario.certifies,
        )
        self._events: list[tuple[float, int, ModelPeer | None, Callable[[], None]]] = []
        self._sequence = 0
        self.network = Network(self)
        self.send, self.stream = self.network.send, self.network.stream
        self._histories: dict[tuple[int, int, Lineage], ThetaId] = {}
        self._norms: dict[int, float] = {}
        self._copies: dict[tuple[int, Lineage], ThetaId] = {}
        self._diverged: dict[tuple[PeerId, PeerId], float] = {}
        self.outages = Outages(self)
        for number in range(scenario.num_stages * scenario.peers_per_stage):
            self.add(f"p{number}", number % scenario.num_stages).begin()
        for fault in scenario.faults:
            self.at(fault.at_s, None, lambda fault=fault: self.strike(fault))  # type: ignore[misc]

    # time and messages

    def at(self, delay_s: float, peer: ModelPeer | None, act: Callable[[], None]) -> None:
        """Run `act` after a delay, unless its peer is dead by then; a sleeping peer runs it when it wakes."""
        self._sequence += 1
        heapq.heappush(self._events, (self.now + delay_s, self._sequence, peer, act))

    # the run

    def run(self, until: Callable[[], bool] = lambda: False) -> Outcome:
        """Until the run has ended, or something scripted is true."""
        next_check = self.now
        while not until() and self._events and self.now < self.scenario.limit_s and not self.violations:
            time, _, peer, act = heapq.heappop(self._events)
            self.now = max(self.now, time)
            if peer is not None and (not peer.alive or self.now < peer.awake_at):
                if peer.alive:
                    self.at(peer.awake_at - self.now + self.rng.uniform(0, 0.2), peer, act)
                continue
            act()
            if self.now >= next_check:
                next_check = self.now + 0.5
                self._check_divergence()
                if self._finished():
                    break
        stalled = "" if self.violations or self._finished() else f"stalled at {self.now:.0f} s: {self.describe()}"
        stays = any(peer.record.lineage.inexact for peer in self.peers.values() if peer.alive and not peer.lies.are_of_numbers)
        if self.scenario.survivor is Survivor.UP_TO_DATE and stays and not self.violations:
            self.violations.append("I4: a step was given up as inexact although an up-to-date peer survived")
        return Outcome(tuple(self.violations), stalled, self.counts, self.now)

    def describe(self) -> str:
        return "; ".join(self._described(peer) for peer in self.peers.values() if peer.alive)

    def _described(self, peer: ModelPeer) -> str:
        r = peer.record
        asleep = " asleep" if self.now < peer.awake_at else ""
        return (
            f"{peer.name}: stage {r.stage} step {r.step} {r.phase.name} done {r.done:b} inc {r.incarnation}"
            f" lineage {r.lineage.inexact}/{r.lineage.chain.hex()[:4]}{asleep}{' leaving' if r.leaving else ''}"
        )

    def note(self, text: str) -> None:
        self.trace.append(f"{self.now:8.3f} {text}")

    def takes_part(self, peer: ModelPeer) -> bool:
        return peer.alive and peer.name not in self.banned

    def _finished(self) -> bool:
        present = [peer for peer in self.peers.values() if self.takes_part(peer) and not peer.lies.are_of_numbers]
        stages = {peer.record.stage for peer in present}
        return len(stages) == self.scenario.num_stages and all(
            peer.record.step >= self.scenario.last_step
            and peer.record.phase is Phase.ACCUMULATING
            and all(m.record.lineage == peer.record.lineage for m in present if m.record.stage == peer.record.stage)
            and all(m.tied.copy == peer.tied.copy for m in present if m.tied.exists and peer.tied.exists)
            for peer in present
        )

    # invariants

    def check_average(self, peer: ModelPeer, average: Average) -> None:
        if peer.lies.are_of_numbers or peer.recovery.proving.is_open:
            return
        wrong = why_wrong(
            average,
            stage=peer.record.stage,
            theta=peer.theta,
            num_microbatches=self.scenario.num_microbatches,
            thetas=self.thetas,
            delayed=self.scenario.delayed,
        )
        if wrong is not None:
            self.violations.append(f"I1 at {peer.name} of stage {peer.record.stage}: {wrong}")
        lost = why_not_replayed(self, average) if self.rules.batch_at(peer.record.step) else None
        if lost is not None:
            self.violations.append(f"I8 at {peer.name} of stage {peer.record.stage}: {lost}")

    def blames(self, name: PeerId, how: str) -> None:
        """Somebody holds a lie against this peer. No honest peer is ever blamed."""
        self.counts.update((how, f"{how} of {name}"))
        if name not in self.peers or not self.peers[name].lies.has_lied:
            self.violations.append(f"I7: {name}, which is honest, is {how}")

    def check_norm(self, peer: ModelPeer, norm: float | None) -> None:
        """Averages that differ in rounding, or a step given up, excuse two stages that applied different norms."""
        if norm is None or self.scenario.rounding or self.counts["inexact"]:
            return
        if self._norms.setdefault(peer.record.step, norm) != norm:
            self.violations.append(f"I5 at {peer.name}: another gradient norm of step {peer.record.step} than somebody applied")

    def resumes_at(self, step: int) -> None:
        """Steps that the whole run does again have other averages, and so other histories of a tied weight and other norms."""
        self.counts["resumed"] += 1
        if all(peer.record.step <= step for peer in self.peers.values() if peer.alive):
            self._norms = {known: norm for known, norm in self._norms.items() if known < step}

    def check_shares(self, peer: ModelPeer, shares: Sequence[Share]) -> None:
        """Both stages', each with every microbatch of the step once."""
        whole = [(peer.record.step, index) for index in range(self.scenario.num_microbatches)]
        if len(shares) != 2 or any([(g.step, g.index) for g in average] != whole for average, _ in shares):
            self.violations.append(f"I6 at {peer.name}: the tied weight's gradients of step {peer.record.step} are not those of the step")

    def check_history(self, peer: ModelPeer) -> None:
        record = peer.record
        if self.thetas.step_of(peer.theta) != record.step:
            self.violations.append(f"I2: {peer.name} says step {record.step} and has another")
        known = self._histories.setdefault((record.stage, record.step, record.lineage), peer.theta)
        if known != peer.theta:
            self.violations.append(f"I2: two histories of stage {record.stage} at step {record.step} have one lineage")
        if peer.tied.exists and self._copies.setdefault((record.step, record.tied), peer.tied.copy) != peer.tied.copy:
            self.violations.append(f"I6: two copies of the tied weight at step {record.step} have one history")

    def _check_divergence(self) -> None:
        honest = [p for p in self.peers.values() if self.takes_part(p) and not p.lies.are_of_numbers]
        awake = [p for p in honest if self.now >= p.awake_at and p.record.phase is not Phase.JOINING]
        diverged = {}
        for one in awake:
            for other in awake:
                mine, theirs = one.record, other.record
                if mine.stage == theirs.stage:
                    unlike = mine.lineage != theirs.lineage
                else:
                    unlike = one.tied.exists and other.tied.exists and mine.tied != theirs.tied
                if one.name < other.name and mine.step == theirs.step and unlike:
                    diverged[one.name, other.name] = self._diverged.get((one.name, other.name), self.now)
        self._diverged = diverged
        if self.counts["reloads"] > MOST_RELOADS:
            self.violations.append(f"I4: {self.counts['reloads']} downloads in one run")
        if any(self.now - since > DIVERGENCE_S for since in diverged.values()):
            self.violations.append(f"I3: {sorted(diverged)} differ for more than {DIVERGENCE_S:.0f} s")

    # faults

    def strike(self, fault: Fault) -> None:
        present = sorted((p for p in self.peers.values() if p.alive), key=lambda p: p.name)
        if not present:
            return
        target = present[int(fault.target * len(present)) % len(present)]
        other = present[int(fault.other * len(present)) % len(present)]
        if fault.name:
            named = self.peers.get(PeerId(fault.name))
            if named is None or not named.alive:
                return
            target = named
        if fault.kind in TAKES_AWAY and not self._survives_without(target, is_scripted=bool(fault.name)):
            return
        if fault.kind in TAKES_AWAY | OUTAGES and self.outages.is_one_alone(self.now):
            return
        self.counts["faults"] += 1
        self.note(f"FAULT {fault.kind.value} {target.name} {other.name} {fault.lasts_s}")
        self._apply(fault, target, other)

    def _apply(self, fault: Fault, target: ModelPeer, other: ModelPeer) -> None:
        match fault.kind:
            case Kind.KILL:
                target.alive = False
            case Kind.RESTART | Kind.RESTART_BLANK:
                target.alive = False
                if fault.kind is Kind.RESTART_BLANK:
                    self.disk.pop(target.name, None)
                self.at(fault.lasts_s, None, lambda: self._start(target.name))
            case Kind.BAN:
                self._ban(target.name, fault.lasts_s)
            case Kind.SLEEP:
                target.awake_at = max(target.awake_at, self.now + fault.lasts_s)
            case Kind.JOIN:
                self._start(PeerId(f"p{len(self.peers)}"))
            case Kind.LEAVE:
                target.leave()
            case Kind.MIGRATE:
                target.leave(to_stage=int(fault.other * self.scenario.num_stages))
            case Kind.BLACKOUT:
                self.outages.black_out(fault.lasts_s)
            case Kind.STAGE_WIPED:
                self.outages.wipe(target.record.stage, fault.lasts_s)
            case Kind.STALE_MATES:
                self.outages.pause_before_stale_mates(target, fault.lasts_s)
            case Kind.OVERFLOW:
                target.overflows_until = self.now + fault.lasts_s
            case Kind.SUSPECT:
                if target is not other and self.now >= target.awake_at:
                    target.suspect(other.name)
            case Kind.LOSS:
                self.network.lossy_until = max(self.network.lossy_until, self.now + fault.lasts_s)
            case Kind.CUT | Kind.ONE_WAY:
                ways = [(target.name, other.name), (other.name, target.name)]
                self.network.cuts |= dict.fromkeys(ways[:1] if fault.kind is Kind.ONE_WAY else ways, self.now + fault.lasts_s)
            case Kind.NO_CALLS:
                self.network.deaf[target.name, other.name] = self.now + fault.lasts_s
            case kind if kind in LIES:
                target.lies.tell(fault.kind, fault.lasts_s)
            case Kind.CANCELLED:
                target.cancelled_until = self.now + fault.lasts_s
            case Kind.DRIP:
                target.drip(self.now + fault.lasts_s)
            case Kind.THIN:
                target.thin_until = self.now + fault.lasts_s
            case Kind.SLOW:
                target.slow_until = self.now + fault.lasts_s

    def _survives_without(self, target: ModelPeer, is_scripted: bool) -> bool:
        """Whether another peer of its stage survives as the scenario demands, and another trainer too."""
        alive = [p for p in self.peers.values() if self.takes_part(p) and not p.record.leaving]
        rest = [p for p in alive if p is not target]
        stages = {p.record.stage for p in rest if p.record.phase is not Phase.JOINING}
        if len(stages) < self.scenario.num_stages and not self.outages.can_resume({p.name: p.record.stage for p in rest}):
            return False  # a stage is yet to come back, and needs what is on the disks
        mates = [p for p in rest if p.record.stage == target.record.stage and p.record.phase is not Phase.JOINING]
        if not is_scripted and any(p.record.step for p in alive):
            mates = [p for p in mates if p.record.step]  # the first weights alone are no state of a run that has begun
        if self.scenario.survivor is Survivor.UP_TO_DATE:
            newest = max((p.record.step for p in self.peers.values() if p.alive and p.record.stage == target.record.stage), default=0)
            mates = [p for p in mates if self.now >= p.awake_at and p.record.step >= newest]
            if self.scenario.ties_stages:  # one that loaded its state cannot help the other end with the step before: gap 4
                mates = [p for p in mates if newest == 0 or sum_told(p.record, newest - 1) is not None]
        return bool(mates) and any(p.record.trains for p in rest)

    def _ban(self, name: PeerId, unheard_s: float) -> None:
        """T9 (access): each drops the peer when it hears of the ban, at another time than the others."""
        self.banned.add(name)
        for peer in self.peers.values():
            if peer.name != name:
                self.at(self.rng.uniform(0.0, HEARD_WITHIN_S), peer, lambda peer=peer: peer.hearing.shut_out(name))  # type: ignore[misc]
        self.at(unheard_s, None, lambda: setattr(self.peers[name], "alive", False))

    def checkpoint(self, peer: ModelPeer) -> None:
        if peer.record.step % CHECKPOINT_EVERY == 0 and peer.record.phase is not Phase.JOINING:
            self.save(peer)
            peer.change(tell=False, checkpoints=peer.recovery.on_disk(peer.record.stage))

    def save(self, peer: ModelPeer) -> None:
        """Put a peer's state on its disk."""
        record = peer.record
        kept = [found for found in self.checkpoints.get(peer.name, []) if found.stage == record.stage and found.step < record.step]
        self.checkpoints[peer.name] = [*kept, peer.states.now()][-CHECKPOINTS_KEPT:]

    def wake(self, name: PeerId) -> None:
        """End a peer's sleep before its time: what it had put off until then comes now."""
        sleeper = self.peers[name]
        sleeper.awake_at = self.now
        self._events = [(self.now if peer is sleeper else at_s, number, peer, act) for at_s, number, peer, act in self._events]
        heapq.heapify(self._events)

    def enter(self, name: PeerId, stage: int) -> None:
        """A mover goes on in another stage, with what it knew."""
        if name in self.banned:
            return
        before = self.peers[name]
        peer = self.add(name, stage)
        for other in before.view.sightings:
            peer.hearing.receive([before.hearing.heard(other)] if other != name else [], other if before.view.is_proven(other) else None)
        peer.join(stage)
        self.counts["joins"] += 1

    def _start(self, name: PeerId) -> None:
        """A peer joins by the address of somebody who is there, and takes the weakest stage."""
        hosts = [p for p in self.peers.values() if self.takes_part(p) and self.now >= p.awake_at]
        if not hosts or name in self.banned or (name in self.peers and self.peers[name].alive):
            return
        joiner = self.add(name, 0)
        host = self.rng.choice(hosts)
        joiner.hearing.receive(self.directory.records(self.now) + host.hearing.recent_records(name, limit=99), host.name)
        live = joiner.live()
        stage = choose_stage(live, Joiner(lacking=[""] * self.scenario.num_stages)).stage
        assert stage is not None
        joiner.join(stage)
        self.counts["joins"] += 1

    def add(self, name: str, stage: int) -> ModelPeer:
        peer = ModelPeer(self, PeerId(name), stage)
        self.peers[peer.name] = peer
        return peer


def run(scenario: Scenario) -> Outcome:
    return World(scenario).run()
