"""What a volunteering relay accepts, when it does not relay, and which relays a peer asks if nobody can dial it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from peerd.policy.hashing import digest
from peerd.policy.owner.governor import Limits, Pause
from peerd.table.circuit import direct
from peerd.table.record import HIDDEN, PeerId, PeerRecord, Reach
from peerd.table.view import LiveView

NUM_RELAYS = 2
"""Number of relays at which a relayed peer holds reservations, so that one may disappear at any moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a relay carries at most."""

    reservations: int = 64
    circuits: int = 512
    circuits_each: int = 64
    """Circuits with one peer at either end. Two peers hold up to four: each for tensors and for small messages, both ways."""
    rate: float = 0.0
    """Bytes per second of all circuits together, both directions; 0: no limit."""
    daily: int = 0
    """Bytes per calendar day; 0: no limit."""


def why_not_reserve(bounds: Bounds, reserved: Collection[PeerId], peer: PeerId) -> str:
    """The reason to refuse a reservation; empty if the peer gets one. A peer that has one may renew it."""
    if peer not in reserved and len(reserved) >= bounds.reservations:
        return f"all {bounds.reservations} places are taken"
    return ""


def why_not_connect(bounds: Bounds, circuits: Sequence[tuple[PeerId, PeerId]], caller: PeerId, callee: PeerId) -> str:
    """The reason to refuse one more circuit between two peers; empty if it may be opened. `circuits` are the ends of the open ones."""
    if len(circuits) >= bounds.circuits:
        return f"it carries {bounds.circuits} circuits already"
    for peer in (caller, callee):
        if sum(peer in ends for ends in circuits) >= bounds.circuits_each:
            return f"it carries {bounds.circuits_each} circuits of {peer} already"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class VolunteerState:
    """What decides whether a peer that volunteers relays just now."""

    limits: Limits
    pause: Pause | None
    leaving: bool
    reach: Reach
    relayed_today: int
    """Bytes."""


def why_not_relay(standing: VolunteerState, bounds: Bounds) -> str:
    """The first reason that holds; empty where it relays."""
    limits = standing.limits
    if standing.pause is not None:
        return f"this peer is paused: {standing.pause.reason}"
    if standing.leaving:
        return "this peer is leaving"
    if standing.reach in HIDDEN:
        return "others cannot dial this machine"
    if limits.upload or limits.download:
        return "a cap on upload or download is set"
    if limits.daily or limits.monthly:
        return "a data quota is set"
    if bounds.daily and standing.relayed_today >= bounds.daily:
        return "today's share for relaying is used up"
    return ""


def relays_to_ask(live: LiveView, held: Collection[PeerId], refused: Collection[PeerId]) -> tuple[PeerRecord, ...]:
    """Volunteers to ask for a reservation, reliable ones first. Each peer has an order of its own, so that the load spreads."""
    able = [r for r in live.records if r.relays and not r.leaving and direct(r.addresses) and r.peer not in (live.me, *held, *refused)]
    return tuple(sorted(able, key=lambda record: (not record.is_reliable, digest("relay", live.me, record.peer, size=8))))
