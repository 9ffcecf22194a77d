"""A router's address translation for one machine, for the switch in user space (`_switch.py`). TCP and UDP over IPv4; the rest is lost.

Each TCP flow has a port of its own outside, and so has each UDP socket of the machine, whomever it sends to. A packet from outside
passes if it comes from an address and port to which the machine has sent from there. `rebind` forgets all flows, as a router does that
loses its table or gets new rules: a flow that goes on has a new port outside, unknown to the other end.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

TCP, UDP = 6, 17
_CHECKSUM_AT = {TCP: 16, UDP: 6}
"""Offset of the checksum in the header, which begins with both ports."""
NEEDS_CHECKSUM = 1
"""virtio_net_hdr's flag: the checksum field holds the sum of the pseudo-header, and the device is to complete it."""
FIRST_PORT, NUM_PORTS = 20_000, 40_000
Flow = tuple[int, bytes, bytes]
"""The protocol, the port of the machine (inside or outside), and the other end's address and port (empty where any is meant)."""


@dataclass(slots=True)
class Nat:
    """The translation for one machine. Addresses are 4 bytes, ports 2."""

    inside: bytes
    outside: bytes
    passes_udp: bool = True
    """False: UDP is lost, in both directions, as with a firewall that begins to forbid it."""
    _ports: dict[Flow, bytes] = field(default_factory=dict)
    _flows: dict[Flow, bytes] = field(default_factory=dict)
    _free: Iterator[int] = field(default_factory=lambda: itertools.cycle(range(FIRST_PORT, FIRST_PORT + NUM_PORTS)))

    def rebind(self) -> None:
        """Forget all flows. No port is used again soon."""
        self._ports.clear()
        self._flows.clear()

    def outward(self, packet: bytearray, at: int) -> bool:
        """Translate a packet, whose IP header is `at` this offset, from the machine. Returns False if it is lost."""
        where = self._ports_at(packet, at)
        if not where or packet[at + 12 : at + 16] != self.inside:
            return False
        kind, port = packet[at + 9], bytes(packet[where : where + 2])
        other = bytes(packet[at + 16 : at + 20] + packet[where + 2 : where + 4])
        socket = kind, port, other if kind == TCP else b""
        mapped = self._ports.get(socket)
        if mapped is None:
            mapped = self._ports[socket] = next(self._free).to_bytes(2, "big")
        self._flows[kind, mapped, other] = port
        _replace(packet, at, at + 12, self.outside, where, mapped)
        return True

    def inward(self, packet: bytearray, at: int) -> bool:
        """Translate a packet to the machine. Returns False if it is lost, because no flow is known that it belongs to."""
        where = self._ports_at(packet, at)
        if not where:
            return False
        other = bytes(packet[at + 12 : at + 16] + packet[where : where + 2])
        port = self._flows.get((packet[at + 9], bytes(packet[where + 2 : where + 4]), other))
        if port is None:
            return False
        _replace(packet, at, at + 16, self.inside, where + 2, port)
        return True

    def _ports_at(self, packet: bytearray, at: int) -> int:
        """Return the offset of the header of TCP or UDP, which begins with both ports; 0 for what is lost."""
        return at + 4 * (packet[at] & 15) if packet[at + 9] in (TCP, *([UDP] * self.passes_udp)) else 0


def _replace(packet: bytearray, at: int, address_at: int, address: bytes, port_at: int, port: bytes) -> None:
    """Put in an address and a port, and correct the checksums (RFC 1624)."""
    header_sum_at, sum_at = at + 10, at + 4 * (packet[at] & 15) + _CHECKSUM_AT[packet[at + 9]]
    old_address, old_port = bytes(packet[address_at : address_at + 4]), bytes(packet[port_at : port_at + 2])
    packet[address_at : address_at + 4], packet[port_at : port_at + 2] = address, port
    _correct(packet, header_sum_at, old_address, address, inverted=True)
    if packet[0] & NEEDS_CHECKSUM:  # the sum of the pseudo-header has no ports, and is not inverted
        _correct(packet, sum_at, old_address, address, inverted=False)
    elif packet[at + 9] == TCP or any(packet[sum_at : sum_at + 2]):  # UDP may have none
        _correct(packet, sum_at, old_address + old_port, address + port, inverted=True)


def _correct(packet: bytearray, at: int, old: bytes, new: bytes, *, inverted: bool) -> None:
    known = int.from_bytes(packet[at : at + 2], "big")
    total = (known ^ 0xFFFF if inverted else known) + sum(_words(new)) + sum(word ^ 0xFFFF for word in _words(old))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    packet[at : at + 2] = (total ^ 0xFFFF if inverted else total).to_bytes(2, "big")


def _words(data: bytes) -> Iterator[int]:
    return (int.from_bytes(data[index : index + 2], "big") for index in range(0, len(data), 2))
