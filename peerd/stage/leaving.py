"""Tensors of results that leave the device after their job, so that the thread that computes need not wait for them.

A device without copy streams, such as a processor, gives them in the job.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import structlog
from torch import Tensor

from peerd.config.codec import Codec
from peerd.stage.checks import Checks
from peerd.transfers import QueuedFetch, has_copy_streams, is_out_of_memory
from peerd.wire.messages import TensorBytes
from peerd.wire.tensors import Parcel

LOG = structlog.get_logger()


class Leaving:
    """One tensor of a result, encoded with a codec."""

    def __init__(self, codec: Codec, *, ahead: bool = False) -> None:
        """`ahead`: the thread that computes may go on before the device has made it."""
        self.codec = codec
        self._ahead = ahead
        self._parcel = Parcel(codec)
        self._coming: QueuedFetch | None = None
        self._judge: Callable[[], bool] | None = None
        """Waits for the device and raises an error if there is something wrong with the result."""
        self._value: TensorBytes | None = None
        self._guard = threading.Lock()
        """Held by the one thread that waits for the copy."""
        self.num_bytes = 0
        """What it takes."""
        self.made_s = 0.0
        """When the device had made it, where this thread went on before."""

    def send(self, tensor: Tensor, checks: Checks, meanwhile: Callable[[], None] = lambda: None) -> bool:
        """Pack a tensor on its device, in the job, and begin its copy; look at what is to be looked at.

        Returns whether a value had overflowed, and raises the errors of `checks`: here, or with `ahead` where the value is taken.
        `meanwhile` is called before the device is waited for.
        """
        packed = self._parcel.pack(tensor)
        self.num_bytes = packed.nbytes
        if not has_copy_streams(packed.device):
            meanwhile()
            return self._fetch(packed, checks)
        judge = checks.leave()  # first: a device copies one thing after another
        try:
            self._coming = QueuedFetch(packed)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            LOG.debug("no pinned memory for a result")
            return judge() | self._fetch(packed, checks)
        if self._ahead:
            self._judge = judge
            return False
        meanwhile()
        return judge()

    def _fetch(self, packed: Tensor, checks: Checks) -> bool:
        overflowed, (flat,) = checks.fetch(packed)
        self._value = self._parcel.encoded(flat)
        return overflowed

    @property
    def is_under_way(self) -> bool:
        """Whether this thread went on before the device had made it."""
        return self._ahead and self._value is None

    @property
    def is_begun(self) -> bool:
        return self._coming is not None or self._value is not None

    async def value(self) -> TensorBytes:
        """Return its bytes, once they are in the machine's memory. Raises what is wrong with it."""
        return self._value if self._value is not None else await asyncio.to_thread(self.wait)

    def wait(self) -> TensorBytes:
        """The same on a thread that may wait."""
        with self._guard:
            if self._value is None:
                if self._coming is None:
                    raise ValueError("nothing was sent")
                if self._judge is not None:
                    self._judge()
                self.made_s = time.monotonic() if self._ahead else 0.0
                self._value = self._parcel.encoded(self._coming.take())
                self._coming = None
            return self._value
