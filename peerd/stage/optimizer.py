"""The optimizers: the update, which is the same at every peer of a stage, and the optimizer state as named tensors.

Each optimizer updates every tensor by itself, so the result does not depend on which tensors share a process. Every peer of a stage has
the whole average, so an update may need whole tensors, as LAMB's and Muon's do. With train.optimizer_bits = 8 the moments are packed
(moments.py), and a tensor is updated piece by piece.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from peerd.config.manifest import Manifest, TrainConfig
from peerd.config.muon import is_layer_matrix
from peerd.config.schedule import learning_rate_at
from peerd.errors import ManifestError
from peerd.models.stages import initial_parameter_spec
from peerd.stage.moments import SCALE, Unpacked, chunk_of, dither, num_blocks
from peerd.stage.orthogonal import orthogonalised
from peerd.transfers import queues_copies, to_device

_LEAST_NORMAL = torch.finfo(torch.float32).tiny
ADAM_MOMENTS = ("exp_avg", "exp_avg_sq")
MOMENTUM = "momentum_buffer"
OUTER_MOMENTUM = "outer_momentum"
"""Of averaged changes. A name of its own: a run with local steps that begins from the state of one without starts with zeros, not with the
velocity of gradients, and the other way round."""
MUON_SCALE = 0.2
"""The root mean square of Muon's update for a learning rate of 1: about that of AdamW's, so that both take the same rate and decay."""


@dataclass(frozen=True, slots=True)
class Updated:
    """The arguments of an update for one parameter, all on one device: its value, its gradient and its state by part."""

    value: Tensor
    gradient: Tensor
    state: Mapping[str, Tensor]
    computes_on: torch.device
    """The device of the parameter, which is another where the state is offloaded. Matrix products belong there."""


Update = Callable[[Sequence[Updated], TrainConfig, float, float], None]
"""Changes values and state in place. The two numbers are the learning rate and the weight decay."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of optimizer: the moments that are its state, each of the parameter's shape, and its update."""

    parts: tuple[str, ...]
    update: Update


