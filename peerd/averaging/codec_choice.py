"""The leader of a round chooses its codec where the run says `auto`: the most exact one that keeps averaging a small share of a step.

All members must use the same codec, otherwise replicas would differ, so the roster names it. A stage does nothing else while it
averages. Once a round takes a tenth of a step it is no bottleneck any more, and stronger compression would gain nothing.
"""

from __future__ import annotations

from peerd.config.codec import Allowed, Codec
from peerd.policy.route.compressing import choose_rung

AVERAGING_SHARE = 0.1
"""Time for a round, as a share of the rest of the step."""


class RoundCodec:
    """The codec choice of one stage. Every member takes part in every round and measures the same times, so any member can lead next."""

    def __init__(self, allowed: Allowed) -> None:
        self._allowed = allowed
        self._exchange: tuple[Codec, float] | None = None
        """The codec of the last round, and its duration in seconds."""
        self._applied_s: float | None = None
        self._step_s: float | None = None

    def exchanged(self, codec: Codec, took_s: float) -> None:
        """Record a finished round with other members: its codec and its duration."""
        self._exchange = (codec, took_s)

    def applied(self, now_s: float) -> None:
        """Record that this peer applied an average at `now_s`; the time between two of these is the duration of a step."""
        self._step_s = now_s - self._applied_s if self._applied_s is not None else None
        self._applied_s = now_s

    def codec(self, length: int) -> str:
        """Return the codec to propose for `length` values, by its name in a roster; empty where the manifest fixes it."""
        if not self._allowed.is_auto:
            return ""
        codecs = self._allowed.codecs
        if self._exchange is None or self._step_s is None:
            return str(self._allowed.most_exact)
        used, took_s = self._exchange
        sizes = [codec.num_bytes(length) for codec in codecs]
        rest_s = max(self._step_s - took_s, 0.0)
        rate = used.num_bytes(length) / took_s if took_s > 0 else None
        return str(codecs[choose_rung(sizes, rate, AVERAGING_SHARE * rest_s, codecs.index(used)).rung])
