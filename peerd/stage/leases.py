"""Lends a stage's tensors to another thread where they are. Nothing changes them until they are given back.

A device's tensors that are about to change are copied to the machine's memory first, if it has room: the reader goes on with the copies.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping

import psutil
import structlog
from torch import Tensor

from peerd.stage.blocks import vector
from peerd.transfers import fetch_into

TOLD_S = 1.0
"""A change that waits longer for a reader is logged."""
ROOM_SHARE = 0.5
"""Of the machine's available memory; copies for readers take no more."""
LOG = structlog.get_logger()


class LentTensors(Mapping[str, Tensor]):
    """A state's tensors: those of a stage, or from some moment on copies of them, which are equal.

    A tensor of a device may change once its copy is here. Whoever reads one looks again afterwards: if the same tensor is still here, it
    had not changed (`wire.tensors.bodies_of`).
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def device_bytes(self) -> int:
        return sum(value.nbytes for value in self._tensors.values() if value.device.type != "cpu")

    def copy_to_host(self) -> None:
        for name, value in self._tensors.items():
            if value.device.type != "cpu":
                copied = vector(value.numel(), value.dtype)
                fetch_into(copied, value.contiguous().view(-1))
                self._tensors[name] = copied.view(value.shape)


class Lease:
    """The tensors of a state, for one reader. It ends with `end`, or when nothing refers to it any more."""

    def __init__(self, tensors: LentTensors, ended: Callable[[], None]) -> None:
        self.tensors = tensors
        self.end = weakref.finalize(self, ended)


class Leases:
    """Those that are out. Any thread may lend and give back; the thread that changes the tensors waits."""

    def __init__(self) -> None:
        self._guard = threading.Condition()
        self._num_lent = 0
        self._out: dict[int, tuple[LentTensors, bool]] = {}
        """Those that hold up a change, by their numbers, and whether copies of a device's tensors would let it go on."""

    def lend(self, tensors: Mapping[str, Tensor], changes_on_device_only: bool = False) -> Lease:
        """`changes_on_device_only`: of these tensors, those in the machine's memory never change."""
        lent = LentTensors(tensors)
        with self._guard:
            number = self._num_lent = self._num_lent + 1
            self._out[number] = lent, changes_on_device_only
        return Lease(lent, lambda: self._ended(number))

    def _ended(self, number: int) -> None:
        with self._guard:
            self._out.pop(number, None)
            self._guard.notify_all()

    def wait(self) -> None:
        """Return once nobody reads the tensors where they are, so that they may change."""
        with self._guard:
            out = dict(self._out)
        for number, (lent, is_enough) in out.items():
            if is_enough and lent.device_bytes <= ROOM_SHARE * psutil.virtual_memory().available:
                lent.copy_to_host()
                self._ended(number)
        began_s = time.monotonic()
        with self._guard:
            self._guard.wait_for(lambda: not self._out)
        waited_s = time.monotonic() - began_s
        if waited_s > TOLD_S:
            LOG.warning("the step waited for its checkpoint: the disk is slow", seconds=round(waited_s, 1))
