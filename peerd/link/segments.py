"""How many TCP segments this process's connections have sent, and how many of them again, as the kernel counts them by connection.

While it looks, it also bounds what may be under way over each connection, to this peer and from it (`policy/route/receive_window.py`).
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import socket
import stat
import struct
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from peerd.policy.route.receive_window import WayRoundTrip

OPEN_FILES = Path("/dev/fd")


Ends = tuple[int, str, int]
"""The port here, and the address and port there, which tell a connection from all others."""
Window = Callable[[float], int]
"""How many bytes may be under way over a connection, by the round trip of its way in seconds."""
BUFFER_LOCK = 72
"""SO_BUF_LOCK of Linux (asm-generic/socket.h): 0 lets the kernel choose a connection's buffers again."""
ROOM_IN_BUFFER = 0.75
"""Of a buffer that is full, at most so much is what was sent: the kernel counts its own notes on each segment, too."""


class UnderWayBounds(NamedTuple):
    """What may be under way over each connection that leaves this machine; None: as much as the kernels like."""

    to_here: Window | None = None
    from_here: Window | None = None
    uplink: float = 0.0
    """Bytes per second of this peer's line; 0: unknown."""


@dataclass(frozen=True, slots=True)
class Segments:
    """Those that carry data."""

    sent: int = 0
    again: int = 0
    round_trip_s: float = 0.0
    """The longest of the connections that sent some; 0: unknown."""
    busy_s: float = 0.0
    """For how long a connection had something to send or under way, summed over all; 0: unknown."""
    least_s: float = 0.0
    """The least round trip of the connections that sent some, lately; 0: unknown."""
    acked: int = 0
    """Bytes that have arrived; 0: unknown."""

    def __add__(self, more: Segments) -> Segments:
        round_trip_s = max(self.round_trip_s, more.round_trip_s)
        least_s = min(filter(None, (self.least_s, more.least_s)), default=0.0)
        return Segments(
            self.sent + more.sent,
            self.again + more.again,
            round_trip_s,
            self.busy_s + more.busy_s,
            least_s,
            self.acked + more.acked,
        )

    def since(self, before: Segments) -> Segments:
        sent, again = max(0, self.sent - before.sent), max(0, self.again - before.again)
        round_trip_s, least_s = (self.round_trip_s, self.least_s) if sent else (0.0, 0.0)
        busy_s = max(0.0, self.busy_s - before.busy_s)
        return Segments(sent, again, round_trip_s, busy_s, least_s, max(0, self.acked - before.acked))


class KernelInfo(NamedTuple):
    """How a kernel tells what a connection has sent."""

    option: int
    """Of `getsockopt` at the level of TCP."""
    num_bytes: int
    """Of its answer, as many as hold both counts."""
    sent_at: int
    again_at: int
    """Where in it the counts stand."""
    form: struct.Struct
    round_trip_at: int
    """Where its smoothed round trip stands, 4 bytes."""
    unit_s: float
    """What that counts in."""
    busy_at: int | None = None
    """Where it stands for how long the connection was busy, 8 bytes of microseconds."""
    least_at: int | None = None
    """Where its least round trip of the last minutes stands, as the smoothed one."""
    acked_at: int | None = None
    """Where it stands how many bytes have arrived, 8 bytes."""
    window_option: int | None = None
    """Of `setsockopt`, which bounds the window that a connection announces."""

    def bound(self, connection: socket.socket, bounds: UnderWayBounds, least_s: float, way_s: float) -> None:
        """Bound a connection with this least round trip, and this one of its way.

        The kernel forgets windows where it enlarges its buffer, so this is done again at each look.
        """
        if self.window_option is None or not least_s > 0:
            return
        if bounds.to_here is not None:
            connection.setsockopt(socket.IPPROTO_TCP, self.window_option, bounds.to_here(least_s))
        if bounds.from_here is not None:
            _give_room(connection, bounds.from_here(way_s))

    def read(self, connection: socket.socket) -> Segments | None:
        """None where the kernel gives less, as an older one does. Raises OSError if this is no connection any more."""
        return self.parsed(connection.getsockopt(socket.IPPROTO_TCP, self.option, self.num_bytes))

    def parsed(self, answer: bytes) -> Segments | None:
        if len(answer) < max(self.sent_at, self.again_at) + self.form.size:
            return None
        sent, again = (self.form.unpack_from(answer, place)[0] for place in (self.sent_at, self.again_at))
        round_trip, least = (self.unit_s * _number(answer, place, 4) for place in (self.round_trip_at, self.least_at))
        busy_s = 1e-6 * _number(answer, self.busy_at, 8)
        return Segments(sent, again, round_trip, busy_s, least, _number(answer, self.acked_at, 8))


def _give_room(connection: socket.socket, num_bytes: int) -> None:
    """Let so many bytes wait or be under way from here. Where that is more than a program may ask for, the kernel chooses."""
    buffer_bytes = int(num_bytes / ROOM_IN_BUFFER)
    if buffer_bytes <= _most_buffer_bytes():
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes // 2)  # the kernel doubles it
        return
    with contextlib.suppress(OSError):  # before Linux 5.15 a buffer that was bounded once stays so until the connection ends
        connection.setsockopt(socket.SOL_SOCKET, BUFFER_LOCK, 0)


