"""The benchmarks' router in user space: it lets in what was asked for, and its packets have correct checksums."""

from __future__ import annotations

import socket
import struct

import pytest

from scripts.benchmarks._nat import NEEDS_CHECKSUM, TCP, UDP, Nat
from scripts.benchmarks._switch import VNET_HEADER

INSIDE, OUTSIDE, OTHER = (socket.inet_aton(address) for address in ("192.168.1.2", "10.99.0.2", "10.99.0.1"))
AT = VNET_HEADER.size
PAYLOAD = b"odd"


def total(data: bytes) -> int:
    """The sum of RFC 1071, not inverted."""
    padded = data + b"\0" * (len(data) % 2)
    found: int = sum(struct.unpack(f"!{len(padded) // 2}H", padded))
    while found >> 16:
        found = (found & 0xFFFF) + (found >> 16)
    return found


def pseudo_header(source: bytes, destination: bytes, protocol: int = TCP) -> bytes:
    return source + destination + struct.pack("!BBH", 0, protocol, (20 if protocol == TCP else 8) + len(PAYLOAD))


def packet(source: bytes, port: int, destination: bytes, to: int, partial: bool) -> bytearray:
    ip = bytearray(struct.pack("!BBHHHBBH4s4s", 0x45, 0, 40 + len(PAYLOAD), 1, 0, 64, 6, 0, source, destination))
    ip[10:12] = (total(bytes(ip)) ^ 0xFFFF).to_bytes(2, "big")
    tcp = bytearray(struct.pack("!HHIIBBHHH", port, to, 7, 9, 5 << 4, 16, 1000, 0, 0)) + PAYLOAD
    pseudo = pseudo_header(source, destination)
    tcp[16:18] = (total(pseudo) if partial else total(pseudo + tcp) ^ 0xFFFF).to_bytes(2, "big")
    return bytearray(VNET_HEADER.pack(NEEDS_CHECKSUM if partial else 0, 0, 0, 0, 0, 0)) + ip + tcp


def seen(found: bytearray) -> tuple[bytes, int, bytes, int]:
    """Source and destination of a packet, whose checksums are checked."""
    ip, tcp = bytes(found[AT : AT + 20]), bytearray(found[AT + 20 :])
    assert total(ip) == 0xFFFF
    pseudo = pseudo_header(ip[12:16], ip[16:20])
    if found[0]:
        assert int.from_bytes(tcp[16:18], "big") == total(pseudo)
    else:
        assert total(pseudo + bytes(tcp)) == 0xFFFF
    source, destination = struct.unpack("!HH", tcp[:4])
    return ip[12:16], source, ip[16:20], destination


@pytest.mark.parametrize("partial", [False, True])
def test_a_flow_goes_both_ways_until_the_router_forgets_it_and_then_has_another_port(partial: bool) -> None:
    nat = Nat(INSIDE, OUTSIDE)
    out = packet(INSIDE, 4001, OTHER, 5001, partial)
    assert nat.outward(out, AT)
    source, port, *others = seen(out)
    assert (source, others) == (OUTSIDE, [OTHER, 5001])

    reply = packet(OTHER, 5001, OUTSIDE, port, partial)
    assert nat.inward(reply, AT)
    assert seen(reply) == (OTHER, 5001, INSIDE, 4001)
    assert not nat.inward(packet(OTHER, 5002, OUTSIDE, port, partial), AT), "it was not asked for"

    nat.rebind()
    assert not nat.inward(packet(OTHER, 5001, OUTSIDE, port, partial), AT)
    again = packet(INSIDE, 4001, OTHER, 5001, partial)
    assert nat.outward(again, AT)
    assert seen(again)[1] != port


def datagram(source: bytes, port: int, destination: bytes, to: int, has_checksum: bool = True) -> bytearray:
    ip = bytearray(struct.pack("!BBHHHBBH4s4s", 0x45, 0, 28 + len(PAYLOAD), 1, 0, 64, UDP, 0, source, destination))
    ip[10:12] = (total(bytes(ip)) ^ 0xFFFF).to_bytes(2, "big")
    udp = bytearray(struct.pack("!HHHH", port, to, 8 + len(PAYLOAD), 0)) + PAYLOAD
    if has_checksum:
        udp[6:8] = (total(pseudo_header(source, destination, UDP) + udp) ^ 0xFFFF).to_bytes(2, "big")
    return bytearray(VNET_HEADER.size) + ip + udp


def ports_of(found: bytearray) -> tuple[int, int]:
    """Source and destination port of a datagram, whose checksums are checked."""
    ip, udp = bytes(found[AT : AT + 20]), bytes(found[AT + 20 :])
    assert total(ip) == 0xFFFF
    assert udp[6:8] == bytes(2) or total(pseudo_header(ip[12:16], ip[16:20], UDP) + udp) == 0xFFFF
    source, destination = struct.unpack("!HH", udp[:4])
    return source, destination


@pytest.mark.parametrize("has_checksum", [True, False])
def test_a_udp_socket_has_one_port_outside_and_lets_in_whom_it_has_sent_to(has_checksum: bool) -> None:
    nat, third = Nat(INSIDE, OUTSIDE), socket.inet_aton("10.99.0.3")
    out = datagram(INSIDE, 4001, OTHER, 5001, has_checksum)
    assert nat.outward(out, AT)
    port, _ = ports_of(out)
    assert not nat.inward(datagram(third, 5001, OUTSIDE, port, has_checksum), AT), "nothing was sent to it"
    out = datagram(INSIDE, 4001, third, 5001, has_checksum)
    assert nat.outward(out, AT)
    assert ports_of(out)[0] == port
    reply = datagram(third, 5001, OUTSIDE, port, has_checksum)
    assert nat.inward(reply, AT)
    assert ports_of(reply) == (5001, 4001)
    assert not nat.inward(datagram(third, 5002, OUTSIDE, port, has_checksum), AT), "another port"
    assert not nat.inward(packet(third, 5001, OUTSIDE, port, partial=False), AT), "another protocol"
    nat.passes_udp = False
    assert not nat.outward(datagram(INSIDE, 4001, third, 5001), AT)
    assert not nat.inward(datagram(third, 5001, OUTSIDE, port), AT)
    assert nat.outward(packet(INSIDE, 4001, OTHER, 5001, partial=False), AT)
