"""How others reach a daemon, and what it relays for them: part of the reply to `status`."""

from __future__ import annotations

from typing import TypedDict


class ReachInfo(TypedDict):
    """How others reach this machine."""

    state: str  # as PeerInfo.reach
    reason: str
    relays: list[str]  # relays at which it holds reservations


class RelayInfo(TypedDict):
    """What this daemon relays for other peers."""

    volunteers: bool  # was started with --relay
    off: str  # why it does not relay now; empty: it relays
    reservations: int
    circuits: int
    bytes: int  # since the stage was entered
