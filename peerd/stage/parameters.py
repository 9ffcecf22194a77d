"""Operations on all of a stage's parameters: load them from a state by name, copy them, and average them as one vector."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from peerd.errors import BadMessageError
from peerd.models.stages import StageModule
from peerd.stage.accumulator import all_finite, views_of
from peerd.transfers import queues_copies


class OfKind(Mapping[str, Tensor]):
    """The tensors of one kind in a state, by their names within the kind; each is read when it is asked for."""

    def __init__(self, tensors: Mapping[str, Tensor], kind: str) -> None:
        self._tensors = tensors
        self._names = {name.removeprefix(f"{kind}/"): name for name in tensors if name.startswith(f"{kind}/")}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def by_kind(tensors: Mapping[str, Tensor], kinds: Iterable[str]) -> dict[str, Mapping[str, Tensor]]:
    """Group tensors called `kind/name` by kind, each under its name. Raises BadMessageError for an unknown kind."""
    groups: dict[str, Mapping[str, Tensor]] = {kind: OfKind(tensors, kind) for kind in kinds}
    for name in tensors:
        if "/" not in name or name.partition("/")[0] not in groups:
            raise BadMessageError(f"unknown tensor {name[:80]} in the state")
    return groups


def checked_state(module: StageModule, tensors: Mapping[str, Tensor], kinds: Iterable[str]) -> dict[str, Mapping[str, Tensor]]:
    """A state's tensors grouped `by_kind`. Raises BadMessageError if they do not fit the module or are not finite."""
    groups = by_kind(tensors, kinds)
    for kind in ("parameters", "previous", "ahead"):
        if kind == "parameters" or groups.get(kind):
            check_parameters(module, groups[kind])
    if not is_finite_state(tensors):
        raise BadMessageError("the state is not finite")
    return groups


def is_finite_state(tensors: Mapping[str, Tensor]) -> bool:
    """Whether a state can be trained on. The norm of a step that overflowed is infinite, and says so."""
    return all(all_finite([tensors[name]]) for name in tensors if not name.startswith("norms/"))


def check_parameters(module: StageModule, tensors: Mapping[str, Tensor]) -> None:
    """Raise BadMessageError unless these are all parameters of the module, by name and shape."""
    wanted = {name: (parameter.shape, parameter.dtype) for name, parameter in module.named_parameters()}
    if {name: (given.shape, given.dtype) for name, given in tensors.items()} != wanted:
        raise BadMessageError("the state's parameters are not this stage's")


def set_parameters(module: StageModule, tensors: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(tensors[name], non_blocking=queues_copies(parameter.device))


def copy_parameters(source: StageModule, target: StageModule) -> None:
    ours: list[Tensor] = [*target.parameters()]
    theirs: list[Tensor] = [*source.parameters()]
    with torch.no_grad():
        torch._foreach_copy_(ours, theirs)


def flat_parameters(module: StageModule, dtype: torch.dtype) -> Tensor:
    """All values in the parameters' order, [num_parameters] on the CPU: a peer's contribution to a parameter average."""
    return torch.cat([parameter.detach().to("cpu", dtype).flatten() for parameter in module.parameters()])


def set_mean_parameters(module: StageModule, flat_sum: Tensor, num_peers: int) -> Tensor:
    """Set the parameters to `flat_sum` / `num_peers`. A sum of equal values in double precision gives these values back.

    Returns [2] on the device: the squared norms of their change and of the mean. The processor does not wait for it.
    """
    named = dict(module.named_parameters())
    means = views_of(flat_sum / num_peers, {name: parameter.shape for name, parameter in named.items()})
    squares = []
    with torch.no_grad():
        for name, parameter in named.items():
            before = parameter.clone()
            parameter.copy_(means[name], non_blocking=queues_copies(parameter.device))
            squares.append(torch.stack([(parameter - before).pow_(2).sum(), parameter.pow(2).sum()]))
    return torch.stack(squares).sum(0)
