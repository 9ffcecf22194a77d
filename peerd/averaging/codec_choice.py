"""What a round's leader names as its codec where the run says `auto`: gentle while averaging takes a small share of the step.

All members must use the same one, or replicas would differ, so it is part of the roster. While a stage averages nothing else is done;
a round that takes a tenth of a step is no bottleneck any more, and the members compress no further than that.
"""

from __future__ import annotations

from peerd.config.codec import Allowed, Codec
from peerd.policy.route.compressing import choose_rung

AVERAGING_SHARE = 0.1
"""Of the rest of a step."""


class RoundCodec:
    """One stage's. Every member takes part in every round and measures the same, so it does not matter who leads next."""

    def __init__(self, allowed: Allowed) -> None:
        self._allowed = allowed
        self._exchange: tuple[Codec, float] | None = None
        """What the last round travelled as, and the seconds it took."""
        self._applied_s: float | None = None
        self._step_s: float | None = None

    def exchanged(self, codec: Codec, took_s: float) -> None:
        """A round with others came to its end."""
        self._exchange = (codec, took_s)

    def applied(self, now_s: float) -> None:
        """A step is over."""
        self._step_s = now_s - self._applied_s if self._applied_s is not None else None
        self._applied_s = now_s

    def codec(self, length: int) -> str:
        """What I propose for so many values, as the roster names it; empty where the manifest says it."""
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
