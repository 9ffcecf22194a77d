"""A switch in user space between TUN devices. Each device has an uplink and a downlink, and each pair of addresses a way.

`python -m scripts.benchmarks._switch JSON` opens the devices, prints `ready`, and carries packets until its standard input closes. Lines
on standard input are orders: `{"links": {...}}` changes the links, `{"address": NEW, "of": OLD}` gives a device one more address,
`{"rebind": ADDRESS}` makes the router at that address forget all flows, and `{"udp": false, "of": ADDRESS}` makes it lose all UDP.
Packets wait for their uplink as in a modem, and for their downlink as in the one before it. Such a buffer takes a second, and packets
that find it full are lost. Others are lost on ways that lose some, or at routers. Kernels pass up to 64 KB of TCP at once (segmentation
offload), which keeps this cheap; such a packet is charged for the headers of all its segments, and lost as a whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import json
import os
import random
import selectors
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scripts.benchmarks._nat import Nat

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x01, 0x02
VNET_HEADER = struct.Struct("=BBHHHH")
"""virtio_net_hdr: flags, kind of segmentation, bytes of headers, bytes of a segment's payload, and two checksum fields."""
IP_ADDRESSES, IP_DESTINATION = (slice(VNET_HEADER.size + begin, VNET_HEADER.size + 20) for begin in (12, 16))
MAX_PACKET_BYTES = 70_000
BUFFER_S = 1.0
"""The buffers before an uplink, in the modem, and before a downlink, in seconds of its rate: deep ones hold about as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What one connection carries, in Mbit/s; 0: unlimited."""

    up: float
    down: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """What packets from one address to another meet between the sender's uplink and the receiver's downlink."""

    origin: str
    target: str
    delay_ms: float
    loss: float = 0.0
    """The chance that a packet is lost; 1: the way is dead."""
    jitter_ms: float = 0.0
    """A packet is late by up to so much more. None overtakes another of its way, as in a queue that grows and shrinks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The properties of all links: of most, and of those that differ."""

    mbit_per_s: float
    """Rate of each uplink and each downlink; 0: unlimited."""
    round_trip_ms: float
    rates: Mapping[str, Rates] = field(default_factory=dict)
    """By the address of the connection, where they differ."""
    ways: Sequence[Way] = ()

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> Links:
        """The links of which `told` is the dictionary."""
        rates = {address: Rates(**each) for address, each in told["rates"].items()}
        return cls(**{**told, "rates": rates, "ways": [Way(**each) for each in told["ways"]]})

    def wire_s(self, num_bytes: int) -> float:
        return wire_s(num_bytes, self.mbit_per_s)


def wire_s(num_bytes: int, mbit_per_s: float) -> float:
    """The time that so many bytes take at this rate; at 0, which is unlimited, none."""
    return 8e-6 * num_bytes / mbit_per_s if mbit_per_s else 0.0


