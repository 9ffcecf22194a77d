"""Serves microbatches: forward here, on to the next stage, backward here, gradient back to the caller.

Slots bound how many are held at once; one more is kept for the previous step, so that a stage that fell behind can
always finish: rule W2 (call), hole 17.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import structlog

from peerd.background import start
from peerd.config.codec import NONE, Allowed
from peerd.config.manifest import Manifest
from peerd.errors import BadMessageError, BusyError, PeerdError, PeerGoneError, WrongStateError
from peerd.link.links import Bytes
from peerd.models.stages import input_of, labels_shape
from peerd.policy.route.admission import newest_taken, slots_for, why_refuse_call, why_refuse_evaluation
from peerd.policy.step.ledger import ledger_of, number_of
from peerd.policy.step.receipts import ledger_name
from peerd.stage.call_host import CallHost, NextHop
from peerd.stage.computing import Computing
from peerd.stage.executor import Executor, Pace, Priority, Result
from peerd.stage.jobs import RunTokens, StageJobs
from peerd.stage.leaving import Leaving
from peerd.stage.results import BackwardResult, Ticket
from peerd.stage.shortage import Shortage
from peerd.stage.state import StageState
from peerd.stage.witnessing import PassWitness, ReceivedPass
from peerd.table.record import PeerId, RawRecord
from peerd.timeline.spans import Span, SpanKind
from peerd.transfers import DeviceTime, has_copy_streams
from peerd.wire.call_tracing import CallTracing
from peerd.wire.chunks import digest_of
from peerd.wire.handlers import Progress, Receive
from peerd.wire.messages import Call, CallResult, TensorBytes

_RAW = Allowed((NONE,))
EARLY_TICK_S = 0.1
MOST_EARLY_S = 2.0
"""How long a microbatch waits here for its step to begin, or as long as its tensors took to come: sending them again takes that long. It
waits longer while this peer commits."""
LEAST_MEMORY_PAUSE_S = 1.0
"""For at least so long a caller asks others, where this peer's device had no memory for a pass."""
MAX_BROKEN_GRADIENTS = 3
"""After broken gradients from this many peers of the next stage, the microbatch itself must be at fault."""
LOG = structlog.get_logger()


@dataclass(slots=True)
class StageCounters:
    accumulated: int = 0
    suppressed: int = 0
    """Microbatches that were already held or came too late, and were not added again."""
    tokens: int = 0
    """Added by this peer since its daemon began, at whatever stage."""


