"""Which of the addresses that a peer names for itself this one dials, and how many: nobody looks through a network by its hands. Pure."""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache

from peerd.policy.owner.rate_limit import Ration
from peerd.table.circuit import is_circuit
from peerd.table.record import PeerId

MOST_NEW, MOST_NEW_IN_ALL = 16, 1024
"""New addresses a minute that one peer names, and that all peers name together."""
MAX_KEPT = 8192
_NAMES = ("dns", "dns4", "dns6")


class DialRation:
    """An address that was dialled before costs nothing; the caller learns soon enough whether its peer is there."""

    def __init__(self) -> None:
        self._new = Ration(each=MOST_NEW, total=MOST_NEW_IN_ALL)
        self._dialled: OrderedDict[tuple[PeerId, str], None] = OrderedDict()
        """Addresses with the peer that named them, the one not asked about for longest first."""

    def among(self, peer: PeerId, addresses: Sequence[str], now_s: float) -> tuple[str, ...]:
        """Return those at which the peer may be dialled. On loopback it is looked for only if it names nothing else."""
        able = [address for address in addresses if is_dialable(address)]
        named = [address for address in able if not _is_loopback(address)] or able
        return tuple(address for address in named if self._may_dial(peer, address, now_s))

    def _may_dial(self, peer: PeerId, address: str, now_s: float) -> bool:
        key = peer, address
        if key not in self._dialled and self._new.take(peer, now_s):
            return False
        self._dialled[key] = None
        self._dialled.move_to_end(key)
        if len(self._dialled) > MAX_KEPT:
            self._dialled.popitem(last=False)
        return True


@lru_cache(maxsize=MAX_KEPT)
def is_dialable(address: str) -> bool:
    """True for TCP at a host that one machine has: no broadcast, no multicast, no address of the link alone."""
    parts = address.split("/")
    if len(parts) < 5 or parts[0] or parts[3] != "tcp" or not _is_port(parts[4]):
        return False
    if parts[1] in _NAMES:
        return bool(parts[2])
    host = _host(parts)
    return host is not None and not (host.is_unspecified or host.is_multicast or host.is_link_local or host.is_reserved)


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 5 and 0 < int(text) < 1 << 16


def is_on_this_machine(addresses: Sequence[str]) -> bool:
    """True if a peer names addresses on loopback and no others: whoever may dial it is where it is."""
    return bool(addresses) and all(map(_is_loopback, addresses))


@lru_cache(maxsize=MAX_KEPT)
def _is_loopback(address: str) -> bool:
    host = _host(address.split("/"))
    return host is not None and host.is_loopback and not is_circuit(address)


def _host(parts: Sequence[str]) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(parts[2]) if parts[1] in {"ip4", "ip6"} else None
    except (IndexError, ValueError):
        return None
