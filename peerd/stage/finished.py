"""Gradients that went back to callers, kept for peers that repeat an earlier stage's part of a microbatch.

When a peer dies, its part of a step is lost and other peers of its stage compute it again. Later stages still hold their part
and need not repeat it if the activations are the same to the bit: then the gradient that they sent is right. Peers whose
processors round differently send other activations, which are computed as usual.
"""

from __future__ import annotations

from dataclasses import dataclass

from peerd.config.codec import Codec
from peerd.policy.step.receipts import SignedPass
from peerd.stage.leaving import Leaving
from peerd.wire.messages import Call

MOST_BYTES = 1 << 28
"""Main memory for the gradients of current steps; above it the oldest are dropped."""


@dataclass(frozen=True, slots=True)
class Finished:
    gradient: Leaving
    inputs: bytes
    """Digest of the inputs that it was computed from."""
    generation: int
    """Generation of the parameters that it was computed with."""
    versions: tuple[bytes, ...] = ()
    """With local steps, those of this and the later stages with which it was computed."""
    signed_below: SignedPass | None = None
    """Where peers audit each other, what the next stage's peer has signed of what it was computed from."""


class FinishedGradients:
    """Sent gradients of the last steps by (step, index). Only the executor's thread adds them; readers need no lock."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._kept: dict[tuple[int, int], Finished] = {}
        self.num_bytes = 0

    def put(self, step: int, index: int, finished: Finished, oldest_step: int) -> None:
        """Keep the gradient of a microbatch. Gradients from before `oldest_step` or of other parameters are dropped."""
        for key, each in list(self._kept.items()):
            if key[0] < oldest_step or each.generation != finished.generation or key == (step, index):
                self._drop(key)
        self._kept[step, index] = finished
        self.num_bytes += finished.gradient.num_bytes
        while self.num_bytes > self._most_bytes:
            self._drop(next(iter(self._kept)))

    def find(self, call: Call, codec: Codec, generation: int) -> Finished | None:
        """The gradient that the call asks for, if its inputs are the same and nothing else must be done for it; else None."""
        found = self._kept.get((call.step, call.index)) if call.asks_gradient_only and not call.evaluation else None
        if found is None or found.generation != generation or found.gradient.codec != codec:
            return None
        return found

    def _drop(self, key: tuple[int, int]) -> None:
        self.num_bytes -= self._kept.pop(key).gradient.num_bytes
