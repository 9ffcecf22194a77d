"""Notices that this machine has lost the address from which it reaches the others, as with a new lease or a switch from Wi-Fi to mobile.

Connections from that address are dead, and nothing says so: what is sent over them is lost, until their keepalives give them up.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable

ANY_PORT = 9
"""Connecting a datagram socket sends nothing, so nothing need listen there."""


class OwnAddress:
    """The addresses from which this machine has reached other peers."""

    def __init__(self) -> None:
        self._used: set[str] = set()

    def is_lost(self, hosts: Iterable[str]) -> bool:
        """Return whether one of them is gone, and another one leads to some of these hosts. It is told once.

        Without a network it is not told: there is nothing to connect with, and the same address may come back.
        """
        now = {source_towards(host) for host in hosts} - {""}
        lost = bool(now) and any(not is_own(address) for address in self._used - now)
        self._used = now if lost else self._used | now
        return lost


def source_towards(host: str) -> str:
    """Return the address of this machine from which the system sends to an IPv4 host; empty if there is no way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, ANY_PORT))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def is_own(address: str) -> bool:
    """Return whether this machine has the address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
        return True