class StageService:
    """The stage's handler of calls."""

    def __init__(
        self,
        manifest: Manifest,
        state: StageState,
        executor: Executor,
        next_hop: NextHop,
        pace: Pace,
        host: CallHost,
        tracing: CallTracing | None = None,
        witness: PassWitness | None = None,
        data: RunTokens | None = None,
    ) -> None:
        """`witness` signs what comes and goes, in a run whose peers audit each other. `data`: the run's, as far as it is here."""
        self._manifest = manifest
        self._host = host
        self._tracing = tracing or CallTracing()
        self._state = state
        self._executor = executor
        self._next_hop = next_hop
        self._witness = witness
        self.pace = pace
        self._is_local = manifest.train.local_batch > 0
        self._jobs = StageJobs(manifest, state, data)
        self._held: dict[bytes, Ticket] = {}
        self.slots = manifest.slots
        """Microbatches held at once."""
        self.computing = Computing()
        self._under_way: DeviceTime | None = None
        """The last pass, if the device has not finished it. Only the executor's thread uses it."""
        self.leaving = False
        self.handing_back = False
        """The owner wants the machine: microbatches that have not begun go back to their callers, which send them to other peers."""
        self.counters = StageCounters()

    @property
    def queue(self) -> int:
        """Microbatches held, at any point between acceptance and reply."""
        return len(self._held)

    @property
    def num_waiting(self) -> int:
        """Microbatches that wait for the executor."""
        return sum(ticket.waits for ticket in self._held.values())

    @property
    def throughput(self) -> float:
        """Samples per second of computing time, so that waiting does not make this peer look slow. 0: not known yet."""
        microbatch_s = self.computing.microbatch_s(time.monotonic())
        return self._manifest.train.microbatch_size / microbatch_s if microbatch_s else 0.0

    def num_here(self, step: int | None = None) -> int:
        """Return the number of microbatches held, of this step or of all, whose tensors have come."""
        return sum(ticket.is_here and step in (None, ticket.step) for ticket in self._held.values())

    def absorb(self, caller: PeerId, records: Sequence[RawRecord]) -> None:
        self._host.absorb(records, caller)

    def cancel(self, caller: PeerId, call_id: bytes) -> None:
        ticket = self._held.get(caller.encode() + call_id)
        if ticket is not None:
            ticket.cancelled = True

    async def backpropagate(self, caller: PeerId, call: Call, receive: Receive, progress: Progress) -> CallResult:
        self._check(caller, call)
        key = caller.encode() + call.call_id
        if key in self._held:
            raise BusyError("this call is under way already")
        record = self._state.record
        accumulate = record.stage in call.accumulate
        ticket = Ticket(
            call.step, call.index, self._mark(call.step), accumulate, call.needs_backward, again=call.again, above=call.versions
        )
        is_early = ledger_of(record) < call.step
        self._held[key] = ticket
        signing: asyncio.Task[CallResult] | None = None
        try:
            with self._tracing.served(call) as traced:
                began_s = time.monotonic()
                chunks = await receive()
                ticket.is_here = True
                self._state.spans.add(
                    SpanKind.RECEIVE, began_s, call.step, call.index, caller, call.inputs.num_bytes + call.labels.num_bytes
                )
                if is_early:
                    await self._wait_for_step(ticket, max(MOST_EARLY_S, time.monotonic() - began_s))
                signs = None if self._witness is None or call.evaluation else self._witness
                if signs is None:
                    return await self._serve(traced, ticket, chunks, progress)
                given = await signs.is_asked(caller, call, chunks)
                ticket.launched = given.launched
                traced = replace(traced, above=given.ask, lineage=given.lineage)
                signing = start(self._serve_signed(signs, given, (traced, ticket, chunks, progress)), expects=(PeerdError,))
                return await asyncio.shield(signing)
        finally:
            if signing is None or signing.done():
                del self._held[key]
            else:
                signing.add_done_callback(lambda _task: self._held.pop(key))

    async def _serve_signed(
        self, signs: PassWitness, given: ReceivedPass, serving: tuple[Call, Ticket, Sequence[Bytes], Progress]
    ) -> CallResult:
        """Serve a call and sign the answer, also if the caller goes meanwhile: it must not decide which of this ledger is signed."""
        return await signs.answers(given, await self._serve(*serving), serving[1].signed_below)

    def _mark(self, step: int) -> tuple[int, int]:
        """Names the ledger that a microbatch accepted now belongs to; it is never added to another ledger."""
        record = self._state.record
        return record.incarnation, number_of(record, step)

    async def _wait_for_step(self, ticket: Ticket, most_s: float) -> None:
        """A microbatch of the next step waits for the commit, because the commit makes its ledger; `most_s` until that begins."""
        early_s = time.monotonic()
        while ledger_of(record := self._state.record) < ticket.step:
            waited_s = time.monotonic() - early_s
            if newest_taken(record) < ticket.step or (waited_s > most_s and not self._host.is_committing):
                raise WrongStateError(f"this peer is still at step {record.step}")
            await self._host.until_committed(EARLY_TICK_S)
        ticket.accept_mark = self._mark(ticket.step)
        ticket.queued_s = time.monotonic() - early_s
        self._state.spans.add(SpanKind.QUEUED, early_s, ticket.step, ticket.index)

    def _check(self, caller: PeerId, call: Call) -> None:
        """Refuse a bad call before any tensor is received."""
        record, train = self._state.record, self._manifest.train
        if self.leaving or self.handing_back:
            raise WrongStateError("this peer is leaving")  # not PeerGoneError: the caller lost no work and need not dial again
        if call.evaluation:
            reason = why_refuse_evaluation(record, stage=call.stage, step=call.step, kept=self._state.evaluated.step)
        else:
            reason = why_refuse_call(record, stage=call.stage, step=call.step, holds_previous=self._state.holdings.previous is not None)
        if (reason := reason or self._host.why_refuse_caller(caller, call.stage)) is not None:
            raise WrongStateError(reason)
        most, whole = train.microbatches_per_step, "a step"
        if call.evaluation:
            most, whole = train.evaluation_microbatches, "an evaluation"
        elif self._is_local and len(call.versions) != record.stage:
            raise BadMessageError("the call does not say with which versions its inputs were computed")
        if call.index >= most or (call.evaluation and not train.evaluates_at(call.step)):
            raise BadMessageError(f"microbatch {call.index} of {whole} of {most}")
        length = train.sequence_length if call.evaluation else self._manifest.sequence_length_at(call.step)
        allowed = _RAW if record.stage == 0 else self._jobs.activations
        call.inputs.check(*input_of(self._manifest, record.stage, length), allowed)
        call.labels.check("int32", labels_shape(self._manifest, length), _RAW)
        if call.gradient_codec is not None and not self._jobs.gradients.permits(call.gradient_codec):
            raise BadMessageError(f"a gradient asked for as {call.gradient_codec} where {self._jobs.gradients} is due")
        if self._jobs.finished(call) is None:
            self._check_slots(call, len(self._held))
        elif len(self._held) >= 2 * max(1, self.slots):  # a finished one takes no slot, because it needs memory only briefly
            raise BusyError("as many more microbatches as there are slots are here")

    def _check_slots(self, call: Call, others: int) -> None:
        ahead = 0 if call.evaluation else call.step - self._state.record.step
        if others >= slots_for(ahead, self.slots):
            raise BusyError(f"all {self.slots} slots are taken")

    async def _serve(self, call: Call, ticket: Ticket, chunks: Sequence[Bytes], progress: Progress) -> CallResult:
        if call.evaluation:
            return await self._evaluate(call, ticket, chunks, progress)
        if finished := self._jobs.finished(call):
            if finished.inputs == await asyncio.to_thread(digest_of, chunks):
                self.counters.suppressed += 1
                value, records = await finished.gradient.value(), tuple(self._host.own_records())
                ticket.signed_below = finished.signed_below
                return CallResult(gradient=value, downstream_s=0.0, records=records, versions=finished.versions)
            self._check_slots(call, len(self._held) - 1)
        holdings = self._state.holdings
        if holdings.delayed is not None and call.step > self._state.record.step:
            await holdings.delayed.made()
        given = call, ticket, chunks, self.pace, await self._jobs.arriving(call, chunks, ticket.launched)
        if holdings.module.is_last:
            outcome, gradient = await self._run(Priority.FORWARD, ticket, partial(self._jobs.last_stage, *given))
            return self._result(ticket, outcome, await _value_of(gradient), 0.0, None)
        batch, activations, labels = await self._run(Priority.FORWARD, ticket, partial(self._jobs.forward, *given))
        onward = _onward(call, await activations.value(), labels, (*ticket.above, ticket.version) if self._is_local else ())
        if made_s := activations.made_s:
            took_s = self.computing.ended_late(ticket) or ticket.computed_s
            self._state.spans.put(Span(SpanKind.FORWARD, made_s - took_s, made_s, ticket.step, ticket.index))
        for _ in range(MAX_BROKEN_GRADIENTS):
            hops: list[PeerId] = []

            def note(stage: int, peer: PeerId, hops: list[PeerId] = hops) -> None:
                progress(stage, peer)
                if stage == onward.stage:
                    hops.append(peer)

            started_s = time.monotonic()
            below = await self._next_hop.send(onward, note)
            downstream_s = time.monotonic() - started_s
            self._state.spans.add(SpanKind.BELOW, started_s, call.step, call.index, hops[-1])
            ticket.signed_below = below.signed
            if below.gradient is None or not call.needs_backward:  # only stages after this one still need the microbatch
                return self._result(ticket, BackwardResult(None, "not asked to"), None, downstream_s, below)
            try:
                ticket.below = self._versions_of(below)
                job = partial(self._jobs.backward, call, batch, await self._jobs.gradient_arriving(below.gradient), self.pace)
                outcome, gradient = await self._run(Priority.BACKWARD, ticket, job)
            except BadMessageError:
                self._next_hop.distrust(onward, hops[-1])  # the fault is that peer's; the caller need not know
                continue
            return self._result(ticket, outcome, await _value_of(gradient), downstream_s, below)
        raise PeerGoneError("the next stage's gradients are not finite")

    def _versions_of(self, below: CallResult) -> tuple[bytes, ...]:
        """The versions of the later stages, where steps are local. Raises BadMessageError unless there is one for each."""
        if self._is_local and len(below.versions) != self._manifest.train.num_stages - 1 - self._state.record.stage:
            raise BadMessageError("the result does not say with which versions it was computed")
        return below.versions

    async def _evaluate(self, call: Call, ticket: Ticket, chunks: Sequence[Bytes], progress: Progress) -> CallResult:
        """Run forward here, call the next stage, and return the last stage's loss; nothing is kept or counted."""
        job = partial(self._jobs.forward_only, call, ticket, chunks, self.pace, await self._jobs.arriving(call, chunks, ticket.launched))
        output, labels = await self._run(Priority.FORWARD, ticket, job, self._state.record.step)
        if isinstance(output, float):
            return CallResult(gradient=None, downstream_s=0.0, records=tuple(self._host.own_records()), loss=output)
        started_s = time.monotonic()
        below = await self._next_hop.send(_onward(call, await output.value(), labels), progress)
        downstream_s, records = time.monotonic() - started_s, (*self._host.own_records(), *below.records)
        return CallResult(gradient=None, downstream_s=downstream_s, records=records, loss=below.loss)

    async def _run(self, priority: Priority, ticket: Ticket, work: Callable[[], Result], step: int | None = None) -> Result:
        """Run a job on the executor and note how long it waited and worked; an evaluation counts as the current step's."""
        asked_s, ticket.waits = time.monotonic(), True

        def timed() -> Result:
            ticket.waits = False
            if self.handing_back and priority is Priority.FORWARD:
                raise WrongStateError("this peer is leaving")
            began_s = time.monotonic()
            ticket.queued_s += began_s - asked_s
            self._state.spans.add(SpanKind.QUEUED, asked_s, ticket.step, ticket.index)
            self.computing.began(ticket, began_s)
            device = self._state.holdings.device
            ticket.may_go_ahead = self.pace.is_plain and self.computing.may_go_ahead and has_copy_streams(device)
            ticket.passing = took = DeviceTime(device)
            try:
                return self.shortage.through(work, self.slots, self._no_memory(priority))
            finally:
                took.end()
                self.slots = min(self.slots, self.shortage.most_slots or self.slots)
                is_whole = self._state.holdings.module.is_last
                ticket.ahead = self._gone_ahead(ticket, took) if priority is Priority.FORWARD and not is_whole else None
                self.computing.ended(ticket, took.seconds() if ticket.ahead is None else 0.0, is_whole=is_whole)
                self._state.update_spans.look()

        try:
            return await self._executor.run(priority, timed, ticket.step if step is None else step)
        finally:
            ticket.waits = False
            if self.shortage.is_hopeless:
                self._host.cannot_compute()

    def _gone_ahead(self, ticket: Ticket, took: DeviceTime) -> DeviceTime | None:
        """The forward pass just given to the device, if it is not over and the thread may go on.

        The one before is waited for, so that there is one at most.
        """
        if not ticket.may_go_ahead or took.is_over:
            return None
        before, self._under_way = self._under_way, took
        if before is not None:
            before.seconds()
        return took

    def _no_memory(self, priority: Priority) -> BusyError | WrongStateError:
        """The refusal where the device has no memory. After a backward pass in vain a later stage may have added the microbatch."""
        told = "this peer's device has no memory for it now"
        pause_s = max(LEAST_MEMORY_PAUSE_S, self.computing.microbatch_s(time.monotonic()))
        return WrongStateError(told) if priority is Priority.BACKWARD else BusyError(told, pause_s)

    @property
    def shortage(self) -> Shortage:
        return self._jobs.shortage

    def _result(
        self, ticket: Ticket, outcome: BackwardResult, gradient: TensorBytes | None, downstream_s: float, below: CallResult | None
    ) -> CallResult:
        if outcome.refused:
            self.counters.suppressed += 1
            LOG.debug("microbatch not added", step=self._state.record.step, reason=outcome.refused)
        else:
            self.counters.accumulated += 1
            self.counters.tokens += self._manifest.tokens_per_microbatch_at(ticket.step)
            self.computing.done(ticket)
            self._host.ledger_grew()
        slots = [self.slots] if below is None or not below.slots else [self.slots, below.slots]
        return CallResult(
            gradient=gradient,
            downstream_s=downstream_s,
            records=(*self._host.own_records(), *(below.records if below else ())),
            held_s=ticket.queued_s + ticket.computed_s + (below.held_s if below else 0.0),
            slots=min(slots),
            versions=(ticket.version, *ticket.below) if self._is_local and gradient is not None else (),
            ledger=b"" if outcome.refused else ledger_name(*ticket.accept_mark),
        )


async def _value_of(gradient: Leaving | None) -> TensorBytes | None:
    return None if gradient is None else await gradient.value()


def _onward(call: Call, inputs: TensorBytes, labels: TensorBytes, versions: tuple[bytes, ...] = ()) -> Call:
    """The call for the next stage. The link to that stage chooses the codec of the gradient."""
    return replace(call, stage=call.stage + 1, inputs=inputs, labels=labels, gradient_codec=None, versions=versions)
