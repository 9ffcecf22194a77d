"""Calls along the pipeline, and the trainers that launch them, in the protocol model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from peerd.policy.route.admission import able_to_compute, newest_taken, slots_for, why_refuse_call, why_refuse_caller
from peerd.policy.route.diverging import Diverging
from peerd.policy.route.launching import Launch, Standstill, launchable, share, window
from peerd.policy.route.launching import Work as Missing
from peerd.policy.route.wiring import Router, point_of
from peerd.policy.step.asides import merged, other_holder, to_merge
from peerd.policy.step.ledger import ledger_of, marked, may_accumulate, number_of
from peerd.table.record import PeerId, PeerRecord
from peerd.table.view import LiveView
from tests.policy.model_theta import Gradient, ThetaId

if TYPE_CHECKING:
    from tests.policy.model_peer import ModelPeer

SLOTS = 4
HOP_S = 1.2
TRIES = 4
HOLD_OFF_S = 0.5
MOST_EARLY_S = 2.0
OVERFLOWED = "not finite"

Path = tuple[ThetaId, ...]
"""The parameters that a microbatch has met, by stage."""


@dataclass(frozen=True, slots=True)
class Work:
    launch: Launch
    path: Path
    """Met so far: by its length also the stage that is called."""
    attempt: int = 0
    """How many times its trainer has launched it before."""
    again: bool = False


@dataclass(eq=False, slots=True)
class Accepted:
    """A call that holds one of my slots."""

    work: Work
    mark: tuple[int, int]
    answer: Callable[[Path | str], None]
    cancelled: bool = False


class Calls:
    """What a peer computes for others, and what it sends on."""

    def __init__(self, peer: ModelPeer) -> None:
        self._peer = peer
        self._routers: dict[int, Router] = {}
        self._slots: list[Accepted] = []
        self._busy_until = 0.0
        self._still = Standstill()
        self._launched: Counter[tuple[int, int]] = Counter()
        self._in_flight: dict[tuple[int, int], float] = {}
        """Until when not to launch again: infinity while under way."""
        self._diverging = Diverging()
        self._found: tuple[int, Missing] | None = None
        """What was found to launch the last time, and after which news. None: how long it stands still has changed by that."""

    def drop(self) -> None:
        for call in self._slots:
            call.cancelled = True
        self._slots = []
        self._still, self._found = Standstill(), None

    # the trainer

    def launch(self, live: LiveView) -> None:
        peer, scenario = self._peer, self._peer.world.scenario
        if peer.lies.injects:
            self._inject()
        if not peer.record.trains or peer.record.leaving or peer.lies.withholds:
            return
        sizes = (scenario.num_stages, scenario.num_microbatches)
        before, is_late = self._still, self._still.absent and self._still.is_over(peer.now, scenario.takeover_s)
        if self._found is not None and self._found[0] == peer.view.news and not is_late:
            work = self._found[1]
        else:
            work = launchable(live, *sizes, before, peer.now, scenario.takeover_s, scenario.last_step, scenario.delayed)
        self._still = work.still if "remember the late" not in scenario.off else replace(work.still, late=())
        if "few" in scenario.off:
            self._still = replace(self._still, few_since_s=None)
        self._found = (peer.view.news, work) if self._still == before else None
        self._in_flight = {key: until for key, until in self._in_flight.items() if until > peer.now}
        self._diverging.begin(peer.record.step)
        if not work.steps or (peer.lies.dribbles and peer.now - self._still.since_s < 0.5 * scenario.takeover_s):
            return
        allowed = 1 if peer.lies.dribbles else share(window(live, scenario.num_stages, SLOTS), work)
        held_back = {each.step: self._diverging.held_back(each.step, work.still, sizes[1], peer.now) for each in work.steps}
        for launch in (launch for each in work.steps for launch in each.launches(but=held_back[each.step])):
            if (launch.step, launch.index) in self._in_flight:
                continue
            if sum(until == float("inf") and step <= launch.step for (step, _), until in self._in_flight.items()) >= allowed:
                break
            self._start(launch)

    def _start(self, launch: Launch) -> None:
        peer, key = self._peer, (launch.step, launch.index)
        self._in_flight[key] = float("inf")
        peer.world.counts["launches"] += 1

        def ended(path: Path | str) -> None:
            self._in_flight[key] = peer.now + HOLD_OFF_S
            if path == OVERFLOWED:
                peer.world.counts["not finite"] += 1
                self._diverging.failed(key, peer.now)
            elif not isinstance(path, str):
                self._diverging.succeeded(key)

        attempt = self._launched[key]
        Attempt(peer, self, Work(launch, (), attempt, launch.again or attempt > 0), ended).go()
        self._launched[key] += 1

    def _inject(self) -> None:
        """Send a microbatch of the present step, made up, on to a mate."""
        peer, thetas, stage = self._peer, self._peer.world.thetas, self._peer.record.stage
        before = [next((p.theta for p in peer.world.peers.values() if p.record.stage == each), None) for each in range(stage)]
        path = tuple(thetas.made_up(theta) for theta in before if theta is not None)
        if not path or len(path) < stage:
            return
        index = peer.world.counts["made up"] % peer.world.scenario.num_microbatches
        launch = Launch(peer.record.step, index, frozenset(range(peer.world.scenario.num_stages)))
        peer.world.counts["made up"] += 1
        Attempt(peer, self, Work(launch, path), lambda _outcome: None).go()

    # the callee

    def take(self, work: Work, caller: PeerId, answer: Callable[[Path | str], None]) -> Accepted | None:
        peer, mine, launch, stage = self._peer, self._peer.record, work.launch, len(work.path)
        refusal = why_refuse_call(mine, stage=stage, step=launch.step, holds_previous=peer.previous is not None)
        if "callers" not in peer.world.scenario.off:
            seen = peer.view.sightings.get(caller)
            refusal = refusal or why_refuse_caller(seen.record if seen is not None else None, peer.live(), stage)
        if refusal or peer.fenced or peer.downloading:
            answer("refused")
            return None
        if len(self._slots) >= slots_for(launch.step - mine.step, SLOTS):
            answer("busy")
            return None
        call = Accepted(work, (mine.incarnation, number_of(mine, launch.step)), answer)
        self._slots.append(call)
        if "bit after gradient" in peer.world.scenario.off and self._may_add(call) is None:
            peer.change(done=mine.done | 1 << launch.index)
        if ledger_of(mine) < launch.step:
            peer.world.counts["came early"] += 1
            self._wait_for_step(call, peer.now + MOST_EARLY_S)
        else:
            self._compute(1.0, lambda: self._forwarded(call))
        return call

    def _wait_for_step(self, call: Accepted, until: float) -> None:
        """It came while I held the average that leads to its step."""
        peer, mine, step = self._peer, self._peer.record, call.work.launch.step
        if call not in self._slots:
            self._end(call, "too late")
        elif ledger_of(mine) >= step:
            call.mark = (mine.incarnation, number_of(mine, step))
            self._compute(1.0, lambda: self._forwarded(call))
        elif newest_taken(mine) < step or peer.now > until:
            peer.world.counts["came too early"] += 1
            self._end(call, "still at the step before")
        else:
            peer.after(0.02, lambda: self._wait_for_step(call, until))

    def _forwarded(self, call: Accepted) -> None:
        peer = self._peer
        theta = peer.theta_at(call.work.launch.step)
        if theta is None or call not in self._slots:
            self._end(call, "too late")
            return
        if peer.world.now < peer.overflows_until:
            self._end(call, OVERFLOWED)
            return
        path = (*call.work.path, theta)
        if len(path) == peer.world.scenario.num_stages:
            self._compute(1.5, lambda: self._backward(call, path))
            return

        def answered(whole: Path | str) -> None:
            if isinstance(whole, str):
                self._end(call, whole)
            elif any(stage <= peer.record.stage for stage in call.work.launch.accumulate):
                self._compute(1.5, lambda: self._backward(call, whole))
            else:
                self._end(call, whole)

        Attempt(peer, self, replace(call.work, path=path), answered).go()

    def _backward(self, call: Accepted, whole: Path) -> None:
        """The critical section: add, then set the bit, then announce."""
        peer, launch = self._peer, call.work.launch
        present, used = peer.theta_at(launch.step), whole[peer.record.stage]
        # Versions of this peer's own are kept while a microbatch is on its way.
        is_kept = present is not None and peer.world.thetas.base_of(present) == peer.world.thetas.base_of(used)
        if not is_kept or call not in self._slots:
            self._end(call, "too late")
            return
        if peer.world.now < peer.overflows_until:
            self._end(call, OVERFLOWED)  # the stages after this one have added it
            return
        refusal = self._may_add(call)
        if "bit after gradient" in peer.world.scenario.off and peer.record.done >> launch.index & 1:
            refusal = None if call.mark == (peer.record.incarnation, peer.record.ledger_no) else refusal
        if refusal is None:
            self._add(call.work, whole)
            peer.lost_since_s = None
            peer.world.counts["added"] += 1
        elif refusal.startswith("already"):
            peer.world.counts["duplicates not added"] += 1
        self._end(call, whole)

    def _may_add(self, call: Accepted) -> str | None:
        peer, launch = self._peer, call.work.launch
        if call.cancelled or peer.record.stage not in launch.accumulate:
            return "not asked to"
        step, mark = launch.step, call.mark
        if "ledger fence" in peer.world.scenario.off:
            step, mark = peer.record.step, (peer.record.incarnation, peer.record.ledger_no)
        return may_accumulate(peer.record, peer.live(), step=step, index=launch.index, accept_mark=mark)

    def _add(self, work: Work, whole: Path) -> None:
        peer, launch = self._peer, work.launch
        other = other_holder(peer.record, peer.live(), step=launch.step, index=launch.index, again=work.again)
        if peer.local.is_on:
            other = peer.local.batch()
        if "asides" in peer.world.scenario.off:
            other = None
        spare = to_merge(peer.record, launch.step, other) if other is not None and not peer.local.is_on else None
        if spare is not None:
            peer.record = merged(peer.record, launch.step, spare)
        if peer.lies.falsifies:
            peer.world.falsified.add((peer.name, launch.step, launch.index))
        early = launch.step == peer.record.step + 1
        (peer.next_accumulator if early else peer.accumulator).append(Gradient(launch.step, launch.index, whole))
        peer.world.counts["added early"] += early
        peer.world.counts["added aside"] += other is not None
        peer.record = marked(peer.record, launch.step, launch.index, other)
        peer.change()

    def _end(self, call: Accepted, outcome: Path | str) -> None:
        if call in self._slots:
            self._slots.remove(call)
        call.answer(outcome)

    def _compute(self, share: float, act: Callable[[], None]) -> None:
        peer = self._peer
        slow = 10.0 if peer.world.now < peer.slow_until else 1.0
        self._busy_until = max(self._busy_until, peer.world.now) + share * slow * peer.forward_s
        peer.after(self._busy_until - peer.world.now, act)

    def router(self, stage: int) -> Router:
        return self._routers.setdefault(stage, Router())


class Attempt:
    """A caller's side of one call: tries peer after peer of the stage, cancels before it tries elsewhere."""

    def __init__(self, peer: ModelPeer, calls: Calls, work: Work, answered: Callable[[Path | str], None]) -> None:
        self._peer = peer
        self._router = calls.router(len(work.path))
        self._work = work
        self._answered = answered
        downstream = peer.world.scenario.num_stages - len(work.path)
        self._hop_s = HOP_S * downstream
        self._deadline_s = peer.now + TRIES * self._hop_s
        self._unknown_to = set[PeerId]()
        """Those that have refused it: the next call brings this peer's record."""
        self._number = 0

    def go(self) -> None:
        peer = self._peer
        self._number += 1
        number = self._number
        if peer.now > self._deadline_s:
            self._answered("nobody answers")
            return
        point = point_of(self._work.launch.index, peer.world.scenario.num_microbatches, self._work.attempt + number - 1)
        chosen = self._router.choose(
            able_to_compute(peer.live(), len(self._work.path), self._work.launch.step), point, step=self._work.launch.step
        )
        if chosen is None:
            peer.after(peer.world.rng.uniform(0.1, 0.3), lambda: self._again(number))
            return
        accepted: list[Accepted] = []
        began, log = peer.now, frozenset(peer.local.log)

        def arrive(callee: ModelPeer) -> None:
            callee.local.learn(log)

            def answer(outcome: Path | str) -> None:
                known = frozenset(callee.local.log)

                def arrived(caller: ModelPeer) -> None:
                    if caller is peer:
                        peer.local.learn(known)
                        self._settle(number, chosen, outcome, began)

                callee.world.send(callee, peer.name, arrived, reply=True)

            if chosen.peer in self._unknown_to:
                callee.hearing.receive((peer.lies.told(callee.name),), peer.name)
            taken = callee.calls.take(self._work, peer.name, answer)
            if taken is not None:
                accepted.append(taken)

        peer.world.send(peer, chosen.peer, arrive, lambda: self._settle(number, chosen, "unreachable", began))
        peer.after(self._hop_s, lambda: self._time_out(number, chosen, accepted))

    def _settle(self, number: int, chosen: PeerRecord, outcome: Path | str, began: float) -> None:
        if number != self._number:
            return
        peer = self._peer
        if outcome == OVERFLOWED or not isinstance(outcome, str):
            self._number += 1
            self._router.observe(chosen.peer, peer.now - began)
            self._answered(outcome)
            return
        if outcome == "unreachable":
            self._router.ban(chosen)
            peer.suspect(chosen.peer)
        if outcome == "refused":
            self._unknown_to.add(chosen.peer)
            if peer.name in peer.live().sidelined(len(self._work.path) - 1):
                self._number += 1
                self._answered("left out")
                return
        if outcome not in ("refused", "busy", "unreachable"):
            self._work = replace(self._work, again=True)
        peer.after(peer.world.rng.uniform(0.02, 0.1), lambda: self._again(number))

    def _time_out(self, number: int, chosen: PeerRecord, accepted: list[Accepted]) -> None:
        if number != self._number:
            return

        def cancel(_callee: ModelPeer) -> None:
            for call in accepted:
                call.cancelled = True

        peer = self._peer
        peer.world.counts["timeouts"] += 1
        self._work = replace(self._work, again=True)
        self._router.ban(chosen)
        peer.world.send(peer, chosen.peer, cancel)
        self._again(number)

    def _again(self, number: int) -> None:
        if number == self._number:
            self.go()
