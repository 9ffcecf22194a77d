"""Which of two ways to a peer its tensors take: straight to its port by TLS, or through the tunnel. By what was measured over each.

By TLS fewer processes touch a byte, so that way is taken where it opens. But a router or provider may treat the two ports
differently, so a way that turns out much slower than the tunnel was is left, as one that broke is, and tried again later.
"""

from __future__ import annotations

from collections.abc import Sequence

MUCH_SLOWER = 2.0
"""How often the tunnel's time: what stays below is noise, or other traffic."""


def tunnel_is_faster(direct: Sequence[float | None], tunnel: Sequence[float | None]) -> bool:
    """By the time that a byte takes there and back. Bytes per second in each direction; None, not measured, says nothing."""
    known = [(one, other) for one, other in zip(direct, tunnel, strict=True) if one and other]
    return sum(1 / one for one, _ in known) > MUCH_SLOWER * sum(1 / other for _, other in known)
