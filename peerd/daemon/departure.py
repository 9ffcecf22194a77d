"""Leaves a stage: drains it, then leaves the swarm, rests, or moves to another stage."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import structlog

from peerd.background import start
from peerd.daemon.peer import Peer
from peerd.policy.step.leaving import has_successors, owes_nothing
from peerd.policy.swarm.pace import way_s
from peerd.table.record import Phase

STANDSTILL_S = 60.0
"""A drain is given up when the run has made no progress for this long, or for two step times or three microbatches if these are longer."""
DRAIN_LOOK_S = 1.0
"""Time between two checks of the run's progress."""
FAREWELL_S = 1.0
QUIET_S = 0.3
LOOK_S = 0.02
"""Longest time between two checks whether this peer may leave."""
QUIET_TRIES = 3
"""Number of tries to observe QUIET_S without a new step; short steps may prevent it."""
LOG = structlog.get_logger()


class Left(Exception):  # noqa: N818 - it is no error
    """Raised inside the TaskGroup to end the daemon."""

    news = "left"


class Moved(Exception):  # noqa: N818 - it is no error
    """Raised inside the TaskGroup to continue in another stage."""

    news = "moving"

    def __init__(self, stage: int) -> None:
        super().__init__(stage)
        self.stage = stage


class Paused(Exception):  # noqa: N818 - it is no error
    """Raised inside the TaskGroup to rest for a while."""

    news = "paused"