def wire_bytes(packet: bytes) -> int:
    """Bytes that a packet with a virtio header takes on a wire that carries one segment at a time."""
    _, kind, header_bytes, segment_bytes, _, _ = VNET_HEADER.unpack_from(packet)
    length = len(packet) - VNET_HEADER.size
    if not kind or not segment_bytes:
        return length
    segments = max(1, -(-(length - header_bytes) // segment_bytes))
    return int(length + (segments - 1) * header_bytes)


@dataclass(slots=True)
class Port:
    """One device, and the times until which its two directions are busy."""

    device: int
    nat: Nat | None = None
    """The router between the device and the switch."""
    rates: Rates = Rates(up=0, down=0)
    up_until_s: float = 0.0
    down_until_s: float = 0.0


@dataclass(slots=True)
class Switch:
    """The packets in transit and their arrival times. No input or output happens here."""

    links: Links
    ports: dict[bytes, Port]
    """Keyed by IPv4 address."""
    chance: random.Random = field(default_factory=random.Random)
    on_their_way: list[tuple[float, int, Port, int, bytes]] = field(default_factory=list)
    """A heap of (time, sequence number, receiver, bytes, packet): when it reaches its downlink, or leaves it if bytes is 0."""
    _ways: dict[bytes, Way] = field(default_factory=dict)
    """By both addresses, as they stand in a packet."""
    _latest_s: dict[bytes, float] = field(default_factory=dict)
    """The latest arrival on a way that has jitter."""
    _count: int = 0

    def __post_init__(self) -> None:
        self.change(self.links)

    def change(self, links: Links) -> None:
        """Change the links for all packets that come from now on, and the downlinks for those under way, too."""
        self.links = links
        for port in self.ports.values():
            port.rates = Rates(up=links.mbit_per_s, down=links.mbit_per_s)
        for address, rates in links.rates.items():
            self.ports[socket.inet_aton(address)].rates = rates
        self._ways = {socket.inet_aton(way.origin) + socket.inet_aton(way.target): way for way in links.ways}

    def obey(self, order: dict[str, Any]) -> None:
        match order:
            case {"links": links}:
                self.change(Links.read(links))
            case {"address": new, "of": old}:
                self.ports[socket.inet_aton(new)] = self.ports[socket.inet_aton(old)]
            case {"rebind": address}:
                nat = self.ports[socket.inet_aton(address)].nat
                assert nat is not None
                nat.rebind()
            case {"udp": passes, "of": address}:
                nat = self.ports[socket.inet_aton(address)].nat
                assert nat is not None
                nat.passes_udp = passes

    def send(self, sender: Port, packet: bytes, now_s: float) -> None:
        """Send a packet up; it is lost if no port has its address, a router does not let it pass, or the uplink's buffer is full."""
        receiver = self.ports.get(self.destination(packet))
        if receiver is None:
            return
        if sender.nat is not None or receiver.nat is not None:
            changed = bytearray(packet)
            if sender.nat is not None and not sender.nat.outward(changed, VNET_HEADER.size):
                return
            if receiver.nat is not None and not receiver.nat.inward(changed, VNET_HEADER.size):
                return
            packet = bytes(changed)
        if sender.rates.up and sender.up_until_s - now_s > BUFFER_S:
            return
        size = wire_bytes(packet)
        sender.up_until_s = max(sender.up_until_s, now_s) + wire_s(size, sender.rates.up)
        arrives_s = self._arrival_s(packet, sender.up_until_s)
        if arrives_s is not None:
            self._push(arrives_s, receiver, size, packet)

    def _arrival_s(self, packet: bytes, sent_s: float) -> float | None:
        """When the packet reaches its downlink; None: it is lost."""
        both = self.addresses(packet)
        way = self._ways.get(both)
        if way is None:
            return sent_s + self.links.round_trip_ms / 2000
        if way.loss and self.chance.random() < way.loss:
            return None
        arrives_s = sent_s + way.delay_ms / 1000
        if way.jitter_ms:
            arrives_s = max(arrives_s + self.chance.random() * way.jitter_ms / 1000, self._latest_s.get(both, 0.0))
            self._latest_s[both] = arrives_s
        return arrives_s

    def _push(self, when_s: float, receiver: Port, size: int, packet: bytes) -> None:
        heapq.heappush(self.on_their_way, (when_s, self._count, receiver, size, packet))
        self._count += 1

    def due(self, now_s: float) -> list[tuple[int, bytes]]:
        """Return the packets that have left their downlinks, each with its device."""
        found = []
        while self.on_their_way and self.on_their_way[0][0] <= now_s:
            when_s, _, receiver, size, packet = heapq.heappop(self.on_their_way)
            if size and receiver.down_until_s - when_s > BUFFER_S:
                continue  # lost: a buffer without end would hold up all else for as long as senders like
            if size:  # store and forward does not slow a single flow
                receiver.down_until_s = max(receiver.down_until_s + wire_s(size, receiver.rates.down), when_s)
                if receiver.down_until_s > when_s:
                    self._push(receiver.down_until_s, receiver, 0, packet)
                    continue
            found.append((receiver.device, packet))
        return found

    @staticmethod
    def addresses(packet: bytes) -> bytes:
        """The sender's address and the receiver's."""
        return packet[IP_ADDRESSES]

    @staticmethod
    def destination(packet: bytes) -> bytes:
        return packet[IP_DESTINATION]


def open_device(name: str, offload: bool) -> int:
    """Open a TUN device of this name; it disappears when this process ends."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 if offload else 0)
    return device


def carry(switch: Switch) -> None:
    """Carry packets until standard input closes."""
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin, selectors.EVENT_READ)
        by_device = {port.device: port for port in switch.ports.values()}
        for device in by_device:
            selector.register(device, selectors.EVENT_READ)
        while True:
            now_s = time.monotonic()
            for device, packet in switch.due(now_s):
                with contextlib.suppress(OSError):  # a device that is full or down loses the packet
                    os.write(device, packet)
            wait_s = max(0.0, switch.on_their_way[0][0] - time.monotonic()) if switch.on_their_way else None
            for key, _ in selector.select(wait_s):
                if key.fd not in by_device:
                    line = sys.stdin.readline()
                    if not line:
                        return
                    switch.obey(json.loads(line))
                    continue
                with contextlib.suppress(BlockingIOError):
                    switch.send(by_device[key.fd], os.read(key.fd, MAX_PACKET_BYTES), time.monotonic())


def main(arguments: Sequence[str]) -> None:
    order = json.loads(arguments[0])
    with contextlib.suppress(OSError):  # highest priority, because this stands in for hardware
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))
    ports = {socket.inet_aton(address): Port(open_device(name, order["offload"])) for name, address in order["devices"].items()}
    for address, inside in order["routers"].items():
        outside = socket.inet_aton(address)
        ports[outside].nat = Nat(socket.inet_aton(inside), outside)
    print("ready", flush=True)
    carry(Switch(Links.read(order["links"]), ports))


if __name__ == "__main__":
    main(sys.argv[1:])