class Optimizer:
    """The run's optimizer over named parameters. Vectors (norms and biases) and train.no_decay get no weight decay."""

    def __init__(self, manifest: Manifest, parameters: Mapping[str, nn.Parameter], place: torch.device | None = None) -> None:
        """`place`: where its state lies, and where it updates; by default each parameter's device."""
        self._train = manifest.train
        self._local_from = manifest.train.local_steps_after
        self._shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        self._kinds = {name: kind_of(manifest.train, name, shape) for name, shape in self._shapes.items()}
        inner = manifest.train.inner if self._local_from else manifest.train
        self._at_first = {name: kind_of(inner, name, shape) for name, shape in self._shapes.items()}
        self._state = {
            name: _fresh_state(self._train, name, parameter.shape, place or parameter.device) for name, parameter in parameters.items()
        }
        self._parameters: dict[str, Tensor] = {}
        self.move_to(parameters)
        decaying = {name for name, parameter in parameters.items() if self._decays(name, parameter)}
        self._groups = (
            ([name for name in parameters if name in decaying], self._train.weight_decay),
            ([name for name in parameters if name not in decaying], 0.0),
        )

    def move_to(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Update these parameters from now on: the same names and shapes in other memory."""
        self._parameters = {name: parameter.detach() for name, parameter in parameters.items()}

    @torch.no_grad()
    def update(self, step: int, gradients: Mapping[str, Tensor], gradient_of: Callable[[Tensor], Tensor] = lambda given: given) -> None:
        """Apply one update from `gradient_of` each of the `gradients` of `step`, of any float type: they are made one at a time.

        Raises ValueError, with nothing changed, unless there is exactly one gradient of the right shape for each parameter: a
        parameter without a gradient would silently go without its update.
        """
        _check_shapes("gradient", self._shapes, gradients)
        self._begin_local_steps(step)
        is_first = step < self._local_from
        kinds = self._at_first if is_first else self._kinds
        rate = self._train.outer_learning_rate if self._train.is_local_at(step) else learning_rate_at(self._train, step)
        for names, weight_decay in self._groups:
            for name in names:
                state = self._state_at_first(name) if is_first else self._state[name]
                updated = self._updated(name, gradient_of(gradients[name]), state)
                kinds[name].update([updated], self._train, rate, weight_decay)
                if updated.value is not self._parameters[name]:
                    self._parameters[name].copy_(updated.value, non_blocking=queues_copies(self._parameters[name].device))

    def skip(self, step: int) -> None:
        """Go on where a step was given up: it makes no update."""
        self._begin_local_steps(step)

    def begin_from(self, other: Optimizer) -> None:
        """Take over the moments of a synchronous beginning from the state that peers share, of parameters of the same names."""
        for name, state in self._state.items():
            theirs = other._state_at_first(name)
            for part in state.keys() & theirs.keys():
                state[part].copy_(theirs[part])

    def _state_at_first(self, name: str) -> dict[str, Tensor]:
        """The state of a parameter by the names that it has in the optimizer of a synchronous beginning."""
        named = {OUTER_MOMENTUM + end: part + end for part in self._at_first[name].parts[:1] for end in ("", SCALE)}
        return {named.get(part, part): value for part, value in self._state[name].items()}

    def _begin_local_steps(self, step: int) -> None:
        """The first step with local steps ends: the moments of the steps before it are with the peers, and the outer momentum is zero."""
        if step == self._local_from > 0:
            for state in self._state.values():
                for value in state.values():
                    value.zero_()

    def _decays(self, name: str, parameter: Tensor) -> bool:
        return parameter.dim() > 1 and not any(fnmatchcase(name, pattern) for pattern in self._train.no_decay)

    def _updated(self, name: str, gradient: Tensor, state: Mapping[str, Tensor]) -> Updated:
        """The update's arguments, on the state's device: where that is offloaded, a GPU's parameter is copied to the CPU and back.

        So is one whose numbers do not lie in the usual order: torch's AdamW pairs numbers as they lie in memory.
        `to` is called only where it is needed: every torch call releases the interpreter lock and may wait long to get it back.
        """
        parameter = self._parameters[name]
        place, dtype = state["step"].device, parameter.dtype
        value = parameter if parameter.device == place and parameter.is_contiguous() else parameter.to(place).contiguous()
        fits = gradient.device == place and gradient.dtype == dtype and gradient.is_contiguous()
        gradient = gradient if fits else to_device(gradient.to(dtype), place).contiguous()
        return Updated(value, gradient, state, parameter.device)

    def tensors(self) -> dict[str, Tensor]:
        """The state as `<parameter>.<part>`; `.step` is the number of updates. All are zero before the first update.

        These are the live tensors, on the optimizer's device: clone what must outlast the next update.
        """
        return {f"{name}.{part}": value for name, state in self._state.items() for part, value in state.items()}

    def begin_anew(self) -> None:
        """Be as before the first update."""
        for value in self.tensors().values():
            value.zero_()

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the state from the result of `tensors`, on any device.

        Raises ValueError, with nothing changed, if a tensor is missing, unknown or of the wrong shape or type.
        """
        mine = self.tensors()
        _check_shapes("optimizer tensor", {name: tuple(value.shape) for name, value in mine.items()}, tensors, mine)
        for name, value in mine.items():
            value.copy_(tensors[name])


def optimizer_spec(train: TrainConfig, parameters: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The state's tensors for parameters of these names and shapes, without memory (on the meta device)."""
    meta = torch.device("meta")
    states = {name: _fresh_state(train, name, torch.Size(shape), meta) for name, shape in parameters.items()}
    return {f"{name}.{part}": value for name, state in states.items() for part, value in state.items()}


def optimizer_parts(train: TrainConfig) -> set[str]:
    """The suffixes of the state's tensor names."""
    kinds, meta = (("", ()), OF_A_LAYER), torch.device("meta")
    return {part for name, shape in kinds for part in _fresh_state(train, name, torch.Size(shape), meta)}


def alike(train: TrainConfig) -> list[TrainConfig]:
    """These settings, and those whose state is the same but for the bits of its moments."""
    packable = bool(state_parts(train)) and train.optimizer not in ("lamb", "muon")
    return [train, *[replace(train, optimizer_bits=bits) for bits in (32, 8) if packable and bits != train.optimizer_bits]]


def check_no_decay(manifest: Manifest) -> None:
    """Raise ManifestError if a pattern of train.no_decay matches no parameter: it would silently do nothing."""
    if not manifest.train.no_decay:
        return
    names = [name for stage in range(manifest.train.num_stages) for name in initial_parameter_spec(manifest, stage)]
    for pattern in manifest.train.no_decay:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ManifestError(f"train.no_decay: no parameter is called {pattern!r}", f"names are such as {names[0]} and {names[-1]}")


def _adamw(group: Sequence[Updated], train: TrainConfig, rate: float, weight_decay: float) -> None:
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101).

    `fused` is one kernel call per parameter on a CPU, and elementwise on every device; `foreach` would group parameters, and so depend
    on the split into stages. The function is called, because torch's class imports its compiler: 0.9 s and 70 MB at every start.
    """
    adamw(
        [each.value for each in group],
        [each.gradient for each in group],
        [each.state["exp_avg"] for each in group],
        [each.state["exp_avg_sq"] for each in group],
        [],
        [each.state["step"] for each in group],
        lr=rate,
        beta1=train.beta1,
        beta2=train.beta2,
        eps=train.epsilon,
        weight_decay=weight_decay,
        fused=True,
        foreach=False,
        amsgrad=False,
        maximize=False,
    )


def _adamw_by_operations(group: Sequence[Updated], train: TrainConfig, rate: float, weight_decay: float) -> None:
    """AdamW as above, for pieces so small that torch takes one thread. Its kernel, and its square root, take all, and wait for each."""
    for each in group:
        first, second, step = each.state["exp_avg"], each.state["exp_avg_sq"], each.state["step"].add_(1)
        first.lerp_(each.gradient, 1 - train.beta1)
        second.mul_(train.beta2).addcmul_(each.gradient, each.gradient, value=1 - train.beta2)
        updates = int(step)
        root = second.clamp(min=_LEAST_NORMAL).rsqrt_().mul_(second).div_(math.sqrt(1 - train.beta2**updates)).add_(train.epsilon)
        if weight_decay:
            each.value.mul_(1 - rate * weight_decay)
        each.value.addcdiv_(first, root, value=-rate / (1 - train.beta1**updates))


def _lamb(group: Sequence[Updated], train: TrainConfig, rate: float, weight_decay: float) -> None:
    """LAMB (You et al. 2020, arXiv 1904.00962, algorithm 2), with phi(z) = z and a layer being a tensor."""
    for each in group:
        first, second, step = each.state["exp_avg"], each.state["exp_avg_sq"], each.state["step"].add_(1)
        first.lerp_(each.gradient, 1 - train.beta1)
        second.mul_(train.beta2).addcmul_(each.gradient, each.gradient, value=1 - train.beta2)
        updates = int(step)
        root = second.sqrt().div_(math.sqrt(1 - train.beta2**updates)).add_(train.epsilon)
        direction = (first / (1 - train.beta1**updates)).div_(root).add_(each.value, alpha=weight_decay)
        length, wanted = torch.linalg.vector_norm(direction), torch.linalg.vector_norm(each.value)
        ratio = torch.where((length > 0) & (wanted > 0), wanted / length, 1.0)  # otherwise a tensor of zeros would stay zero
        each.value.sub_(direction.mul_(ratio).mul_(rate))


def _muon(group: Sequence[Updated], train: TrainConfig, rate: float, weight_decay: float) -> None:
    """Muon (Keller Jordan et al. 2024) with Nesterov momentum, for matrices; decay and scale as in Liu et al. 2025, arXiv 2502.16982."""
    for each in group:
        each.state["step"].add_(1)
        momentum = each.state[MOMENTUM].lerp_(each.gradient, 1 - train.muon_momentum)
        direction = orthogonalised(each.gradient.lerp(momentum, train.muon_momentum).to(each.computes_on)).to(each.value.device)
        each.value.mul_(1 - rate * weight_decay).add_(direction, alpha=-rate * MUON_SCALE * math.sqrt(max(direction.shape)))


def _sgd(group: Sequence[Updated], train: TrainConfig, rate: float, weight_decay: float) -> None:
    """Stochastic gradient descent with momentum and no dampening; the weight decay is added to the gradient, as in torch.optim.SGD."""
    for each in group:
        each.state["step"].add_(1)
        velocity = each.state[MOMENTUM]
        velocity.mul_(train.momentum).add_(each.gradient.add(each.value, alpha=weight_decay))
        each.value.add_(velocity, alpha=-rate)


def _nesterov(group: Sequence[Updated], train: TrainConfig, rate: float, _weight_decay: float) -> None:
    """The update of averaged changes (DiLoCo, arXiv 2311.08105): SGD with Nesterov momentum, as in torch.optim.SGD, without decay."""
    for each in group:
        each.state["step"].add_(1)
        velocity = each.state[OUTER_MOMENTUM].mul_(train.outer_momentum).add_(each.gradient)
        each.value.add_(each.gradient.add(velocity, alpha=train.outer_momentum), alpha=-rate)


def _plain_outer(group: Sequence[Updated], _train: TrainConfig, rate: float, _weight_decay: float) -> None:
    """The same without momentum; with a rate of 1 it is plain averaging of parameters."""
    for each in group:
        each.state["step"].add_(1)
        each.value.add_(each.gradient, alpha=-rate)


def _plain_sgd(group: Sequence[Updated], _train: TrainConfig, rate: float, weight_decay: float) -> None:
    """Stochastic gradient descent without momentum. Its only state is the number of updates."""
    for each in group:
        each.state["step"].add_(1)
        each.value.add_(each.gradient.add(each.value, alpha=weight_decay), alpha=-rate)


KINDS: dict[str, Kind] = {
    "adamw": Kind(ADAM_MOMENTS, _adamw),
    "muon": Kind(ADAM_MOMENTS, _adamw),
    "lamb": Kind(ADAM_MOMENTS, _lamb),
    "sgd": Kind((MOMENTUM,), _sgd),
}
"""The optimizer for each value of the manifest's train.optimizer."""
PIECEWISE: dict[str, Update] = {"adamw": _adamw_by_operations, "sgd": _sgd}
"""The update of a piece of a tensor, for those that change each number by itself."""
PLAIN_SGD = Kind((), _plain_sgd)
MUON = Kind((MOMENTUM,), _muon)
"""For matrices of layers. The other parameters of such a run have AdamW."""
OUTER, PLAIN_OUTER = Kind((OUTER_MOMENTUM,), _nesterov), Kind((), _plain_outer)
"""The optimizers of a step whose changes were made by local steps."""
OF_A_LAYER = "layers.0.weight", (1, 1)
"""Name and shape of a matrix that stands for all matrices of layers."""


def kind_of(train: TrainConfig, name: str = "", shape: Sequence[int] = ()) -> Kind:
    """The optimizer of a step for a parameter of this name and shape, by default for one that is in no layer.

    With local steps it is that of the averaged changes.
    """
    if train.local_batch:
        return _packed(OUTER, _nesterov, train) if train.outer_momentum else PLAIN_OUTER
    if train.optimizer == "muon" and is_layer_matrix(name, shape):
        return MUON
    kind = PLAIN_SGD if train.optimizer == "sgd" and not train.momentum else KINDS[train.optimizer]
    return _packed(kind, PIECEWISE.get(train.optimizer, kind.update), train)


def state_parts(train: TrainConfig, name: str = "", shape: Sequence[int] = ()) -> tuple[str, ...]:
    """The moments of a parameter that all peers of a stage have alike.

    With a synchronous beginning they are those of its optimizer, of which the first is the outer momentum once steps are local. It has that
    name: else such a state might be taken for that of a run without local steps.
    """
    if not train.local_batch:
        return kind_of(train, name, shape).parts
    at_first = kind_of(train.inner, name, shape).parts if train.local_steps_after else ()
    return (OUTER_MOMENTUM, *at_first[1:]) if train.outer_momentum or at_first else ()


def _packed(kind: Kind, update_piece: Update, train: TrainConfig) -> Kind:
    """With 8-bit moments, the kind that unpacks them piece by piece."""
    return Kind(kind.parts, _in_pieces(kind, update_piece)) if train.optimizer_bits == 8 else kind


def _in_pieces(kind: Kind, update_piece: Update) -> Update:
    """The update of a kind that changes each number by itself, with packed moments: no tensor's moments are unpacked whole."""

    def update(group: Sequence[Updated], train: TrainConfig, rate: float, weight_decay: float) -> None:
        for each in group:
            if not num_blocks(each.value.numel()):
                kind.update([each], train, rate, weight_decay)
                continue
            value, gradient, step = each.value.view(-1), each.gradient.view(-1), each.state["step"]
            added, chunk = dither(int(step), value.device), chunk_of(value.device)
            for first in range(0, len(value), chunk):
                piece = value[first : first + chunk]
                moments = {part: Unpacked(each.state, part, first, len(piece)) for part in kind.parts}
                state = {part: moment.values for part, moment in moments.items()} | {"step": step.clone()}
                update_piece([Updated(piece, gradient[first : first + chunk], state, each.computes_on)], train, rate, weight_decay)
                for moment in moments.values():
                    moment.pack(added)
            step.add_(1)

    return update


def _fresh_state(train: TrainConfig, name: str, shape: torch.Size, device: torch.device) -> dict[str, Tensor]:
    """Zeros: the state of one parameter. `step` is float32, as torch's fused AdamW requires."""
    state: dict[str, Tensor] = {}
    for part in state_parts(train, name, shape):
        if train.optimizer_bits == 8:
            blocks = num_blocks(shape.numel())
            state[part] = torch.zeros(shape, dtype=torch.uint8 if blocks else torch.float32, device=device)
            state[part + SCALE] = torch.zeros(blocks, device=device)
        else:
            state[part] = torch.zeros(shape, device=device)
    return state | {"step": torch.zeros((), device=device)}


def _check_shapes(
    what: str, expected: Mapping[str, tuple[int, ...]], given: Mapping[str, Tensor], alike: Mapping[str, Tensor] | None = None
) -> None:
    """With `alike`, the numbers have to be of the same type, too."""
    odd = sorted(expected.keys() ^ given.keys())
    if odd:
        raise ValueError(f"{what} {odd[0]} is {'missing' if odd[0] in expected else 'unknown'}")
    for name, shape in expected.items():
        found = given[name]
        if tuple(found.shape) != shape:
            raise ValueError(f"{what} {name} has shape {list(found.shape)}; it must be {list(shape)}")
        if alike is not None and found.dtype != alike[name].dtype:
            raise ValueError(f"{what} {name} is of {found.dtype}; it must be of {alike[name].dtype}")