class Departure:
    """Leaves a stage or the swarm: after a drain, or at once when asked a second time."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._asked = asyncio.Event()
        self._at_once = asyncio.Event()
        self._gone = asyncio.Event()
        self._destination: int | None = None
        self._cannot_compute = False
        """A drain would wait in vain."""

    def ask(self) -> None:
        """Handle a signal: the first one drains, the second one leaves at once."""
        if self._destination is not None or self._peer.is_pausing:
            self._destination, self._peer.is_pausing = None, False  # already draining
        elif self._asked.is_set():
            self._at_once.set()
        else:
            LOG.info("leaving", how="finishing what is queued; once more leaves now")
        self._asked.set()

    def ask_now(self) -> None:
        self._at_once.set()
        self._asked.set()

    def ask_to_leave(self) -> None:
        """Drain and leave. Further requests change nothing."""
        self._destination, self._peer.is_pausing = None, False
        self._asked.set()

    async def leave(self, now: bool) -> None:
        """Leave for the control verb. Returns when the daemon is about to end."""
        self.ask_to_leave()
        if now:
            self._at_once.set()
        await self._gone.wait()

    def move(self, stage: int) -> None:
        """Leave this stage at a step boundary to serve another one."""
        if not self._asked.is_set():
            self._destination = stage
            self._asked.set()

    def pause(self) -> None:
        """Leave this stage at a step boundary and come back later."""
        if self._destination is not None or not self._asked.is_set():
            self._destination, self._peer.is_pausing = None, True
            self._asked.set()

    def give_up(self, stage: int | None) -> None:
        """Leave a stage for which this machine has no memory: for another one, or to rest until there is some."""
        self._cannot_compute = True
        if stage is not None and self._has_successors():
            self.move(stage)
        else:
            self.pause()

    async def of_resting(self) -> None:
        """Wait until a resting peer is told to leave."""
        await self._asked.wait()
        self._gone.set()

    async def of_stage(self) -> None:
        """Raise Left, Moved or Paused when this peer is to leave. A move that would leave the stage empty is called off."""
        while True:
            await self._asked.wait()
            drained = await self._leave_stage()
            asked = self._destination, self._peer.is_pausing
            if self._peer.is_pausing and not self._at_once.is_set():
                await self._keep_state()
                await self._say_farewell()
                self._peer.is_resting = True
                self._done(asked)
                raise Paused
            to_stage = None if self._at_once.is_set() else self._destination
            goes = to_stage is None or (drained and self._has_successors())
            if goes and drained:
                await self._say_farewell()
            if to_stage is None:
                self._gone.set()
                raise Left
            self._done(asked)
            if goes:
                raise Moved(to_stage)
            LOG.warning("the move is called off", reason="nobody else would serve this stage")
            self._stay()

    def _done(self, asked: tuple[int | None, bool]) -> None:
        """Clear the request, unless another one has come meanwhile, which is next."""
        if (self._destination, self._peer.is_pausing) == asked:
            self._destination, self._peer.is_pausing, self._cannot_compute = None, False, False
            self._asked.clear()

    async def _keep_state(self) -> None:
        """Write the state to disk, from which a stage that nobody else serves goes on."""
        if self._peer.seat.state.record.phase is Phase.JOINING or not self._peer.place.manifest.swarm.checkpoint_every_steps:
            return
        await self._peer.seat.keep_checkpoint()

    async def _say_farewell(self) -> None:
        """Tell all peers that this one leaves its stage, so that nobody proposes a round to it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                await self._peer.seat.stepper.retire()
                await self._peer.gossip.tell_everybody()

    def _stay(self) -> None:
        seat = self._peer.seat
        seat.leaving = seat.service.leaving = seat.trained_enough = False
        if seat.trainer is not None:
            seat.trainer.resume()
        seat.announce()

    async def _leave_stage(self) -> bool:
        """Drain. Returns False if that was cut short or the run stands still."""
        if self._cannot_compute:
            self._peer.seat.leaving = self._peer.seat.service.leaving = True
            return True
        drain = start(self._drain())
        at_once = asyncio.ensure_future(self._at_once.wait())
        seen, moved_s = self._progress(), time.monotonic()
        try:
            while time.monotonic() - moved_s < max(STANDSTILL_S, 2 * self._step_time_s(), 3 * self._microbatch_s()):
                done, _ = await asyncio.wait({drain, at_once}, timeout=DRAIN_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                if done:
                    return drain in done
                if (now := self._progress()) != seen:
                    seen, moved_s = now, time.monotonic()
            LOG.warning("leaving before the queue is empty", reason="the run stands still")
            return False
        finally:
            drain.cancel()
            at_once.cancel()

    def _progress(self) -> object:
        """Return values that change while the run makes progress: each peer's step, phase and ledger, and this peer's queue."""
        records = self._peer.membership.live().records
        return self._peer.seat.service.queue, tuple((record.peer, record.step, record.phase, record.done) for record in records)

    def _step_time_s(self) -> float:
        """Return the duration of the last step, or of the first one so far."""
        seat = self._peer.seat
        last_s = seat.commits.last_step_s
        return seat.served_s if last_s is None else last_s

    def _microbatch_s(self) -> float:
        """Return the computing time of a microbatch in all stages, by what their peers say: steps that were fetched take less."""
        train = self._peer.place.manifest.train
        return way_s(self._peer.membership.live(), train.num_stages, train.microbatch_size)

    async def _drain(self) -> None:
        """Take nothing new, finish the queue and take part in the average, so that no microbatch is replayed.

        A pause hands back what has not begun if others can do it, so that only what is under way is computed.
        """
        seat = self._peer.seat
        seat.service.handing_back = self._peer.is_pausing and self._has_successors()
        seat.leaving = True
        seat.announce()
        told_s = time.monotonic()
        trainer = seat.trainer
        if trainer is not None:
            trainer.stop_after_this_step()
            await self._until(lambda: trainer.is_done)
            seat.trained_enough = True
            seat.announce()
        await self._until(lambda: seat.service.queue == 0)
        await asyncio.sleep(max(0.0, told_s + QUIET_S - time.monotonic()))  # peers that have not heard of it may still send something
        await self._until(lambda: seat.service.queue == 0)
        seat.service.leaving = True
        for _ in range(QUIET_TRIES):
            await self._until(self._owes_nothing)
            step = seat.state.record.step
            await asyncio.sleep(QUIET_S)  # other peers have to see the new step of this stage's peers before they see this peer gone
            if self._owes_nothing() and seat.state.record.step == step:
                return
        await self._until(self._owes_nothing)

    async def _until(self, done: Any) -> None:
        while not done():
            await self._peer.membership.changed(LOOK_S)

    def _owes_nothing(self) -> bool:
        membership = self._peer.membership
        return not membership.is_quiet and owes_nothing(self._peer.seat.state.record, membership.live())

    def _has_successors(self) -> bool:
        return has_successors(self._peer.seat.state.record, self._peer.membership.live())