@cache
def _most_buffer_bytes() -> int:
    """The largest buffer that a program gets (net.core.wmem_max)."""
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
        return one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def _number(answer: bytes, place: int | None, num_bytes: int) -> int:
    """0 where the kernel does not tell it."""
    return 0 if place is None else int.from_bytes(answer[place : place + num_bytes], sys.byteorder)


KERNELS: Mapping[str, KernelInfo] = {
    "linux": KernelInfo(
        11,
        192,
        sent_at=156,
        again_at=100,
        form=struct.Struct("=I"),
        round_trip_at=68,
        unit_s=1e-6,
        busy_at=168,
        least_at=148,
        acked_at=120,
        window_option=10,
    ),
    "darwin": KernelInfo(0x106, 112, sent_at=56, again_at=104, form=struct.Struct("=Q"), round_trip_at=44, unit_s=1e-3),
}
"""By `sys.platform`: `tcpi_data_segs_out`, `tcpi_total_retrans`, `tcpi_rtt`, `tcpi_busy_time`, `tcpi_min_rtt` and `tcpi_bytes_acked` of
`struct tcp_info` and TCP_WINDOW_CLAMP (linux/tcp.h), `tcpi_txpackets`, `tcpi_txretransmitpackets` and `tcpi_srtt`
of `struct tcp_connection_info` (netinet/tcp.h of macOS)."""


class SegmentCounts:
    """Counts from one look to the next."""

    def __init__(self) -> None:
        self._looked_s = time.monotonic()
        self._seen: dict[Ends, Segments] = {}
        self._ways: dict[Ends, WayRoundTrip] = {}
        """Of connections that were bounded at the last look."""
        self.total = Segments()
        """Since the first look."""

    def look(self, bounds: UnderWayBounds | None = None) -> dict[str, Segments]:
        """What was sent to each address since the last look. Empty where the kernel does not tell: on neither Linux nor macOS.

        `bounds`: what may be under way over each connection that leaves this machine (Linux); None: leave it as it is.
        """
        kernel = KERNELS.get(sys.platform)
        if kernel is None:
            return {}
        now_s = time.monotonic()
        took_s, self._looked_s = max(now_s - self._looked_s, 1e-9), now_s
        now = dict[Ends, Segments]()
        for connection in _connections():
            with contextlib.suppress(OSError):  # it was closed meanwhile, or listens
                if (so_far := kernel.read(connection)) is not None:
                    now[_ends_of(connection)] = so_far
        since = {ends: so_far.since(self._seen.get(ends, Segments())) for ends, so_far in now.items()}
        self._seen = now
        found = defaultdict[str, Segments](Segments)
        for ends, more in since.items():
            found[ends[1].removeprefix("::ffff:")] += more
        self.total = sum(found.values(), self.total)
        leaving = {ends: more for ends, more in since.items() if not _is_here(ends[1])}
        if bounds is not None:
            self._ways = self._judged(leaving, took_s, bounds.uplink)
            self._bound(kernel, bounds)
        return dict(found)

    def _judged(self, leaving: Mapping[Ends, Segments], took_s: float, uplink: float) -> dict[Ends, WayRoundTrip]:
        """The ways of the connections that leave this machine, by what they have sent in the last `took_s` seconds."""
        busy_s = max((more.busy_s for more in leaving.values()), default=0.0)
        carried = sum(more.acked for more in leaving.values()) / busy_s / uplink if busy_s and uplink else math.inf
        return {
            ends: self._ways.get(ends, WayRoundTrip()).next(
                self._seen[ends].least_s, self._seen[ends].round_trip_s, more.busy_s / took_s, carried
            )
            for ends, more in leaving.items()
        }

    def _bound(self, kernel: KernelInfo, bounds: UnderWayBounds) -> None:
        for connection in _connections():
            with contextlib.suppress(OSError):
                ends = _ends_of(connection)
                if ends in self._ways:
                    kernel.bound(connection, bounds, self._seen[ends].least_s, self._ways[ends].round_trip_s)


def _ends_of(connection: socket.socket) -> Ends:
    """Raises OSError unless it is connected."""
    host, port = connection.getpeername()[:2]
    return connection.getsockname()[1], str(host), port


def _connections() -> Iterator[socket.socket]:
    """The TCP connections of this process, one at a time; each is closed before the next."""
    for number in _open_files():
        with contextlib.suppress(OSError):  # it was closed meanwhile
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                    yield connection


def _open_files() -> list[int]:
    try:
        return [int(each.name) for each in OPEN_FILES.iterdir()]
    except OSError:
        return []


def _is_here(host: str) -> bool:
    """Whether an address is of this machine: what goes there crosses no line."""
    return ipaddress.ip_address(host.removeprefix("::ffff:").partition("%")[0]).is_loopback
