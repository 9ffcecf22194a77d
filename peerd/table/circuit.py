"""The address of a peer behind a relay, as libp2p writes it: the relay's own address, then the peer.

/ip4/IP/tcp/PORT/p2p/RELAY/p2p-circuit/p2p/PEER
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

_MARK = "/p2p-circuit/p2p/"


def circuit_address(relay_address: str, peer: str) -> str:
    return f"{relay_address}{_MARK}{peer}"


def is_circuit(address: str) -> bool:
    return _MARK in address


def relay_in(address: str) -> tuple[str, str]:
    """The relay's own address, and its peer id."""
    relay_address = address.partition(_MARK)[0]
    return relay_address, relay_address.rpartition("/")[2]


def direct(addresses: Iterable[str]) -> tuple[str, ...]:
    """Return the addresses that need no relay."""
    return tuple(address for address in addresses if not is_circuit(address))


def host_in(multiaddr: str | None) -> str:
    """The IPv4 address of a direct connection; empty for a relayed one, or any other."""
    parts = (multiaddr or "").split("/")
    if len(parts) < 3 or parts[1] != "ip4" or "p2p-circuit" in parts:
        return ""
    try:
        return str(ipaddress.IPv4Address(parts[2]))
    except ValueError:
        return ""
