"""Holes in routers, through which two peers behind routers exchange packets directly: which addresses are sent to, and when one has closed.

A router lets packets in from an address and port to which its own machine has sent something. So both peers send at the same time, each
to the address at which a third peer sees the other.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

from peerd.policy.hashing import digest
from peerd.table.circuit import direct
from peerd.table.record import PeerId, Reach
from peerd.table.view import LiveView

SILENT_S = 3.0
"""A hole has closed when packets go out and nothing comes back for this time: what arrives is acknowledged within a round trip, and
buffers of slow lines hold at most about 2 s."""
IDLE_SILENT_S, BUSY_BYTES = 15.0, 8192
"""While less than this goes out, nothing but signs of life does. Buffers that other traffic fills may lose several in a row."""
MOST_ADDRESSES = 4
MAX_ADDRESS = 64
"""Characters of an address."""


@dataclass(slots=True)
class Silence:
    """Notices that nothing comes back through a hole. Pure: the clock and the counts are given."""

    _sent: int = 0
    _received: int = 0
    _since_s: float | None = None
    """When packets were first sent that nothing has come back since."""

    def is_closed(self, sent: int, received: int, now_s: float) -> bool:
        """Return whether the hole has closed. `sent` and `received` count bytes since the beginning."""
        if received != self._received:
            self._sent, self._received, self._since_s = sent, received, None
        elif sent != self._sent and self._since_s is None:
            self._since_s = now_s
        patience_s = SILENT_S if sent - self._sent >= BUSY_BYTES else IDLE_SILENT_S
        return self._since_s is not None and now_s - self._since_s >= patience_s


def targets_in(told: Iterable[str], *, loopback: bool, outside: str = "") -> list[str]:
    """Return the IPv4 addresses with ports (`1.2.3.4:567`) among those that a peer has told, at most `MOST_ADDRESSES`.

    A peer may tell anything: addresses of groups and of nobody are left out, and those of loopback unless this peer listens there itself.
    `outside` is the address at which others see this peer; empty if unknown. If it is a public one, the addresses of private networks are
    left out unless the other peer has the same: elsewhere they are those of other machines.
    """
    told, found = list(told), dict[str, None]()
    is_elsewhere = bool(outside) and not ipaddress.IPv4Address(outside).is_private and not any(t.startswith(f"{outside}:") for t in told)
    for text in told:
        host, _, port = text.partition(":")
        try:
            address, number = ipaddress.IPv4Address(host), int(port) if port.isdecimal() and len(port) <= 5 else 0
        except ValueError:
            continue
        is_nobody = address.is_multicast or address.is_unspecified or address.is_reserved or address.is_link_local
        is_far = is_elsewhere and address.is_private
        if 0 < number < 65536 and not is_nobody and not is_far and (loopback or not address.is_loopback):
            found[f"{address}:{number}"] = None
    return list(found)[:MOST_ADDRESSES]


def mirrors_in(live: LiveView) -> tuple[PeerId, ...]:
    """Return the peers that can tell this one from which address its packets come: those that can be dialled, volunteering relays first.

    Each peer asks in an order of its own, so that the load spreads.
    """
    able = [record for record in live.records if record.reach is Reach.DIRECT and direct(record.addresses) and record.peer != live.me]
    able.sort(key=lambda record: (not record.relays, digest("mirror", live.me, record.peer, size=8)))
    return tuple(record.peer for record in able)
