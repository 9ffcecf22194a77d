"""Operations on all of a stage's parameters: load them from a state by name, copy them, and average them as one vector."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from peerd.errors import BadMessageError
from peerd.models.stages import StageModule
from peerd.stage.accumulator import all_finite
from peerd.transfers import PIECE_BYTES, fetch_into, queues_copies


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


def flat_parameters(module: StageModule, start: int, into: Tensor) -> None:
    """Copy the values from `start` on, in the parameters' order, into a vector: a peer's contribution to a parameter average.

    On a device as many as are copied at once are put together first: with a copy for each parameter the processor would wait for each.
    """
    for piece in torch.split(into, PIECE_BYTES // into.itemsize):
        values = [values for _, values in _within(module, start, len(piece))]
        fetch_into(piece, values[0] if len(values) == 1 else torch.cat(values))
        start += len(piece)


def take_drift_back(module: StageModule, previous: StageModule, means: Tensor, start: int, num_updates: int) -> Tensor:
    """Move the parameters from `start` on by what those `previous` to the last update were off `means` [n].

    They move no further than `num_updates` updates like the last one would have moved them: so far unlike devices do not drift in that
    time, and a member that says false values of its own gains no more by it than by false gradients. Where they would, they stay.
    Returns [2] on the device: the squared norms of how far they were off, and of the means. The processor does not wait for it.
    """
    pieces, squares = [], []
    with torch.no_grad():
        both = zip(_within(module, start, len(means)), _within(previous, start, len(means)), strict=True)
        for (place, now), (_, before) in both:
            own = before.to(now.device, non_blocking=queues_copies(now.device))
            mean = means[place : place + len(now)].to(now.device, now.dtype, non_blocking=queues_copies(now.device))
            apart = mean - own
            pieces.append((now, apart))
            squares.append(torch.stack([apart.square().sum(), mean.square().sum(), (now - own).square().sum()]))
        if not squares:
            return torch.zeros(2)
        off, size, moved = torch.stack(squares).sum(0)
        is_near = off <= num_updates**2 * moved
        for now, apart in pieces:
            now += torch.where(is_near, apart, 0.0)
    return torch.stack([off, size])


def _within(module: StageModule, start: int, length: int) -> Iterator[tuple[int, Tensor]]:
    """The parameters' values from `start` on, up to `length` of them: each run with its place among these."""
    begin = 0
    for parameter in module.parameters():
        first, last = max(start, begin), min(start + length, begin + parameter.numel())
        if first < last:
            yield first - start, parameter.detach().view(-1)[first - begin : last - begin]
        begin += parameter.numel()
