"""Computes a mate's microbatch, or its whole part of a step, again, and says how far a result is off: the replay of rule 20 (audit).

Each public function is a job for the executor's thread. It changes nothing of the state, and takes the parameters of a step that the state
still holds: this one, or the one before. Results are compared as they travelled, so the replay goes through the same codec.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peerd.config.codec import Codec
from peerd.models.module import StageModule
from peerd.stage.accumulator import LARGEST, Accumulator
from peerd.stage.state import StageState
from peerd.transfers import to_device
from peerd.wire import codecs
from peerd.wire.messages import TensorBytes
from peerd.wire.tensors import decode, encode

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldPass:
    """What one peer got of one microbatch, as it travelled."""

    step: int
    index: int
    inputs: TensorBytes
    """Tokens at the first stage, otherwise activations."""
    labels: TensorBytes | None = None
    """At the last stage."""
    output_gradient: TensorBytes | None = None
    """What the next stage gave back for its output; None at the last one, and where nobody needs it."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a peer had to give of a microbatch, by this peer's own computation, on the CPU."""

    output: Tensor | None
    """For the next stage; None at the last one."""
    gradient: Tensor | None
    """For the stage before; None at the first one, and without the gradient of the output."""


def replay_pass(state: StageState, told: ToldPass, module: StageModule | None = None) -> Replayed:
    """Compute one microbatch again, without the gradients of parameters.

    `module`: with the step's parameters; None: the one that the state holds. Raises WrongStateError if the step's parameters are gone,
    BadMessageError if a tensor that the peer got cannot be decoded.
    """
    module = state.module_at(told.step) if module is None else module
    inputs, output = _forward(state, module, told)
    gradient = None
    if not module.is_first and (module.is_last or told.output_gradient is not None):
        [gradient] = (each.to(_CPU) for each in _gradients(state, output, [inputs], told))
    return Replayed(None if module.is_last else output.detach().to(_CPU), gradient)


def sent_alike(own: Tensor, codec: Codec) -> TensorBytes | None:
    """This peer's own result as it would travel; None for one that is not finite, which is nobody's right result."""
    return encode(own.float(), codec) if bool(own.isfinite().all()) else None


def deviation_of(told: TensorBytes, own: Tensor) -> float:
    """How far what was told is off, if this peer's own result travels likewise. What cannot be decoded is no result."""
    if tuple(told.shape) != tuple(own.shape):
        return math.inf
    return deviation(decode(told, _CPU), codecs.through(told.codec, own))


def replay_part(
    state: StageState, passes: Sequence[ToldPass], told: Tensor, start: int = 0, held: StageModule | None = None, enough: float = -1.0
) -> float:
    """Compute a peer's part of a step again from what it got of all its microbatches. Returns how far `told` is off.

    `told`: elements of its flat sum on the CPU, as others decoded them, from `start` on. Each number behind the gradients counts by itself:
    one of them decides which loss is shown, and in float16 another one whether the step is applied. What comes behind these is not looked
    at. `held`: the step's parameters; None: those that the state holds. It takes the memory of one more accumulator. Raises what
    `replay_pass` raises.

    Only the gradients that `told` has are computed, which takes half the time or less, if `told` is off by no more than `enough` of them.

    The gradients of some parameters are nothing but noise. So where `told` has less than its share of the whole, the deviation is that from
    what its share would be.
    """
    num_gradients = len(state.accumulator.flat) - state.accumulator.num_exact
    border, end = max(start, num_gradients), min(start + len(told), len(state.accumulator.flat))
    told = told[: max(0, end - start)]
    if enough >= 0.0 and start < min(end, num_gradients) and not state.holdings.passes.is_scaled:
        some, places, first = state.accumulator.around(start, min(end, num_gradients))
        _add_again(state, some, passes, held, places)
        exact = some.flat[len(some.flat) - some.num_exact :][: max(0, end - border)]
        off = _off(told, torch.cat([some.flat[start - first : min(end, num_gradients) - first], exact]), border - start)
        if off <= enough:
            return off
    total = state.accumulator.another()
    _add_again(state, total, passes, held)
    share = math.sqrt(min(len(told), border - start) / num_gradients) * float(total.flat[:num_gradients].double().norm())
    return _off(told, total.flat[start:end], border - start, share)


def _off(told: Tensor, own: Tensor, num_gradients: int, share: float = 0.0) -> float:
    """The largest deviation: of the gradients together, which come first, from `share` at least, and of each number behind them."""
    own = own.detach().to(_CPU)
    found = [deviation(told[:num_gradients], own[:num_gradients], share)] if num_gradients > 0 else []
    found += [deviation(told[at : at + 1], own[at : at + 1]) for at in range(num_gradients, max(len(own), len(told)))]
    return largest(found)


def _add_again(
    state: StageState, total: Accumulator, passes: Iterable[ToldPass], held: StageModule | None, places: slice = slice(None)
) -> None:
    """Add the gradients of these microbatches, of the parameters at `places`."""
    for each in passes:
        module = state.module_at(each.step) if held is None else held
        _, output = _forward(state, module, each)
        gradients = _gradients(state, output, list(module.parameters())[places], each)
        has_overflowed = state.holdings.passes.is_scaled and not all(_is_usable(gradient) for gradient in gradients)
        total.add(gradients, float(output.detach()) if module.is_last else None, has_overflowed)


def largest(deviations: Iterable[float]) -> float:
    """The largest deviation; what is no number is larger than all. 0 where there is none."""
    return max(deviations, key=lambda each: math.inf if math.isnan(each) else each, default=0.0)


def deviation(told: Tensor, own: Tensor, least: float = 0.0) -> float:
    """|told - own| / |own| over all elements; infinite where the shapes differ, or where nothing was to be told and something was.

    `least`: what |own| counts at least.
    """
    if told.shape != own.shape:
        return math.inf
    own = own.double()
    apart, size = float((told.double() - own).norm()), max(least, float(own.norm()))
    return apart / size if size > 0 else (0.0 if apart == 0 else math.inf)


def _forward(state: StageState, module: StageModule, told: ToldPass) -> tuple[Tensor, Tensor]:
    """The inputs, of which gradients may be asked, and the output with its graph."""
    inputs = _decoded(told.inputs, state.holdings.device)
    if not module.is_first:
        inputs.requires_grad_()
    labels = None if told.labels is None else _decoded(told.labels, state.holdings.device)
    return inputs, state.holdings.passes.forward(module, told.step, told.index, inputs, labels)


def _decoded(value: TensorBytes, device: torch.device) -> Tensor:
    found = decode(value, _CPU)
    return to_device(found, device).long() if value.dtype == "int32" else to_device(found, device).clone()


def _gradients(state: StageState, output: Tensor, wanted: Sequence[Tensor], told: ToldPass) -> list[Tensor]:
    given = None if told.output_gradient is None else _decoded(told.output_gradient, state.holdings.device)
    return state.holdings.passes.backward(output, wanted, given, late=told.step < state.record.step)


def _is_usable(gradient: Tensor) -> bool:
    return bool((gradient.abs() < LARGEST).all())
