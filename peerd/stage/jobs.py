"""What the stage's torch thread does with a microbatch: decode and check the tensors, compute, and encode what is sent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from peerd.config.codec import Codec, parse_allowed
from peerd.config.manifest import Manifest
from peerd.config.model_kinds import NOT_ASKED
from peerd.errors import BadMessageError, ChangedLabelsError, NotFiniteError, PeerdError
from peerd.link.links import Bytes
from peerd.stage.arriving import Arriving
from peerd.stage.checks import Checks
from peerd.stage.executor import BACKWARD_SHARE, FORWARD_SHARE, Pace
from peerd.stage.finished import Finished, FinishedGradients
from peerd.stage.leaving import Leaving
from peerd.stage.microbatches import backward, forward, forward_backward
from peerd.stage.results import BackwardResult, HeldMicrobatch, Ticket
from peerd.stage.shortage import Shortage
from peerd.stage.state import StageState
from peerd.timeline.spans import Span, SpanKind
from peerd.transfers import to_device
from peerd.wire.chunks import digest_of
from peerd.wire.messages import Call, TensorBytes
from peerd.wire.receipts import tensor_hash
from peerd.wire.tensors import decode, encode_microbatch, take

_CPU = torch.device("cpu")


class TextMicrobatches(Protocol):
    """The run's text as microbatches, which are the same on every machine."""

    def microbatch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        """Tokens and labels of microbatch (step, index)."""


class RunTokens(Protocol):
    """The run's data at this peer."""

    @property
    def tokens(self) -> TextMicrobatches | None:
        """None as long as they are not here."""


