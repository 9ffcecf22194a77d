"""Gradients that went back to callers, kept for whoever has to do an earlier stage's part of a microbatch again.

What a peer had added to a step dies with it, and other peers of its stage compute that anew. Later stages hold their part still,
and need not, where the activations are the same to the bit: then the gradient is that of what they have added. Peers whose
processors round otherwise send others, which are computed with.
"""

from __future__ import annotations

from dataclasses import dataclass

from peerd.config.codec import Codec
from peerd.wire.messages import Call, TensorBytes

MOST_BYTES = 1 << 28
"""Of main memory, for the gradients of the steps under way; where they are more, the oldest are not kept."""


@dataclass(frozen=True, slots=True)
class Finished:
    gradient: TensorBytes
    inputs: bytes
    """Digest of what it was computed from."""
    generation: int
    """Of the parameters that it was computed with."""


class FinishedGradients:
    """Those of the last steps by (step, index), as they were sent. Only the executor's thread puts them in; looking takes no lock."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._kept: dict[tuple[int, int], Finished] = {}
        self.num_bytes = 0

    def put(self, step: int, index: int, finished: Finished, oldest_step: int) -> None:
        """Of a microbatch done here. What is of steps before `oldest_step` or of other parameters goes."""
        for key, each in list(self._kept.items()):
            if key[0] < oldest_step or each.generation != finished.generation or key == (step, index):
                self._drop(key)
        self._kept[step, index] = finished
        self.num_bytes += finished.gradient.num_bytes
        while self.num_bytes > self._most_bytes:
            self._drop(next(iter(self._kept)))

    def find(self, call: Call, codec: Codec, generation: int) -> Finished | None:
        """What the call asks for, if its inputs are the same, where nothing else need be done for it; or None."""
        found = self._kept.get((call.step, call.index)) if call.asks_gradient_only and not call.evaluation else None
        if found is None or found.generation != generation or found.gradient.codec != codec:
            return None
        return found

    def _drop(self, key: tuple[int, int]) -> None:
        self.num_bytes -= self._kept.pop(key).gradient.num_bytes
