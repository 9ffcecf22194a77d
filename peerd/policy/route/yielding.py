"""When a chunk that can wait leaves an uplink: states and data for joiners go when training has nothing to send.

Microbatches, averages and news go at once. Of what they gave to the line, as much is taken to have left as the line carries at its measured
rate. A chunk for a joiner waits for the rest. While a round is exchanged the line is training's all the time: the words about what has
arrived, without which nobody sends more, would wait behind such chunks. Where training always has something to send, the joiner still gets
a small share of the line, so that it comes some day, and does not take its donor for dead.
"""

from __future__ import annotations

import math

LEAST_SHARE = 0.1
"""The share of the line that joiners get while training would fill it."""
IN_FLIGHT_BYTES = 16 << 20
"""Buffers on the way (gRPC, libp2p, TCP) take up to so much before the receiver has any of it, and go on in steps of up to this size."""
LEAST_BYTES_PER_S = 32_000.0
"""What joiners get at least, twice of what makes a stream count as broken (`links.LEAST_BYTES_PER_S`)."""


class UplinkUse:
    """What leaves one uplink. Rates are bytes per second, times are seconds on the caller's clock."""

    def __init__(self) -> None:
        self.idle_s = -math.inf
        """When all that was given to the line so far has left."""
        self._free_s = -math.inf
        """When all of it that is training's has left."""
        self._due_s = -math.inf
        """When the next chunk that can wait may leave, although training has something to send."""
        self.num_exchanges = 0
        """Exchanges of rounds with others that are under way."""

    def sends(self, num_bytes: int, rate: float, now_s: float) -> None:
        """Training gives so many bytes to the line."""
        self._leaves(num_bytes, rate, now_s)
        self._free_s = self.idle_s

    def wait_s(self, now_s: float) -> float:
        """How long a chunk has to wait still; 0: it may leave now. Ask again then, since training may have sent more."""
        return max(0.0, (self._due_s if self.num_exchanges else min(self._free_s, self._due_s)) - now_s)

    def gives(self, num_bytes: int, rate: float, now_s: float) -> None:
        """A chunk that could wait leaves now."""
        self._leaves(num_bytes, rate, now_s)
        self._due_s = now_s + num_bytes / least_rate(rate)

    def _leaves(self, num_bytes: int, rate: float, now_s: float) -> None:
        self.idle_s = min(max(self.idle_s, now_s) + num_bytes / rate, now_s + max(num_bytes, IN_FLIGHT_BYTES) / rate)


def least_rate(rate: float) -> float:
    """What all joiners together get of a line of this rate at least, in bytes per second."""
    return max(LEAST_SHARE * rate, LEAST_BYTES_PER_S)
