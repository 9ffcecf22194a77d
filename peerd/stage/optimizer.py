"""AdamW for one stage: the update every peer of a stage makes alike, and its state as named tensors."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from peerd.config.manifest import Manifest
from peerd.config.paths import cache_folder

# The first optimizer makes torch import its compiler, which makes a folder: not in the temporary one, where nobody removes it.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "torch"))

MOMENTS = ("exp_avg", "exp_avg_sq")


def build_optimizer(manifest: Manifest, parameters: Mapping[str, nn.Parameter]) -> torch.optim.AdamW:
    """AdamW over named parameters, with no weight decay on vectors (norms and biases).

    Fused: one kernel call per parameter on a CPU, elementwise everywhere, so what a parameter becomes does not depend on which
    others share its process. (`foreach` would group parameters, and so depend on the split.)
    """
    train = manifest.train
    matrices = [(name, parameter) for name, parameter in parameters.items() if parameter.dim() > 1]
    vectors = [(name, parameter) for name, parameter in parameters.items() if parameter.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=train.learning_rate,
        betas=(train.beta1, train.beta2),
        eps=train.epsilon,
        weight_decay=train.weight_decay,
        fused=True,
    )


def learning_rate_at(manifest: Manifest, step: int) -> float:
    """The rate of the update that ends step `step` (from 0): a linear rise over train.warmup_steps, then constant."""
    train = manifest.train
    if step + 1 >= train.warmup_steps:
        return train.learning_rate
    return train.learning_rate * (step + 1) / train.warmup_steps


def apply_update(optimizer: torch.optim.AdamW, manifest: Manifest, step: int, gradients: Mapping[str, Tensor]) -> None:
    """One AdamW step from the mean gradients over the step's microbatches, of any float type.

    Raises ValueError, with nothing changed, unless there is exactly one gradient of the right shape per parameter: a parameter
    left out would silently stay behind.
    """
    parameters = dict(_named_parameters(optimizer))
    _check_shapes("gradient", {name: tuple(parameter.shape) for name, parameter in parameters.items()}, gradients)
    for name, parameter in parameters.items():
        parameter.grad = gradients[name].to(device=parameter.device, dtype=parameter.dtype)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate_at(manifest, step)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def optimizer_tensors(optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """The optimizer's state as `<parameter>.exp_avg`, `.exp_avg_sq` and `.step`; zeros before the first step.

    The tensors are the live ones, on the parameters' device: clone what must outlast the next update.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in _named_parameters(optimizer):
        state = optimizer.state.get(parameter) or _fresh_state(parameter)
        tensors |= {f"{name}.{part}": state[part].detach() for part in (*MOMENTS, "step")}
    return tensors


def optimizer_spec(parameters: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of what `optimizer_tensors` gives for parameters of these shapes."""
    shapes = {f"{name}.{part}": shape for name, shape in parameters.items() for part in MOMENTS}
    return shapes | {f"{name}.step": () for name in parameters}


def load_optimizer_tensors(optimizer: torch.optim.AdamW, tensors: Mapping[str, Tensor]) -> None:
    """Set the state from what `optimizer_tensors` gave, on any device; the tensors are copied.

    Raises ValueError, with nothing changed, when a tensor is missing, unknown or of the wrong shape.
    """
    parameters = dict(_named_parameters(optimizer))
    _check_shapes("optimizer tensor", optimizer_spec({name: tuple(value.shape) for name, value in parameters.items()}), tensors)
    for name, parameter in parameters.items():
        state = _fresh_state(parameter)
        for part, value in state.items():
            value.copy_(tensors[f"{name}.{part}"])
        optimizer.state[parameter] = state


def _named_parameters(optimizer: torch.optim.AdamW) -> Iterator[tuple[str, nn.Parameter]]:
    for group in optimizer.param_groups:
        yield from zip(group["param_names"], group["params"], strict=True)


def _fresh_state(parameter: nn.Parameter) -> dict[str, Tensor]:
    """What torch itself creates at a fused AdamW's first step: the step counts on the parameter's device, in float32."""
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter, requires_grad=False),
        "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
    }


def _check_shapes(what: str, expected: Mapping[str, tuple[int, ...]], given: Mapping[str, Tensor]) -> None:
    odd = sorted(expected.keys() ^ given.keys())
    if odd:
        raise ValueError(f"{what} {odd[0]} is {'missing' if odd[0] in expected else 'unknown'}")
    for name, shape in expected.items():
        if tuple(given[name].shape) != shape:
            raise ValueError(f"{what} {name} has shape {list(given[name].shape)}; it must be {list(shape)}")
