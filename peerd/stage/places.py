"""Where a stage's tensors lie: on the device that computes, or in the machine's memory. No other part moves parameters between the two.

A peer that offloads keeps on its device the parameters of this step and the sums of gradients. Parameters that are set aside, the
optimizer's state and what a round takes are in the machine's memory.
"""

from __future__ import annotations

import copy
import weakref

import torch
from torch import Tensor, nn

from peerd.errors import WrongStateError
from peerd.models.module import StageModule


class Places:
    """Every method is a job for the executor's thread."""

    def __init__(self, device: torch.device, offloads: bool = False) -> None:
        self.device = device
        self.offloads = offloads
        self._aside: weakref.WeakSet[StageModule] = weakref.WeakSet()
        """The modules whose parameters are not on the device."""
        self._visitor: tuple[StageModule, StageModule] | None = None
        """A module that was set aside, and its copy on the device."""

    @property
    def host(self) -> torch.device:
        """Where what is not computed with now belongs."""
        return torch.device("cpu") if self.offloads else self.device

    def set_aside(self, module: StageModule) -> StageModule:
        """A copy of a module, on the host."""
        copied = _copied_to(module, self.host)
        if self.offloads:
            self._aside.add(copied)
        return copied

    def to_compute(self, module: StageModule) -> StageModule:
        """The module, or a copy on the device of one that was set aside. There is one such copy at most: that for another module goes.

        Raises WrongStateError if the device has no memory for it.
        """
        if module not in self._aside:
            self.leave()
            return module
        if self._visitor is None or self._visitor[0] is not module:
            self.leave()
            try:
                self._visitor = module, _copied_to(module, self.device)
            except torch.OutOfMemoryError:
                raise WrongStateError("the device has no memory for parameters that are set aside") from None
        return self._visitor[1]

    def leave(self) -> None:
        """What was set aside is not computed with any more, or changes."""
        self._visitor = None


def _copied_to(module: StageModule, device: torch.device) -> StageModule:
    """A copy whose parameters and buffers are on `device`; none of them is copied elsewhere first."""
    found: dict[int, Tensor] = {}
    for buffer in module.buffers():
        found[id(buffer)] = buffer.detach().to(device, copy=True)
    for parameter in module.parameters():
        found[id(parameter)] = nn.Parameter(parameter.detach().to(device, copy=True), requires_grad=parameter.requires_grad)
    return copy.deepcopy(module, found)
