"""The states of a peer that matter more to a reader than its phase."""

from __future__ import annotations

from peerd.control.protocol import PeerInfo

PAUSED, PAUSING = "paused", "pausing"


def state_of(peer: PeerInfo) -> str:
    """`paused`, `suspect`, `pausing` or `leaving`; empty where the phase says enough.

    A paused peer has handed on its work, so that nobody waits for it. A pausing one still finishes what it holds.
    """
    is_pausing = peer.get("paused", False)  # absent from older daemons
    if is_pausing and peer["phase"] == "joining":
        return PAUSED
    if peer["suspect"]:
        return "suspect"
    if is_pausing:
        return PAUSING
    return "leaving" if peer["leaving"] else ""
