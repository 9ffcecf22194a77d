"""Looks at what a pass computed for values that are not finite, once the device is waited for anyway.

A look of its own would make the processor wait for the device each time, while the device then waits for its next work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from peerd.errors import RemoteError
from peerd.stage.accumulator import LARGEST, peak_of
from peerd.transfers import QueuedFetch, has_copy_streams, is_out_of_memory, to_host

Look = tuple[Tensor, float, RemoteError | None]
"""A peak, the most that it may be, and the error where it is more."""


class Checks:
    """The largest magnitudes of a pass's tensors. They stay on the device until `fetch`."""

    def __init__(self) -> None:
        self._looks: list[Look] = []

    def finite(self, tensors: Sequence[Tensor], error: RemoteError) -> None:
        """Raise this error, in `fetch`, if a value is not finite."""
        self._look(tensors, math.nextafter(math.inf, 0), error)

    def usable(self, tensors: Sequence[Tensor], error: RemoteError | None) -> None:
        """Raise this error, in `fetch`, if a value has overflowed; without one, only note it in what `fetch` returns."""
        self._look(tensors, LARGEST, error)

    def _look(self, tensors: Sequence[Tensor], most: float, error: RemoteError | None) -> None:
        if tensors:  # of none the peak would lie in the machine's memory, and not on the device
            self._looks.append((peak_of(tensors), most, error))

    def leave(self) -> Callable[[], bool]:
        """Have what was looked at leave the device, beside what that computes next where it can. Nothing is looked at twice.

        The function that is returned waits for it, on any thread, and returns and raises what `fetch` does. Without memory for a copy
        beside the computing it fetches.
        """
        looks = self._looks
        if not looks:
            return lambda: False
        if not has_copy_streams(looks[0][0].device):
            return self._fetch_all
        try:
            coming = QueuedFetch(torch.stack([peak for peak, _, _ in looks]))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return self._fetch_all
        self._looks = []
        return lambda: _judged(looks, coming.take().unbind())

    def _fetch_all(self) -> bool:
        return self.fetch()[0]

    def fetch(self, *wanted: Tensor) -> tuple[bool, list[Tensor]]:
        """Return whether a value had overflowed, and the `wanted` tensors in the machine's memory: one wait for all.

        Raises the first error for which there is a reason. Nothing is looked at twice.
        """
        looks, self._looks = self._looks, []
        found = to_host(*[peak for peak, _, _ in looks], *wanted)
        return _judged(looks, found[: len(looks)]), found[len(looks) :]


def _judged(looks: Sequence[Look], found: Sequence[Tensor]) -> bool:
    """Whether a value had overflowed, by the peaks in the machine's memory. Raises the first error for which there is a reason."""
    exceeded = [not float(peak) <= most for peak, (_, most, _) in zip(found, looks, strict=True)]
    for is_exceeded, (_, _, error) in zip(exceeded, looks, strict=True):
        if is_exceeded and error is not None:
            raise error
    return any(exceeded)
