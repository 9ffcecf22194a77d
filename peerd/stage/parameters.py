"""A stage's parameters as a whole: taken over from a state by name, copied, and averaged between peers as one vector."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from peerd.errors import BadMessageError
from peerd.models.stages import StageModule
from peerd.stage.accumulator import views_of


def by_kind(tensors: Mapping[str, Tensor], kinds: Iterable[str]) -> dict[str, dict[str, Tensor]]:
    """A state's tensors, called `kind/name`, sorted by kind. BadMessageError for one of another kind."""
    groups: dict[str, dict[str, Tensor]] = {kind: {} for kind in kinds}
    for name, value in tensors.items():
        kind, _, rest = name.partition("/")
        if kind not in groups:
            raise BadMessageError(f"unknown tensor {name[:80]} in the state")
        groups[kind][rest] = value
    return groups


def check_fits(module: StageModule, tensors: Mapping[str, Tensor]) -> None:
    """BadMessageError unless these are the module's names, shapes and types."""
    wanted = {name: (parameter.shape, parameter.dtype) for name, parameter in module.named_parameters()}
    if {name: (given.shape, given.dtype) for name, given in tensors.items()} != wanted:
        raise BadMessageError("the state's parameters are not this stage's")


def set_parameters(module: StageModule, tensors: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(tensors[name])


def copy_parameters(source: StageModule, target: StageModule) -> None:
    with torch.no_grad():
        for ours, theirs in zip(target.parameters(), source.parameters(), strict=True):
            ours.copy_(theirs)


def flat_parameters(module: StageModule, dtype: torch.dtype) -> Tensor:
    """All values in the parameters' order, [num_parameters] on the CPU: a peer's share of a parameter average."""
    return torch.cat([parameter.detach().to("cpu", dtype).flatten() for parameter in module.parameters()])


def set_mean_parameters(module: StageModule, flat_sum: Tensor, num_peers: int) -> None:
    """From the sum of so many peers' flat parameters. Sums of equal values in double precision give these values back."""
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    set_parameters(module, views_of(flat_sum / num_peers, shapes))
