"""Tensors of calls that go to the device before their job's turn, so that the thread that computes need not wait for them.

A device without copy streams, such as a processor, gets them in the job.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog
import torch
from torch import Tensor

from peerd.transfers import has_copy_streams, is_out_of_memory
from peerd.wire.messages import TensorBytes
from peerd.wire.tensors import decode, decode_beside

LOG = structlog.get_logger()


class Arriving:
    """One tensor of a call, decoded and on the device when it is taken."""

    def __init__(self, value: TensorBytes, device: torch.device) -> None:
        """`value` has its chunks."""
        self._value = value
        self._device = device
        self._finish: Callable[[], Tensor] | None = None
        self.digest = b""
        """The hash of all that came with it, where a gradient is given back for it."""

    async def begin(self) -> None:
        """Begin the copy beside the event loop, where there is a stream for it. Raises BadMessageError if the tensor cannot be decoded."""
        if has_copy_streams(self._device):
            await asyncio.to_thread(self.start)

    def start(self) -> None:
        """The same on this thread, whichever it is."""
        if not has_copy_streams(self._device):
            return
        try:
            self._finish = decode_beside(self._value, self._device)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            LOG.debug("no memory to copy a tensor before its turn")  # the job finds some, or tells

    def take(self) -> Tensor:
        """Return the tensor, on the thread that computes. It is not kept here: a second call decodes the bytes again."""
        finish, self._finish = self._finish, None
        return finish() if finish is not None else decode(self._value, self._device)
