"""The trainer launches the missing microbatches that it owns. The missing set is its work queue."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain

import structlog

from peerd.background import INTERNAL_ERRORS, Tasks, keep
from peerd.config.manifest import Manifest
from peerd.errors import NotFiniteError, RemoteError
from peerd.policy.route.diverging import Diverging
from peerd.policy.route.launching import (
    Launch,
    Standstill,
    WayTime,
    Work,
    at_first,
    first_owned,
    launchable,
    on_the_way,
    share,
    what_launches_hang_on,
    window,
    with_banned,
)
from peerd.policy.step.diverged import DIVERGED_REMEDY
from peerd.policy.step.ledger import work_step
from peerd.policy.swarm.pace import KNOWN_AFTER_S, way_s
from peerd.swarm.clock import clock_s
from peerd.swarm.membership import Membership
from peerd.table.record import PeerId
from peerd.table.view import LiveView
from peerd.train.prefetch import Prefetcher
from peerd.train.samples import Microbatches
from peerd.wire.call_tracing import CallTracing
from peerd.wire.dispatch import Dispatcher
from peerd.wire.messages import Call

TAKEOVER_S = 2.0
"""Others' microbatches are taken over once nothing of the step has been done for this time, for as long as a step takes, and for twice
as long as this trainer's own have been under way, or as one takes by what peers say of themselves."""
FIRST_TAKEOVER_S = 12.0
"""The same while the time of a step is not known, and at least until peers can have said that a microbatch takes longer."""
STEP_TIME_SMOOTHING = 0.3
TICK_S, IDLE_TICK_S = 0.2, 1.0
"""Longest time between two looks: while microbatches are missing, which may become this trainer's to launch, and otherwise."""
SLEPT_S = 2.0
"""A task that wakes later than this was not delayed by load: the machine slept."""
FAILURE_PAUSE_S, BUG_PAUSE_S = 0.1, 5.0
MAX_SLOTS = 4096
"""Upper bound of the slots that a peer may announce."""
LOG = structlog.get_logger()
Seen = tuple[tuple[int, int], tuple[tuple[object, ...], ...]]


