"""Gradients that went back to callers, kept for whoever has to do an earlier stage's part of a microbatch again.

What a peer had added to a step dies with it, and other peers of its stage compute that anew. Later stages hold their part still,
and need not: for the same step and microbatch the gradient is the same.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from peerd.config.codec import Codec
from peerd.wire.values import Call, TensorBytes

MOST_BYTES = 1 << 28
"""Of main memory, for the gradients of the steps under way; where they are more, the oldest are not kept."""


@dataclass(frozen=True, slots=True)
class Finished:
    gradient: TensorBytes
    generation: int
    """Of the parameters that it was computed with."""


class FinishedGradients:
    """Those of the last steps by (step, index), as they were sent. Put in by the executor's thread, looked for on the event loop."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._kept: dict[tuple[int, int], Finished] = {}
        self._lock = threading.Lock()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, step: int, index: int, gradient: TensorBytes, generation: int, oldest_step: int) -> None:
        """Of a microbatch done here. What is of steps before `oldest_step` goes."""
        with self._lock:
            for key in [key for key in self._kept if key[0] < oldest_step or key == (step, index)]:
                self._drop(key)
            self._kept[step, index] = Finished(gradient, generation)
            self.num_bytes += gradient.num_bytes
            while self.num_bytes > self._most_bytes:
                self._drop(next(iter(self._kept)))

    def find(self, call: Call, codec: Codec, generation: int) -> TensorBytes | None:
        """What the call asks for, where nothing else need be done for it, or None."""
        found = self._kept.get((call.step, call.index)) if call.asks_gradient_only and not call.evaluation else None
        if found is None or found.generation != generation or found.gradient.codec != codec:
            return None
        return found.gradient

    def _drop(self, key: tuple[int, int]) -> None:
        self.num_bytes -= self._kept.pop(key).gradient.num_bytes
