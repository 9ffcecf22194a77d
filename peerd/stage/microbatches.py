"""Forward and backward passes of microbatches, each with the parameters of its step. Every function is a job for the executor's thread.

A pass waits for the device once: for what it looks at (checks.py) and for its result. The last stage's waits for the loss as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from peerd.errors import NotFiniteError, WrongStateError
from peerd.models.module import StageModule
from peerd.stage.executor import executor_here
from peerd.stage.leaving import Leaving
from peerd.stage.results import BackwardResult, HeldMicrobatch
from peerd.stage.state import StageState
from peerd.timeline.spans import SpanKind


def forward(state: StageState, batch: HeldMicrobatch, leaving: Leaving | None = None) -> Tensor:
    """Run the forward pass and return the activations for the next stage; they begin to leave, if that is asked for.

    Raises WrongStateError if the step's parameters are gone.
    """
    module = state.module_at(batch.ticket.step)
    batch.generation = state.holdings.generation
    state.note_version(batch)
    if not (state.keep_graph and batch.ticket.backward):
        with torch.no_grad():
            return _looked_at(state, batch, _compute(state, module, batch), leaving)
    if not module.is_first:
        batch.inputs.requires_grad_()
    batch.output, batch.module = _compute(state, module, batch), module
    return _looked_at(state, batch, batch.output.detach(), leaving)


def backward(
    state: StageState, batch: HeldMicrobatch, gradient: Tensor, rest: Callable[[], None] = lambda: None, leaving: Leaving | None = None
) -> BackwardResult:
    """Run the backward pass from the gradient of this stage's output, `rest`, and add the gradients if the ledger allows it."""
    if batch.generation != state.holdings.generation:  # the next stage has computed with those of the forward pass
        raise WrongStateError("the parameters have changed since the forward pass")
    output, module = batch.output, state.module_of(batch)
    batch.passes = ()
    if output is None or batch.module is not module:
        output = _recompute(state, batch)
        batch.passes = ((SpanKind.RECOMPUTE, time.monotonic()),)
    return _finish(state, batch, output, (gradient, None), (rest, leaving))


def forward_backward(
    state: StageState, batch: HeldMicrobatch, rest: Callable[[], None] = lambda: None, leaving: Leaving | None = None
) -> BackwardResult:
    """Run the last stage's forward pass, loss and backward pass, `rest`, and add the gradients."""
    state.note_version(batch)
    output = _recompute(state, batch)
    _look(state, batch, "loss", [output.detach()])
    _, (loss,) = batch.checks.fetch(output)
    batch.passes = ((SpanKind.FORWARD, time.monotonic()),)
    return _finish(state, batch, output, (None, float(loss)), (rest, leaving))


def _look(state: StageState, batch: HeldMicrobatch, what: str, values: Sequence[Tensor]) -> bool:
    """Have it looked at whether a value has overflowed. False: it is no error, because a microbatch with such values counts as done."""
    ticket, stage = batch.ticket, state.record.stage
    if state.holdings.passes.may_overflow(late=ticket.step < state.record.step):
        return False
    told = f"the {what} of microbatch {ticket.index} of step {ticket.step} are not finite at stage {stage}"
    batch.checks.usable(values, NotFiniteError(told))
    return True


def _looked_at(state: StageState, batch: HeldMicrobatch, output: Tensor, leaving: Leaving | None) -> Tensor:
    """The output of a forward pass, which begins to leave. Raises NotFiniteError if it has overflowed and that is an error."""
    _look(state, batch, "activations", [output])
    _send(batch, output, leaving)
    return output


def _send(batch: HeldMicrobatch, result: Tensor | None, leaving: Leaving | None, meanwhile: Callable[[], None] = lambda: None) -> bool:
    """Look at what is to be looked at, and have a result leave. Returns whether a value had overflowed.

    `meanwhile` is called before the device is waited for.
    """
    batch.ticket.given()
    if leaving is not None and result is not None:
        return leaving.send(result, batch.checks, meanwhile)
    judge = batch.checks.leave()
    meanwhile()
    return judge()


def _fill() -> None:
    """Give the device a forward pass to go on with, if one waits."""
    if (executor := executor_here()) is not None:
        executor.fill()


def _recompute(state: StageState, batch: HeldMicrobatch) -> Tensor:
    module = state.module_of(batch)
    if not module.is_first:
        batch.inputs = batch.inputs.detach().requires_grad_()
    return _compute(state, module, batch)


def _compute(state: StageState, module: StageModule, batch: HeldMicrobatch) -> Tensor:
    return state.holdings.passes.forward(module, batch.ticket.step, batch.ticket.index, batch.inputs, batch.labels)


def _finish(
    state: StageState,
    batch: HeldMicrobatch,
    output: Tensor,
    ends: tuple[Tensor | None, float | None],
    after: tuple[Callable[[], None], Leaving | None],
) -> BackwardResult:
    """`ends`: the output's gradient, and the loss. The `rest` comes before the microbatch counts as done: a round may open then.

    Where the parameters' gradients would not be added (a mate holds the microbatch, and a round may be open) they are not computed.
    """
    (gradient, loss), (rest, leaving) = ends, after
    step = batch.ticket.step
    module, refused = state.module_of(batch), state.why_not_accumulate(batch.ticket)
    parameters = [] if refused else list(module.parameters())
    wanted = parameters if module.is_first else [batch.inputs, *parameters]
    gradients = state.holdings.passes.backward(output, wanted, gradient, late=step < state.record.step) if wanted else []
    batch.output = batch.module = batch.version = None
    if state.own is not None:
        state.own.look()
    is_error = _look(state, batch, "gradients", gradients)
    input_gradient = None if module.is_first else gradients.pop(0)
    if not is_error:
        batch.checks.usable(gradients, None)
    is_last = gradient is None
    overflowed = _send(batch, input_gradient, leaving, _fill if batch.ticket.may_go_ahead and not is_last else lambda: None)
    rest()
    refused = refused or state.accumulate(batch.ticket, gradients, loss, overflowed)
    return BackwardResult(input_gradient if leaving is None else None, refused)
