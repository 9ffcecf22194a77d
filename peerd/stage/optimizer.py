"""AdamW for one stage: the update every peer of a stage makes alike, and its state as named tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from peerd.config.manifest import Manifest, TrainConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW:
    """AdamW (Loshchilov and Hutter 2019) over named parameters, with no weight decay on vectors (norms and biases).

    Fused: one kernel call per parameter on a CPU, elementwise everywhere, so what a parameter becomes does not depend on which
    others share its process. (`foreach` would group parameters, and so depend on the split.)

    Calls torch's function and not its class, which imports torch's compiler: 0.9 s and 70 MB of every daemon's start.
    """

    def __init__(self, manifest: Manifest, parameters: Mapping[str, nn.Parameter]) -> None:
        self._train = manifest.train
        self._parameters = dict(parameters)
        self._shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        self._state = {name: _fresh_state(parameter) for name, parameter in parameters.items()}

    @torch.no_grad()
    def update(self, step: int, gradients: Mapping[str, Tensor]) -> None:
        """One update from the mean gradients over step `step`'s microbatches, of any float type.

        Raises ValueError, with nothing changed, unless there is exactly one gradient of the right shape per parameter: a parameter
        left out would silently stay behind.
        """
        _check_shapes("gradient", self._shapes, gradients)
        matrices = [name for name, parameter in self._parameters.items() if parameter.dim() > 1]
        vectors = [name for name, parameter in self._parameters.items() if parameter.dim() <= 1]
        for names, weight_decay in ((matrices, self._train.weight_decay), (vectors, 0.0)):
            parameters = [self._parameters[name] for name in names]
            adamw(
                [*parameters],
                [
                    gradients[name].to(device=parameter.device, dtype=parameter.dtype)
                    for name, parameter in zip(names, parameters, strict=True)
                ],
                [self._state[name]["exp_avg"] for name in names],
                [self._state[name]["exp_avg_sq"] for name in names],
                [],
                [self._state[name]["step"] for name in names],
                lr=learning_rate_at(self._train, step),
                beta1=self._train.beta1,
                beta2=self._train.beta2,
                eps=self._train.epsilon,
                weight_decay=weight_decay,
                fused=True,
                foreach=False,
                amsgrad=False,
                maximize=False,
            )

    def tensors(self) -> dict[str, Tensor]:
        """The state as `<parameter>.exp_avg`, `.exp_avg_sq` and `.step`; zeros before the first step.

        The tensors are the live ones, on the parameters' device: clone what must outlast the next update.
        """
        return {f"{name}.{part}": value for name, state in self._state.items() for part, value in state.items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the state from what `tensors` gave, on any device; the tensors are copied.

        Raises ValueError, with nothing changed, when a tensor is missing, unknown or of the wrong shape.
        """
        _check_shapes("optimizer tensor", optimizer_spec(self._shapes), tensors)
        for name, value in self.tensors().items():
            value.copy_(tensors[name])


def learning_rate_at(train: TrainConfig, step: int) -> float:
    """The rate of the update that ends step `step` (from 0): a linear rise over the warm-up, then constant."""
    rising = min(step + 1, train.warmup_steps)
    return train.learning_rate * (rising / train.warmup_steps if train.warmup_steps else 1.0)


def optimizer_spec(parameters: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the state's tensors for parameters of these shapes."""
    shapes = {f"{name}.{part}": shape for name, shape in parameters.items() for part in MOMENTS}
    return shapes | {f"{name}.step": () for name in parameters}


def _fresh_state(parameter: nn.Parameter) -> dict[str, Tensor]:
    """What torch itself creates at a fused AdamW's first step: the step counts on the parameter's device, in float32."""
    return {
        "exp_avg": torch.zeros_like(parameter, requires_grad=False),
        "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
    }


def _check_shapes(what: str, expected: Mapping[str, tuple[int, ...]], given: Mapping[str, Tensor]) -> None:
    odd = sorted(expected.keys() ^ given.keys())
    if odd:
        raise ValueError(f"{what} {odd[0]} is {'missing' if odd[0] in expected else 'unknown'}")
    for name, shape in expected.items():
        if tuple(given[name].shape) != shape:
            raise ValueError(f"{what} {name} has shape {list(given[name].shape)}; it must be {list(shape)}")
