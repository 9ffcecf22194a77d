"""Sends a microbatch to a peer of a stage, and to another one if that fails, as long as any peer can take it.

Trainers use it for stage 0, and each stage for the next. It chooses by stochastic wiring, measures response times, bans and retries.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import structlog

from peerd.background import Tasks
from peerd.errors import BadMessageError, BlamelessError, BusyError, PeerGoneError, RemoteError, UnheardError, WrongStateError
from peerd.policy.route.admission import able_to_compute
from peerd.policy.route.wiring import FIRST_PAUSE_S, Router, next_pause_s, point_of
from peerd.policy.step.ledger import makers, work_step
from peerd.table.record import PeerId, PeerRecord, RawRecord
from peerd.table.view import LiveView
from peerd.wire.clients import StageClient
from peerd.wire.convert import ID_BYTES
from peerd.wire.messages import Call, CallResult
from peerd.wire.receipts import NoWitness, Witness

STALE_PAUSE_S = 0.05
LOG = structlog.get_logger()


class LiveTable(Protocol):
    """The part of the membership that the dispatcher uses."""

    def live(self) -> LiveView: ...

    def absorb(self, raws: Sequence[RawRecord], sender: PeerId) -> Sequence[RawRecord]: ...

    async def changed(self, timeout_s: float) -> bool: ...


class FailureReports(Protocol):
    """Receives reports of failed calls."""

    def report_failure(self, peer: PeerId) -> None: ...


class CallAdapter(Protocol):
    """Adapts a call to the link that it will take."""

    async def adapt(self, call: Call, peer: PeerId) -> Call:
        """Return the call in the form that is sent to `peer`."""


@dataclass(eq=False)
class Dispatcher:
    """Sends microbatches, with one router for each stage. `patience_s` bounds a callee's silence.

    A microbatch is given up after the seconds that `total_s` tells, in which no peer took it and none said that it is full. How long peers
    work on it does not count.
    """

    _client: StageClient
    _table: LiveTable
    _failures: FailureReports
    _adapter: CallAdapter
    _num_stages: int
    _num_microbatches: int
    _patience_s: float
    _total_s: Callable[[], float]
    _witness: Witness = field(default_factory=NoWitness)
    _own_records: Callable[[], Sequence[RawRecord]] = tuple
    """This peer's own record as it is now, if it has one."""
    _routers: dict[tuple[int, bool], Router] = field(default_factory=dict)
    """By stage and whether for evaluation, whose forward passes say nothing about response times in training."""
    _deaf_until_s: dict[PeerId, float] = field(default_factory=dict)
    """Peers that asked for a pause, and when it ends (monotonic clock)."""
    _unknown_to: set[PeerId] = field(default_factory=set)
    """Peers that have refused a call, maybe because this peer's record had not reached them: the next call brings it."""
    _cancels: Tasks = field(default_factory=Tasks)
    num_calls: int = 0
    """Calls made, also of the same microbatch again."""
    replayed: int = 0
    """Number of times that a microbatch went to another peer because its callee failed."""

    async def send(self, call: Call, on_forwarded: Callable[[int, PeerId], None]) -> CallResult:
        """Return the result of one microbatch.

        Raises PeerGoneError if no peer took it in time, WrongStateError if its step is over, BlamelessError if nobody can compute it.
        """
        deadline_s = time.monotonic() + (total_s := self._total_s())
        router = self._router(call)
        path = dict(call.path)
        refused: set[PeerId] = set()
        pause_s = FIRST_PAUSE_S
        attempt, again, furthest = call.attempt, call.again, call.stage

        def note(stage: int, peer: PeerId) -> None:
            nonlocal furthest
            path[stage], furthest = peer, max(furthest, stage)
            on_forwarded(stage, peer)

        while time.monotonic() < deadline_s:
            live = self._table.live()
            self._check_wanted(call, live)
            asks_holders = call.asks_gradient_only and attempt == call.attempt  # on a retry any peer may compute it
            candidates = [r for r in self._candidates(call, live, refused) if self._deaf_until_s.get(r.peer, 0.0) <= time.monotonic()]
            prefer = makers(candidates, call.step, call.index) if asks_holders else frozenset()
            if not prefer and call.stage in path:
                prefer = frozenset({path[call.stage]})
            peer = router.choose(candidates, point_of(call.index, self._num_microbatches, attempt), prefer, call.step)
            if peer is None and refused:
                raise WrongStateError(f"no peer of stage {call.stage} holds the parameters of step {call.step} any more")
            if peer is None:
                until_s = min([deadline_s, *(at_s for at_s in self._deaf_until_s.values() if at_s > time.monotonic())])
                await self._table.changed(min(self._patience_s, max(0.01, until_s - time.monotonic())))
                continue
            note(call.stage, peer.peer)
            asked_s = time.monotonic()
            asked = replace(call, call_id=os.urandom(ID_BYTES), path=dict(path), again=again)
            try:
                return await self._try(router, peer, asked, note)
            except BusyError as error:
                if error.retry_after_s:
                    self._deaf_until_s[peer.peer] = time.monotonic() + error.retry_after_s
                deadline_s = time.monotonic() + total_s
                await asyncio.sleep(pause_s)
                pause_s = next_pause_s(pause_s, router.response_s(peer.peer))
                attempt += 1
            except WrongStateError:
                self._refused_by(peer.peer, call, live)
                if call.evaluation:
                    refused.add(peer.peer)
                deadline_s += time.monotonic() - asked_s
                await self._table.changed(STALE_PAUSE_S)
                attempt += 1
                again |= furthest > call.stage  # a later stage may have added it
            except BlamelessError:  # the trainer tries the microbatch again by another way
                raise
            except RemoteError as error:
                again |= not isinstance(error, UnheardError)
                self._give_up_on(router, peer, asked, error)
                deadline_s += time.monotonic() - asked_s
            path.pop(call.stage, None)
        raise PeerGoneError(f"no peer of stage {call.stage} took the microbatch within {total_s:.0f} s")

    def distrust(self, call: Call, peer: PeerId) -> None:
        """Treat a peer whose result turned out to be broken as if its call had failed."""
        record = self._table.live().find(peer)
        if record is not None:
            broken = BadMessageError("a gradient that is not finite")
            self._give_up_on(self._router(call), record, call, broken)

    def _refused_by(self, peer: PeerId, call: Call, live: LiveView) -> None:
        """Note that a peer refused a call. Raises WrongStateError where all will."""
        self._unknown_to.add(peer)
        if live.me in live.sidelined(call.stage - 1):
            raise WrongStateError("this peer is left out of its stage")

    def _router(self, call: Call) -> Router:
        return self._routers.setdefault((call.stage, call.evaluation), Router())

    async def _try(self, router: Router, peer: PeerRecord, call: Call, note: Callable[[int, PeerId], None]) -> CallResult:
        call, asked = await self._witness.asks(await self._adapter.adapt(call, peer.peer), peer.peer)
        started_s, self.num_calls = time.monotonic(), self.num_calls + 1
        records = self._own_records() if peer.peer in self._unknown_to else ()
        result = await self._client.backpropagate(peer.peer, call, records, self._patience_s, note)
        self._unknown_to.discard(peer.peer)
        elapsed_s = time.monotonic() - started_s
        if call.evaluation:
            if result.loss is None or not math.isfinite(result.loss):
                raise BadMessageError("the reply has no finite loss")
        elif call.needs_gradient and result.gradient is None:
            raise BadMessageError("the reply has no gradient")
        await self._witness.took(call, asked, result)
        path = result.records[: self._num_stages - call.stage]  # one of each peer on the way: more would be refused where it is passed on
        result = replace(result, records=tuple(self._table.absorb(path, peer.peer)))
        if call.stage in call.accumulate or call.evaluation:  # otherwise the callee does only a part of a microbatch's work
            downstream_s = result.downstream_s if call.stage < self._num_stages - 1 else 0.0
            router.observe(peer.peer, elapsed_s, downstream_s)
        return result

    def _give_up_on(self, router: Router, peer: PeerRecord, call: Call, error: RemoteError) -> None:
        """Ban the peer, report the failure, and cancel the call to make a double count rarer: rule W4 (retry), hole 7."""
        LOG.debug("peer failed a microbatch", peer=peer.peer, stage=call.stage, step=call.step, index=call.index, error=str(error))
        router.ban(peer)
        self.replayed += not isinstance(error, UnheardError)
        if not isinstance(error, BadMessageError):
            self._failures.report_failure(peer.peer)
        self._cancels.start(self._cancel(peer.peer, call.call_id))

    async def _cancel(self, peer: PeerId, call_id: bytes) -> None:
        try:
            await self._client.cancel(peer, call_id, self._patience_s)
        except RemoteError:
            return  # the peer is gone; the ledgers decide what counts

    def _candidates(self, call: Call, live: LiveView, refused: Collection[PeerId]) -> list[PeerRecord]:
        """Return the peers that may compute this call. For an evaluation, peers past its step may have kept the parameters, too."""
        if call.evaluation:
            able = [r for r in live.serving(call.stage) if r.step >= call.step and not r.leaving and r.peer not in refused]
            return [r for r in able if r.step == call.step] or able
        return able_to_compute(live, call.stage, call.step)

    def _check_wanted(self, call: Call, live: LiveView) -> None:
        """Raise WrongStateError if every stage has left the step of the microbatch: nothing needs it any more."""
        step = work_step(live, self._num_stages)
        if step is not None and step > call.step and not call.evaluation:
            raise WrongStateError(f"step {call.step} is over")
