"""What the stage's torch thread does with a microbatch: decode and check the tensors, compute, and encode what is sent."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

from peerd.config.codec import Codec, parse_allowed
from peerd.config.manifest import Manifest
from peerd.config.model_kinds import NOT_ASKED
from peerd.errors import BadMessageError, NotFiniteError
from peerd.link.links import Bytes
from peerd.stage.accumulator import all_finite, usable
from peerd.stage.executor import BACKWARD_SHARE, FORWARD_SHARE, Pace
from peerd.stage.finished import Finished, FinishedGradients
from peerd.stage.microbatches import backward, forward, forward_backward
from peerd.stage.results import BackwardResult, HeldMicrobatch, Ticket
from peerd.stage.state import StageState
from peerd.timeline.spans import Span, SpanKind
from peerd.wire.chunks import digest_of
from peerd.wire.messages import Call, TensorBytes
from peerd.wire.tensors import decode, encode, take


class StageJobs:
    """Each public method but `finished` is one job."""

    def __init__(self, manifest: Manifest, state: StageState) -> None:
        self._manifest = manifest
        self._state = state
        self.activations, self.gradients = parse_allowed(manifest.wire.activations), parse_allowed(manifest.wire.activation_gradients)
        self._finished = FinishedGradients()

    def finished(self, call: Call) -> Finished | None:
        """What this call would give, where it was computed before."""
        return self._finished.find(call, self._codec_of(call), self._state.holdings.generation)

    def _take_inputs(self, call: Call, ticket: Ticket, chunks: Sequence[Bytes]) -> tuple[HeldMicrobatch, TensorBytes]:
        """Decode and check the tensors; returns the labels' bytes to pass on, apart from those of the inputs, which are done with."""
        inputs, labels = take(chunks, call.inputs, call.labels)
        device, vocabulary = self._state.holdings.device, self._manifest.model.vocab_size
        digest = digest_of(chunks) if call.needs_gradient else b""
        batch = HeldMicrobatch(ticket, decode(inputs, device), decode(labels, device).long(), digest)
        tokens = [_asked(batch.labels, self._manifest)]
        if call.inputs.dtype == "int32":
            batch.inputs = batch.inputs.long()
            tokens.append(batch.inputs)
        elif (call.evaluation or not self._may_overflow(ticket)) and not all_finite([batch.inputs]):
            raise NotFiniteError("the activations came with values that are not finite")
        if any(bool(((t < 0) | (t >= vocabulary)).any()) for t in tokens):
            raise BadMessageError(f"tokens outside the vocabulary of {vocabulary}")
        return batch, labels.with_chunks((b"".join(labels.chunks),))

    def forward(self, call: Call, ticket: Ticket, chunks: Sequence[Bytes], pace: Pace) -> tuple[HeldMicrobatch, TensorBytes, TensorBytes]:
        started_s = time.monotonic()
        batch, labels = self._take_inputs(call, ticket, chunks)
        activations = encode(forward(self._state, batch), self.activations.most_exact)
        pace.hold(started_s, FORWARD_SHARE)
        self._state.spans.add(SpanKind.FORWARD, started_s, ticket.step, ticket.index)
        return batch, activations, labels

    def forward_only(self, call: Call, ticket: Ticket, chunks: Sequence[Bytes], pace: Pace) -> tuple[TensorBytes | float, TensorBytes]:
        """Activations, or from the last stage the loss; and the labels to pass on."""
        started_s = time.monotonic()
        batch, labels = self._take_inputs(call, ticket, chunks)
        output = self._state.evaluate(call.step, batch.inputs, batch.labels)
        if not usable([output]):
            raise NotFiniteError(f"the evaluation of step {call.step} is not finite at stage {call.stage}")
        found = float(output) if self._state.holdings.module.is_last else encode(output, self.activations.most_exact)
        pace.hold(started_s, FORWARD_SHARE)
        return found, labels

    def backward(self, call: Call, batch: HeldMicrobatch, below: TensorBytes, pace: Pace) -> tuple[BackwardResult, TensorBytes | None]:
        started_s = time.monotonic()
        below.check(below.dtype, below.shape, self.gradients)
        gradient = decode(below, self._state.holdings.device)
        if not self._may_overflow(batch.ticket) and not all_finite([gradient]):
            raise BadMessageError("the next stage gave a gradient that is not finite")
        outcome = backward(self._state, batch, gradient, lambda: pace.hold(started_s, BACKWARD_SHARE))
        gradient_out = self._given_back(call, batch, outcome)
        self._note_backward(batch, started_s)
        return outcome, gradient_out

    def last_stage(self, call: Call, ticket: Ticket, chunks: Sequence[Bytes], pace: Pace) -> tuple[BackwardResult, TensorBytes | None]:
        started_s = time.monotonic()
        batch, _ = self._take_inputs(call, ticket, chunks)
        outcome = forward_backward(self._state, batch, lambda: pace.hold(started_s, FORWARD_SHARE + BACKWARD_SHARE))
        gradient_out = self._given_back(call, batch, outcome)
        self._note_backward(batch, started_s)
        return outcome, gradient_out

    def _given_back(self, call: Call, batch: HeldMicrobatch, outcome: BackwardResult) -> TensorBytes | None:
        if outcome.gradient is None or not call.needs_gradient:
            return None
        gradient = encode(outcome.gradient, self._codec_of(call))
        finished = Finished(gradient, batch.digest, self._state.holdings.generation)
        self._finished.put(call.step, call.index, finished, oldest_step=self._state.record.step - 1)
        return gradient

    def _may_overflow(self, ticket: Ticket) -> bool:
        return self._state.holdings.passes.may_overflow(late=ticket.step < self._state.record.step)

    def _codec_of(self, call: Call) -> Codec:
        return call.gradient_codec or self.gradients.most_exact

    def _note_backward(self, batch: HeldMicrobatch, started_s: float) -> None:
        """A backward pass, and the pass that the job made before it."""
        ticket = batch.ticket
        for kind, ended_s in batch.passes:
            self._state.spans.put(Span(kind, started_s, ended_s, ticket.step, ticket.index))
            started_s = ended_s
        self._state.spans.add(SpanKind.BACKWARD, started_s, ticket.step, ticket.index)


def _asked(labels: Tensor, manifest: Manifest) -> Tensor:
    """Those that are tokens. BadMessageError where there are none: their mean loss would be no number."""
    if not manifest.model.masked_share:
        return labels
    found = labels[labels != NOT_ASKED]
    if not found.numel():
        raise BadMessageError("labels that ask for no token")
    return found