class Trainer:
    """Launches microbatches. It holds no parameters; every daemon that has the run's data runs one."""

    def __init__(
        self, manifest: Manifest, corpus: Microbatches, membership: Membership, dispatcher: Dispatcher, tracing: CallTracing | None = None
    ) -> None:
        self._manifest = manifest
        self._prepared = Prefetcher(corpus)
        self._prepared_step = -1
        self._membership = membership
        self._dispatcher = dispatcher
        self._slots = manifest.slots
        self._most_slots = 0
        """The smallest number of slots on the path of the last microbatch."""
        self._way = WayTime()
        self._tasks = Tasks()
        self._in_flight: dict[tuple[int, int], float] = {}
        """Since when each has been under way, longest first."""
        self._num_ended = 0
        self._begun = -1
        """The newest step that the first stage has reached, as its forwarding of this trainer's microbatches shows."""
        self._has_waiting = False
        """True if own microbatches wait for the window, which may open when any trainer's microbatch is done."""
        self._still = Standstill()
        self._launched: dict[tuple[int, int], int] = {}
        """Number of launches of each microbatch of this step and the last."""
        self._diverging = Diverging()
        self._told_diverged: int | None = None
        self._again: Counter[tuple[int, int]] = Counter()
        """Repeated launches by step and stage that are not in the log yet."""
        self._step = -1
        self._step_began_s = 0.0
        self._step_time_s = 0.0
        self._takeover_s = FIRST_TAKEOVER_S
        self.replayed = 0
        """Launches of a microbatch that this trainer had launched before."""
        self._tracing = tracing or CallTracing()
        self._stop_at: int | None = None
        """The first step of which nothing is launched, because this peer leaves."""

    @property
    def diverged_at(self) -> int | None:
        """The step that cannot be finished, because its values are not finite."""
        return self._diverging.step(self._still)

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    async def run(self) -> None:
        try:
            await keep(self._launch_forever)
        finally:
            await self._tasks.close()
            self._prepared.close()
            self._tell_again()

    async def _launch_forever(self) -> None:
        while True:
            seen = self._seen()  # read before the look, so that a change during it is noticed
            self._launch_missing()
            await self._rest(seen)

    async def _rest(self, seen: Seen) -> None:
        """Wait for news or until it is time to look. If this machine slept meanwhile, no other trainer was slow: clocks restart."""
        began_s, most_s = clock_s(), TICK_S if self._still.absent else IDLE_TICK_S
        until_s = began_s + most_s
        while await self._membership.changed(until_s - clock_s()):
            if self._has_waiting or seen != self._seen() or clock_s() >= until_s:
                break
        slept_s = clock_s() - began_s - most_s
        if slept_s > SLEPT_S:
            self._still = Standstill()
            self._step_began_s += slept_s

    def _seen(self) -> Seen:
        """The part of the state that can bring new launches. Growing ledgers, which are most of the news, do not count."""
        return (self._num_ended, self._begun), tuple(what_launches_hang_on(record) for record in self._membership.live().records)

    def stop_after_this_step(self) -> None:
        """Launch nothing beyond the current step. Its own microbatches are still launched: no other trainer would for a while."""
        live = self._membership.live()
        self._stop_at = (work_step(live, self._manifest.train.num_stages) or 0) + 1

    def resume(self) -> None:
        """Launch again: this peer stays after all."""
        self._stop_at = None

    @property
    def is_done(self) -> bool:
        """True if nothing is in flight and nothing is left to launch of the steps up to the last one here, or the run stands still."""
        live = self._membership.live()
        if work_step(live, self._manifest.train.num_stages) is None:
            return True
        now_s = clock_s()
        return not self._in_flight and next(self._waiting(self._work(live, now_s), now_s), None) is None

    def _work(self, live: LiveView, now_s: float) -> Work:
        train = self._manifest.train
        takeover_s = self._takeover_after_s(live, now_s)
        work = launchable(
            live,
            train.num_stages,
            train.microbatches_per_step,
            with_banned(self._still, live, self._membership.bans.left(), self._step),
            now_s,
            takeover_s,
            last_step=train.steps,
            overlaps=train.overlaps_steps,
        )
        if self._stop_at is None:
            return work
        return replace(work, steps=tuple(each for each in work.steps if each.step < self._stop_at))

    def _takeover_after_s(self, live: LiveView, now_s: float) -> float:
        train, period_s = self._manifest.train, self._manifest.swarm.announce_period_s
        oldest_s = now_s - next(iter(self._in_flight.values()), now_s)
        microbatch_s = way_s(live, train.num_stages, train.microbatch_size)
        unheard_s = 0.0 if self._step_time_s or microbatch_s else KNOWN_AFTER_S + 2 * period_s
        return max(self._takeover_s, unheard_s, 2 * oldest_s, 2 * microbatch_s, self._age_of_summaries_s(live))

    def _age_of_summaries_s(self, live: LiveView) -> float:
        """Largest age of the summaries of far stages: a microbatch that seems missing for less time may be there."""
        mine = live.mine
        periods = mine.periods - 1 if mine is not None else 0
        return 2 * periods * self._manifest.swarm.announce_period_s

    def _launch_missing(self) -> None:
        live, now_s, train = self._membership.live(), clock_s(), self._manifest.train
        work = self._work(live, now_s)
        self._still = work.still
        if work.still.absent and work.still.step not in (self._step, self._step - 1):  # a reopened step does not begin again
            self._begin(work.still.step, now_s)
        waiting = self._waiting(work, now_s)
        first = next(waiting, None)
        self._has_waiting = first is not None
        if first is None:
            self._prepare(live)
            return
        underway = on_the_way(live, train.num_stages, train.microbatch_size, self._way.least_s)
        total = window(live, train.num_stages, self._slots, underway, self._most_slots)
        if not train.overlaps_steps and self._begun < first.step:
            total = at_first(live, first.step, underway, total)
        allowed = share(total, work)
        for launch in chain((first,), waiting):
            if sum(step <= launch.step for step, _ in self._in_flight) >= allowed:  # launches of later steps do not count against it
                break
            self._in_flight[launch.step, launch.index] = now_s
            self._tasks.start(self._train(launch))

    def _waiting(self, work: Work, now_s: float) -> Iterator[Launch]:
        num_microbatches = self._manifest.train.microbatches_per_step
        for each in work.steps:
            underway = sum(1 << index for step, index in self._in_flight if step == each.step)
            yield from each.launches(but=underway | self._diverging.held_back(each.step, work.still, num_microbatches, now_s))

    def _prepare(self, live: LiveView) -> None:
        """Read the own microbatches of the next step ahead; those of this step are all under way."""
        train = self._manifest.train
        step = self._step + 1 + train.overlaps_steps
        if self._step >= 0 and self._prepared_step != step and not (train.steps and step >= train.steps):
            self._prepared_step = step
            self._prepared.read_ahead([(step, index) for index in first_owned(live, step, train.microbatches_per_step)])

    def _begin(self, step: int, now_s: float) -> None:
        """Begin a new work step. The duration of the last one, if this trainer saw its start, decides when an owner counts as slow."""
        if 0 <= self._step == step - 1:
            took_s = now_s - self._step_began_s
            self._step_time_s += STEP_TIME_SMOOTHING * (took_s - self._step_time_s) if self._step_time_s else took_s
            self._takeover_s = max(TAKEOVER_S, self._step_time_s)
        self._tell_again()
        self._step, self._step_began_s = step, now_s
        self._way.next_step()
        self._launched = {key: count for key, count in self._launched.items() if key[0] >= step - 1}
        self._diverging.begin(step)

    def _tell_again(self) -> None:
        """Log one line for each step and stage: when a peer dies, all that it held is launched again at once."""
        for (step, stage), count in sorted(self._again.items()):
            LOG.info("microbatches launched again", step=step, stage=stage, count=count)
        self._again.clear()

    async def _train(self, launch: Launch) -> None:
        key = (launch.step, launch.index)
        try:
            call = await self._call_for(launch)
            if call.attempt:
                self.replayed += 1
                self._again.update((launch.step, stage) for stage in launch.accumulate)
            self._launched[key] = call.attempt + 1
            with self._tracing.launched(call) as traced:
                began_s, path = clock_s(), dict[int, PeerId]()
                result = await self._dispatcher.send(traced, partial(self._note_hop, launch.step, path))
                self._diverging.succeeded(key)
                if self._manifest.train.num_stages - 1 in call.accumulate:  # otherwise the call may have ended at an earlier stage
                    self._way.note(path.get(call.stage, PeerId("")), clock_s() - began_s - max(result.held_s, 0.0))
                    self._most_slots = min(result.slots, MAX_SLOTS)
        except NotFiniteError as error:
            self._diverging.failed(key, clock_s())
            LOG.debug("microbatch not finite", step=launch.step, index=launch.index, error=error.message)
            if self.diverged_at not in (None, self._told_diverged):
                self._told_diverged = self.diverged_at
                LOG.error("diverged", step=launch.step, reason=error.message, remedy=DIVERGED_REMEDY)
        except RemoteError as error:
            LOG.debug("microbatch failed", step=launch.step, index=launch.index, error=str(error))
            await asyncio.sleep(FAILURE_PAUSE_S)
        except Exception as error:  # a bug, which the next try may meet again
            INTERNAL_ERRORS.report("trainer", error, step=launch.step, index=launch.index)
            await asyncio.sleep(BUG_PAUSE_S)
        finally:
            self._in_flight.pop(key, None)
            self._num_ended += 1
            self._membership.wake()

    def _note_hop(self, step: int, path: dict[int, PeerId], stage: int, peer: PeerId) -> None:
        """Called when a microbatch is forwarded to `stage`. Past the first stage, it shows that the first stage is at this step."""
        path[stage] = peer
        if stage > 0 and step > self._begun:
            self._begun = step
            self._membership.wake()

    async def _call_for(self, launch: Launch) -> Call:
        inputs, labels = await self._prepared.take(launch.step, launch.index)
        attempt = self._launched.get((launch.step, launch.index), 0)
        return Call(
            stage=0,
            step=launch.step,
            index=launch.index,
            accumulate=launch.accumulate,
            attempt=attempt,
            again=launch.again or attempt > 0,
            inputs=inputs,
            labels=labels,
        )
