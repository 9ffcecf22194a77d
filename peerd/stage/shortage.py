"""What a stage does when its device has no memory for a pass: it holds fewer microbatches, then no graphs, and at last gives the stage up.

Another process may take the memory at any time, so no estimate keeps this from happening.
"""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import structlog
import torch

from peerd.errors import RemoteError
from peerd.transfers import is_out_of_memory

if TYPE_CHECKING:  # the checkup chooses a device, also where a library that states need is missing
    from peerd.stage.results import HeldMicrobatch
    from peerd.stage.state import StageState

Result = TypeVar("Result")
LOG = structlog.get_logger()


def empty_cache(device: torch.device) -> None:
    """Give back what torch keeps of the device's memory, and of the machine's that is pinned for it, though no tensor lies in it.

    Nothing computes on it meanwhile.
    """
    if device.type == "cuda" and hasattr(torch._C, "_cuda_clearCublasWorkspaces"):
        torch._C._cuda_clearCublasWorkspaces()  # 32 MB for each thread that has multiplied matrices on a large card
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
    if device.type == "cuda":
        _empty_host_cache()


def _empty_host_cache() -> None:
    """Torch keeps pinned memory, which no other program can use. Its function has had two places; without an allocator it crashes."""
    for place, name in ((torch.accelerator, "empty_host_cache"), (torch._C, "_host_emptyCache")):
        if hasattr(place, name):
            getattr(place, name)()
            return


class Shortage:
    """One stage's want of memory. `through` is for the executor's thread; the rest may be read anywhere."""

    def __init__(self, state: StageState) -> None:
        self._state = state
        self._held: weakref.WeakSet[HeldMicrobatch] = weakref.WeakSet()
        self.most_slots: int | None = None
        """The most microbatches that the stage may hold at once by what was learned; None: memory has sufficed."""
        self.times = 0
        """How often the memory did not suffice."""
        self.told = ""
        """What was done about it last, in words."""
        self.is_hopeless = False
        """Not even one microbatch without a graph could be computed."""

    def holds(self, batch: HeldMicrobatch) -> None:
        """Note a microbatch whose graph can be let go of."""
        self._held.add(batch)

    def through(self, work: Callable[[], Result], slots: int, refusal: RemoteError) -> Result:
        """Do this work; where the memory does not suffice, once more without any graph that is kept, and economise from then on.

        `slots`: how many microbatches the stage holds at once. Raises `refusal` if the second attempt fails as well.
        """
        for is_last_try in (False, True):
            try:
                return work()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                traceback.clear_frames(error.__traceback__)  # they hold the tensors of the pass
            self._economise(slots, is_last_try=is_last_try)
        raise refusal

    def _economise(self, slots: int, *, is_last_try: bool) -> None:
        before = self.told
        if is_last_try:
            self.is_hopeless = self.most_slots == 1 and not self._state.keep_graph
        else:
            self.times += 1
            if slots > 1:
                self.most_slots = slots // 2
                self.told = f"the device's memory did not suffice: {self.most_slots} microbatches at once instead of {slots}"
            elif self._state.keep_graph:
                self._state.keep_graph = False
                self.told = "the device's memory did not suffice: forward passes are computed again"
            self.most_slots = self.most_slots or 1
        if self.is_hopeless:
            self.told = "the device's memory does not suffice for one microbatch of this stage"
        if self.told != before:
            LOG.warning("out of memory", done=self.told)
        self.drop_graphs()
        empty_cache(self._state.holdings.device)

    def drop_graphs(self) -> None:
        """Let go of the graphs of microbatches that wait for their gradients: their forward passes are computed again."""
        for batch in list(self._held):
            batch.output = batch.module = None
