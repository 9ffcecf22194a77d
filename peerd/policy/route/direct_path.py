"""Chooses the path that tensors take to a peer, direct TLS or the tunnel, from what was measured over each.

Fewer processes touch a byte on the direct path, so it is used where it opens. A router or provider may treat the two ports
differently, so a direct path much slower than the tunnel is dropped, like one that broke, and tried again later.
"""

from __future__ import annotations

from collections.abc import Sequence

MUCH_SLOWER = 2.0
"""The direct path is dropped when a byte takes this many times as long as through the tunnel; less is noise or other traffic."""


def tunnel_is_faster(direct: Sequence[float | None], tunnel: Sequence[float | None]) -> bool:
    """Compare the time that a byte takes there and back. Rates are bytes per second in each direction; None means not measured."""
    known = [(one, other) for one, other in zip(direct, tunnel, strict=True) if one and other]
    return sum(1 / one for one, _ in known) > MUCH_SLOWER * sum(1 / other for _, other in known)
