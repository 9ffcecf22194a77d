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

SILENT_S = 3.5
"""A hole has closed when data went out and nothing at all came back for this time. The buffer of a slow line holds what it carries in some
3 s (7.5 MB at 20 Mbit/s), and the answer to what joins the end of such a queue takes so long."""
ROUND_TRIPS = 2
"""Where round trips take longer, so many of them without any packet from the peer."""
IDLE_SILENT_S = 15.0
"""While no data go out, signs of life do. Buffers that other traffic fills may lose several of those in a row."""
DATA_BYTES = 4096
"""Signs of life, and what is sent in their place when they are lost, take less than this between two looks."""
LONGEST_LOOK_S = 1.0
"""A look that comes later counts as one after this time: then this process stood still, and has not read what has arrived."""
MOST_ADDRESSES = 4
MAX_ADDRESS = 64
"""Characters of an address."""


@dataclass(frozen=True, slots=True)
class QuicCounts:
    """What a connection has carried since its beginning, in bytes."""

    sent: int = 0
    received: int = 0
    """Both as UDP, with all that a connection sends of its own accord."""
    written: int = 0
    """What streams have given to be sent."""


@dataclass(slots=True)
class Silence:
    """Notices that nothing comes back through a hole. Pure: the clock and the counts are given.

    Any packet of the peer ends a silence, so a line that is only slow is never silent: it acknowledges what came through its queue.
    """

    _last: QuicCounts = QuicCounts()
    _looked_s: float | None = None
    _dataless_s: float = float("inf")
    """Time since data went out."""
    _out_s: float | None = None
    """Time since packets went out, of which nothing has come back since; None: none did."""
    _data_s: float | None = None
    """The same of data."""

    def is_closed(self, now: QuicCounts, round_trip_s: float, now_s: float) -> bool:
        """Return whether the hole has closed, by what was carried until now. `round_trip_s`: as the connection last measured it."""
        passed_s = min(now_s - self._looked_s, LONGEST_LOOK_S) if self._looked_s is not None else 0.0
        patience_s = max(SILENT_S, ROUND_TRIPS * round_trip_s)
        went_out = now.sent - self._last.sent
        is_data = now.written != self._last.written or went_out >= DATA_BYTES
        self._dataless_s = 0.0 if is_data else self._dataless_s + passed_s
        if now.received != self._last.received:
            self._out_s = self._data_s = None
        else:
            self._count_silence(went_out > 0, passed_s, patience_s)
        self._last, self._looked_s = now, now_s
        is_long = self._out_s is not None and self._out_s >= max(IDLE_SILENT_S, patience_s)
        return is_long or (self._data_s is not None and self._data_s >= patience_s)

    def _count_silence(self, went_out: bool, passed_s: float, patience_s: float) -> None:
        """Count a look at which nothing has come back."""
        if self._out_s is not None:
            self._out_s += passed_s
        elif went_out:
            self._out_s = 0.0
        if self._data_s is not None:
            self._data_s += passed_s
        elif went_out and self._dataless_s <= patience_s:
            # Data that are not acknowledged are sent again before that; what goes out later is a sign of life.
            self._data_s = 0.0


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