class StageJobs:
    """Each public method is one job, but for `finished` and those that say how tensors come."""

    def __init__(self, manifest: Manifest, state: StageState, data: RunTokens | None = None) -> None:
        self._manifest = manifest
        self._state = state
        self._data = data
        self.activations, self.gradients = parse_allowed(manifest.wire.activations), parse_allowed(manifest.wire.activation_gradients)
        self._finished = FinishedGradients()
        self.shortage = Shortage(state)

    def finished(self, call: Call) -> Finished | None:
        """What this call would give, where it was computed before."""
        return self._finished.find(call, self._codec_of(call), self._state.holdings.generation)

    async def arriving(self, call: Call, chunks: Sequence[Bytes], launched: bytes = b"") -> Arriving:
        """Return the call's inputs, on their way to the device where they can be, and hashed. Not a job. Raises BadMessageError.

        `launched`: the hash of the tokens that the first stage got, as far as it is known.
        """
        inputs, labels = take(chunks, call.inputs, call.labels)
        await self._check_data(call, inputs, labels, launched)
        found = Arriving(inputs, self._state.holdings.device)
        if call.needs_gradient:
            found.digest = await asyncio.to_thread(digest_of, chunks)
        if call.inputs.dtype != "int32":  # tokens are looked at first
            await found.begin()
        return found

    async def _check_data(self, call: Call, inputs: TensorBytes, labels: TensorBytes, launched: bytes) -> None:
        """Refuse a microbatch that is not in the run's data, where that is here (hole 73).

        Raises BadMessageError for one that its trainer made up. At a later stage a peer on the way may have changed the labels, or the
        first stage may lack the data, and the caller need not be at fault: ChangedLabelsError, by which the microbatch goes back to its
        trainer.
        """
        tokens = self._data.tokens if self._data is not None else None
        if tokens is None or call.evaluation:
            return
        try:
            due = encode_microbatch(*await asyncio.to_thread(tokens.microbatch, call.step, call.index))
        except (OSError, PeerdError):
            return  # it cannot be read here: others check it
        came = (inputs, labels) if call.stage == 0 else (labels,)
        is_due = all(digest_of(one.chunks) == digest_of(other.chunks) for one, other in zip(came, due[-len(came) :], strict=True))
        if is_due and launched in (b"", tensor_hash(due[0])):
            return
        if call.stage == 0:
            raise BadMessageError(f"microbatch {call.index} of step {call.step} is not that of the run's data")
        what = "tokens" if is_due else "labels"
        raise ChangedLabelsError(f"the {what} of microbatch {call.index} of step {call.step} are not those of the run's data")

    async def gradient_arriving(self, value: TensorBytes) -> Arriving:
        """The same for the gradient that the next stage gave."""
        value.check(value.dtype, value.shape, self.gradients)
        found = Arriving(value, self._state.holdings.device)
        await found.begin()
        return found

    def _take_inputs(
        self, call: Call, ticket: Ticket, chunks: Sequence[Bytes], arriving: Arriving | None
    ) -> tuple[HeldMicrobatch, TensorBytes]:
        """Decode the tensors and check the tokens. Returns the labels' bytes to pass on; those of the inputs are done with.

        Activations are looked at together with what is computed from them.
        """
        inputs, labels = take(chunks, call.inputs, call.labels)
        device = self._state.holdings.device
        given = decode(labels, _CPU)
        check_labels(given, self._manifest)
        batch = HeldMicrobatch(ticket, torch.empty(0), to_device(given, device).long(), arriving.digest if arriving is not None else b"")
        if call.inputs.dtype == "int32":
            tokens = decode(inputs, _CPU)
            check_tokens(tokens, self._manifest)
            batch.inputs = to_device(tokens, device).long()
        else:
            batch.inputs = arriving.take() if arriving is not None else decode(inputs, device)
            if call.evaluation or not self._may_overflow(ticket):
                batch.checks.finite([batch.inputs], NotFiniteError("the activations came with values that are not finite"))
        return batch, labels.with_chunks((b"".join(labels.chunks),))

    def forward(
        self, call: Call, ticket: Ticket, chunks: Sequence[Bytes], pace: Pace, arriving: Arriving | None = None
    ) -> tuple[HeldMicrobatch, Leaving, TensorBytes]:
        """Activations, which leave, and the labels to pass on."""
        started_s = time.monotonic()
        batch, labels = self._take_inputs(call, ticket, chunks, arriving)
        activations = Leaving(self.activations.most_exact, ahead=ticket.may_go_ahead)
        forward(self._state, batch, activations)
        self.shortage.holds(batch)
        pace.hold(started_s, FORWARD_SHARE)
        if not activations.is_under_way:
            self._state.spans.add(SpanKind.FORWARD, started_s, ticket.step, ticket.index)
        return batch, activations, labels

    def forward_only(
        self, call: Call, ticket: Ticket, chunks: Sequence[Bytes], pace: Pace, arriving: Arriving | None = None
    ) -> tuple[Leaving | float, TensorBytes]:
        """Activations, which leave, or from the last stage the loss; and the labels to pass on."""
        started_s = time.monotonic()
        batch, labels = self._take_inputs(call, ticket, chunks, arriving)
        output = self._state.evaluate(call.step, batch.inputs, batch.labels)
        batch.checks.usable([output], NotFiniteError(f"the evaluation of step {call.step} is not finite at stage {call.stage}"))
        found: Leaving | float
        if self._state.holdings.module.is_last:
            found = float(batch.checks.fetch(output)[1][0])
        else:
            found = Leaving(self.activations.most_exact)
            found.send(output, batch.checks)
        pace.hold(started_s, FORWARD_SHARE)
        return found, labels

    def backward(self, call: Call, batch: HeldMicrobatch, below: Arriving, pace: Pace) -> tuple[BackwardResult, Leaving | None]:
        started_s = time.monotonic()
        gradient = below.take()
        batch.checks = Checks()
        if not self._may_overflow(batch.ticket):
            batch.checks.finite([gradient], BadMessageError("the next stage gave a gradient that is not finite"))
        leaving = self._leaving_back(call)
        outcome = backward(self._state, batch, gradient, partial(pace.hold, started_s, BACKWARD_SHARE), leaving)
        gradient_out = self._given_back(call, batch, leaving)
        self._note_backward(batch, started_s)
        return outcome, gradient_out

    def last_stage(
        self, call: Call, ticket: Ticket, chunks: Sequence[Bytes], pace: Pace, arriving: Arriving | None = None
    ) -> tuple[BackwardResult, Leaving | None]:
        started_s = time.monotonic()
        batch, _ = self._take_inputs(call, ticket, chunks, arriving)
        leaving = self._leaving_back(call)
        rest = partial(pace.hold, started_s, FORWARD_SHARE + BACKWARD_SHARE)
        outcome = forward_backward(self._state, batch, rest, leaving)
        gradient_out = self._given_back(call, batch, leaving)
        self._note_backward(batch, started_s)
        return outcome, gradient_out

    def _leaving_back(self, call: Call) -> Leaving | None:
        """For the gradient, if the caller needs it."""
        return Leaving(self._codec_of(call)) if call.needs_gradient else None

    def _given_back(self, call: Call, batch: HeldMicrobatch, gradient: Leaving | None) -> Leaving | None:
        """Keep the gradient, for a caller that repeats the call."""
        if gradient is None or not gradient.is_begun:
            return None
        ticket = batch.ticket
        versions = ticket.version, *ticket.below
        finished = Finished(gradient, batch.digest, self._state.holdings.generation, versions, ticket.signed_below)
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


def check_labels(labels: Tensor, manifest: Manifest) -> None:
    """Raise BadMessageError for labels that are no tokens. They lie in the machine's memory: a GPU would have to be waited for."""
    check_tokens(_asked(labels, manifest), manifest)


def check_tokens(tokens: Tensor, manifest: Manifest) -> None:
    """Raise BadMessageError for tokens outside the vocabulary. They lie in the machine's memory."""
    vocabulary = manifest.model.vocab_size
    if bool(((tokens < 0) | (tokens >= vocabulary)).any()):
        raise BadMessageError(f"tokens outside the vocabulary of {vocabulary}")


def _asked(labels: Tensor, manifest: Manifest) -> Tensor:
    """Those that are tokens. BadMessageError where there are none: their mean loss would be no number."""
    if not manifest.model.masked_share:
        return labels
    found = labels[labels != NOT_ASKED]
    if not found.numel():
        raise BadMessageError("labels that ask for no token")
    return found
