"""Lends a stage's tensors to another thread where they are. Nothing is copied, and nothing changes them until they are given back."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Mapping

import structlog
from torch import Tensor

TOLD_S = 1.0
"""A change that waits longer for a reader is logged."""
LOG = structlog.get_logger()


class Lease:
    """The tensors of a state, for one reader. It ends with `end`, or when nothing refers to it any more."""

    def __init__(self, tensors: Mapping[str, Tensor], leases: Leases) -> None:
        self.tensors = tensors
        self.end = weakref.finalize(self, leases.ended)


class Leases:
    """Those that are out. Any thread may lend and give back; the thread that changes the tensors waits."""

    def __init__(self) -> None:
        self._guard = threading.Condition()
        self._num_out = 0

    def lend(self, tensors: Mapping[str, Tensor]) -> Lease:
        with self._guard:
            self._num_out += 1
        return Lease(tensors, self)

    def ended(self) -> None:
        with self._guard:
            self._num_out -= 1
            self._guard.notify_all()

    def wait(self) -> None:
        """Return once nobody reads the tensors, so that they may change."""
        began_s = time.monotonic()
        with self._guard:
            self._guard.wait_for(lambda: not self._num_out)
        waited_s = time.monotonic() - began_s
        if waited_s > TOLD_S:
            LOG.warning("the step waited for its checkpoint: the disk is slow", seconds=round(waited_s, 1))
