"""The evaluator: the loss on the evaluation data, computed by the swarm itself with the parameters of an exact step.

Each stage keeps the parameters of an evaluated step until the next evaluation. So training never waits, and a failed microbatch
is retried for as long as it takes. If no peer of a stage holds the parameters any more (they have left, or the next evaluation is
due), or the loss is not finite, the evaluation is given up: there may be no value, but never a wrong one. Where peers may lie, it is also
given up if the ways that a microbatch takes through different peers do not have the same loss.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping

import structlog

from peerd.config.manifest import Manifest
from peerd.errors import BlamelessError, RemoteError, WrongStateError
from peerd.policy.route.evaluating import (
    LOSSES_APART,
    ROUNDED_LOSSES_APART,
    Takeover,
    Way,
    agreed_evaluation,
    agreed_loss,
    due_step,
    is_my_turn_in_jury,
    jury_of,
    may_check,
    needed_of,
    newest_evaluation,
    settled_evaluation,
    ways,
)
from peerd.policy.step.ledger import work_step
from peerd.policy.swarm.pace import way_s
from peerd.swarm.clock import clock_s
from peerd.swarm.membership import Membership
from peerd.table.record import Evaluation, PeerId, believable_loss
from peerd.table.view import LiveView
from peerd.train.samples import Microbatches
from peerd.wire.dispatch import Dispatcher
from peerd.wire.messages import Call
from peerd.wire.tensors import encode_microbatch

TICK_S = 2.0
FAILURE_PAUSE_S = 0.5
ROUNDS = 3
"""How often a microbatch is sent a way that it did not take, because a peer on it was full."""
MAX_REFUSALS = 4
"""Refusals per microbatch before giving up: peers that are about to reach the step may not show it yet."""
LOG = structlog.get_logger()


def losses_apart(manifest: Manifest) -> float | None:
    """How far two honest losses of one evaluation may be apart, as a share. None where peers do not check each other's evaluations: their
    averages are not certified, or they hold parameters of their own.
    """
    if not manifest.swarm.certifies or manifest.train.local_batch:
        return None
    is_exact = manifest.train.precision == "float32" and manifest.wire.activations == "none"
    return LOSSES_APART if is_exact else ROUNDED_LOSSES_APART


def evaluation_of(live: LiveView, manifest: Manifest, mine: Evaluation | None) -> Evaluation | None:
    """The newest evaluation that this peer believes; `mine`: the newest one that it has made."""
    share = losses_apart(manifest)
    if share is None:
        return newest_evaluation(live, manifest.train.num_stages, mine)
    return agreed_evaluation(live, manifest.train.num_stages, mine, share)


class Evaluator:
    """Runs beside the trainer on a peer that has the run's data."""

    def __init__(
        self, manifest: Manifest, corpus: Microbatches, membership: Membership, dispatcher: Dispatcher, announce: Callable[[], None]
    ) -> None:
        self._manifest = manifest
        self._apart = losses_apart(manifest)
        self._corpus = corpus
        self._membership = membership
        self._dispatcher = dispatcher
        self._takeover = Takeover(manifest.train.evaluation_microbatches, manifest.train.microbatches_per_step)
        self._given_up = -1
        self._refusal = ""
        """Why the last microbatch was refused."""
        self._gate = asyncio.Semaphore(2 * manifest.train.num_stages)
        """Bounds the microbatches in flight; enough to occupy every stage."""
        self.newest: Evaluation | None = None
        """The newest evaluation that this peer has made."""
        self._announce = announce

    async def run(self) -> None:
        while True:
            step = self._step_to_evaluate()
            if step is None:
                await self._membership.changed(TICK_S)
                continue
            losses = await asyncio.gather(*(self._loss_of(step, index) for index in range(self._manifest.train.evaluation_microbatches)))
            found = [loss for loss in losses if loss is not None]
            if len(found) == len(losses):
                self.newest = Evaluation(step, believable_loss(math.fsum(found) / len(found)))
                LOG.info("evaluated", step=step, loss=self.newest.loss)
                self._announce()
            elif not self._is_known(step):
                self._given_up = step
                LOG.warning("an evaluation was given up", step=step, reason=self._refusal)

    def _step_to_evaluate(self) -> int | None:
        """The newest due step, if it is this peer's turn to evaluate it."""
        train, live, now_s = self._manifest.train, self._membership.live(), clock_s()
        reached = work_step(live, train.num_stages)
        step = None if reached is None else due_step(reached, train.evaluate_every_steps, train.steps)
        if reached is None or step is None:
            return None
        is_known = self._is_known(step)
        self._takeover.look(reached, step, is_known, now_s)
        if self._apart is not None and not may_check(live, train.num_stages, step):
            return None
        return step if not is_known and step > self._given_up and self._is_mine(live, step, now_s) else None

    def _is_mine(self, live: LiveView, step: int, now_s: float) -> bool:
        train = self._manifest.train
        microbatch_s = way_s(live, train.num_stages, train.microbatch_size)
        if self._apart is None:
            return self._takeover.is_mine(live, now_s, microbatch_s)
        jury = jury_of(live, step)
        is_late = live.me in jury and self._takeover.is_mine(live, now_s, microbatch_s, at_once=needed_of(len(jury)))
        return is_late or is_my_turn_in_jury(live, step)

    def _is_known(self, step: int) -> bool:
        """Whether this peer need not make the evaluation of `step`, or has made it."""
        live = self._membership.live()
        if self._apart is None:
            known = newest_evaluation(live, self._manifest.train.num_stages, self.newest)
            return known is not None and known.step >= step
        has_made = self.newest is not None and self.newest.step >= step
        return has_made or settled_evaluation(live, step, self._apart) is not None

    async def _loss_of(self, step: int, index: int) -> float | None:
        """The loss of one microbatch; None if it cannot be computed any more, or another peer has announced the whole evaluation."""
        async with self._gate:
            if self._apart is None:
                return await self._loss_by(step, index, {})
            tried = dict[Way, float]()
            for _ in range(ROUNDS):
                for way in ways(self._membership.live(), self._manifest.train.num_stages, step, index):
                    if way in tried:
                        continue
                    taken = dict(enumerate(way))
                    if (loss := await self._loss_by(step, index, taken)) is None:
                        return None
                    tried[tuple(taken[stage] for stage in range(len(way)))] = loss
                    if (agreed := agreed_loss(tried, self._membership.live(), self._apart)) is not None:
                        return agreed
        self._refusal = f"{len(tried)} ways through different peers do not have the same loss"
        return None

    async def _loss_by(self, step: int, index: int, way: dict[int, PeerId]) -> float | None:
        """The loss of one microbatch that went `way`, by stage; the peers that it really went to, if they are others, take their places."""
        refusals = 0
        while refusals < MAX_REFUSALS and not self._is_known(step):
            try:
                call = await asyncio.to_thread(self._call_for, step, index, way)
                return (await self._dispatcher.send(call, way.__setitem__)).loss
            except (WrongStateError, BlamelessError) as error:
                refusals, self._refusal = refusals + 1, error.message
                LOG.debug("evaluation microbatch refused", step=step, index=index, reason=error.message)
            except RemoteError as error:
                LOG.debug("evaluation microbatch failed", step=step, index=index, error=str(error))
            await asyncio.sleep(FAILURE_PAUSE_S)
        return None

    def _call_for(self, step: int, index: int, way: Mapping[int, PeerId]) -> Call:
        inputs, labels = encode_microbatch(*self._corpus.evaluation_microbatch(index))
        return Call(
            stage=0,
            step=step,
            index=index,
            accumulate=frozenset(),
            evaluation=True,
            inputs=inputs,
            labels=labels,
            path=dict(way),
        )
