"""Forward and backward passes of microbatches, each with the parameters of its step. Every function is a job for the executor's thread."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from peerd.errors import NotFiniteError, WrongStateError
from peerd.models.module import StageModule
from peerd.stage.accumulator import usable
from peerd.stage.results import BackwardResult, HeldMicrobatch
from peerd.stage.state import StageState
from peerd.timeline.spans import SpanKind


def forward(state: StageState, batch: HeldMicrobatch) -> Tensor:
    """Run the forward pass and return the activations for the next stage. Raises WrongStateError if the step's parameters are gone."""
    module = state.module_at(batch.ticket.step)
    batch.generation = state.holdings.generation
    if not (state.keep_graph and batch.ticket.backward):
        with torch.no_grad():
            return _checked(state, batch, "activations", _compute(state, module, batch))
    if not module.is_first:
        batch.inputs.requires_grad_()
    batch.output, batch.module = _compute(state, module, batch), module
    return _checked(state, batch, "activations", batch.output.detach())


def backward(state: StageState, batch: HeldMicrobatch, gradient: Tensor, rest: Callable[[], None] = lambda: None) -> BackwardResult:
    """Run the backward pass from the gradient of this stage's output, `rest`, and add the gradients if the ledger allows it."""
    if batch.generation != state.holdings.generation:  # the next stage has computed with those of the forward pass
        raise WrongStateError("the parameters have changed since the forward pass")
    output, module = batch.output, state.module_at(batch.ticket.step)
    batch.passes = ()
    if output is None or batch.module is not module:
        output = _recompute(state, batch)
        batch.passes = ((SpanKind.RECOMPUTE, time.monotonic()),)
    return _finish(state, batch, output, (gradient, None), rest)


def forward_backward(state: StageState, batch: HeldMicrobatch, rest: Callable[[], None] = lambda: None) -> BackwardResult:
    """Run the last stage's forward pass, loss and backward pass, `rest`, and add the gradients."""
    output = _recompute(state, batch)
    loss = float(output.detach())
    batch.passes = ((SpanKind.FORWARD, time.monotonic()),)
    _checked(state, batch, "loss", output.detach())
    return _finish(state, batch, output, (None, loss), rest)


def _checked(state: StageState, batch: HeldMicrobatch, what: str, *values: Tensor) -> Tensor:
    """The first value. Raises NotFiniteError if one has overflowed, unless such a microbatch counts as done in this precision."""
    ticket = batch.ticket
    if not state.holdings.passes.may_overflow(late=ticket.step < state.record.step) and not usable(values):
        stage = state.record.stage
        raise NotFiniteError(f"the {what} of microbatch {ticket.index} of step {ticket.step} are not finite at stage {stage}")
    return values[0]


def _recompute(state: StageState, batch: HeldMicrobatch) -> Tensor:
    module = state.module_at(batch.ticket.step)
    if not module.is_first:
        batch.inputs = batch.inputs.detach().requires_grad_()
    return _compute(state, module, batch)


def _compute(state: StageState, module: StageModule, batch: HeldMicrobatch) -> Tensor:
    return state.holdings.passes.forward(module, batch.ticket.step, batch.ticket.index, batch.inputs, batch.labels)


def _finish(
    state: StageState, batch: HeldMicrobatch, output: Tensor, ends: tuple[Tensor | None, float | None], rest: Callable[[], None]
) -> BackwardResult:
    """`ends`: the output's gradient, and the loss. `rest` comes before the microbatch counts as done: a round may open then."""
    gradient, loss = ends
    step = batch.ticket.step
    module = state.module_at(step)
    parameters = list(module.parameters())
    wanted = parameters if module.is_first else [batch.inputs, *parameters]
    gradients = state.holdings.passes.backward(output, wanted, gradient, late=step < state.record.step)
    batch.output = batch.module = None
    _checked(state, batch, "gradients", *gradients)
    input_gradient = None if module.is_first else gradients.pop(0)
    rest()
    return BackwardResult(input_gradient, state.accumulate(batch.ticket, gradients, loss))
