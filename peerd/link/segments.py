"""How many TCP segments this process's connections have sent, and how many of them again, as the kernel counts them by connection.

While it looks, it also bounds what may be under way over each connection, to this peer and from it (`policy/route/receive_window.py`).
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
import struct
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

OPEN_FILES = Path("/dev/fd")


Ends = tuple[int, str, int]
"""The port here, and the address and port there, which tell a connection from all others."""
Window = Callable[[float], int]
"""How many bytes may be under way over a connection, by its least round trip in seconds."""
BUFFER_LOCK = 72
"""SO_BUF_LOCK of Linux (asm-generic/socket.h): 0 lets the kernel choose a connection's buffers again."""
ROOM_IN_BUFFER = 0.75
"""Of a buffer that is full, at most so much is what was sent: the kernel counts its own notes on each segment, too."""


class UnderWayBounds(NamedTuple):
    """What may be under way over each connection that leaves this machine; None: as much as the kernels like."""

    to_here: Window | None = None
    from_here: Window | None = None


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

    def __add__(self, more: Segments) -> Segments:
        round_trip_s = max(self.round_trip_s, more.round_trip_s)
        least_s = min(filter(None, (self.least_s, more.least_s)), default=0.0)
        return Segments(self.sent + more.sent, self.again + more.again, round_trip_s, self.busy_s + more.busy_s, least_s)

    def since(self, before: Segments) -> Segments:
        sent, again = max(0, self.sent - before.sent), max(0, self.again - before.again)
        round_trip_s, least_s = (self.round_trip_s, self.least_s) if sent else (0.0, 0.0)
        return Segments(sent, again, round_trip_s, max(0.0, self.busy_s - before.busy_s), least_s)


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
    window_option: int | None = None
    """Of `setsockopt`, which bounds the window that a connection announces."""

    def bound(self, connection: socket.socket, bounds: UnderWayBounds, least_s: float) -> None:
        """Bound a connection. The kernel forgets windows where it enlarges its buffer, so this is done again at each look."""
        if self.window_option is None or not least_s > 0:
            return
        if bounds.to_here is not None:
            connection.setsockopt(socket.IPPROTO_TCP, self.window_option, bounds.to_here(least_s))
        if bounds.from_here is not None:
            _give_room(connection, bounds.from_here(least_s))

    def read(self, connection: socket.socket) -> Segments | None:
        """None where the kernel gives less, as an older one does. Raises OSError if this is no connection any more."""
        return self.parsed(connection.getsockopt(socket.IPPROTO_TCP, self.option, self.num_bytes))

    def parsed(self, answer: bytes) -> Segments | None:
        if len(answer) < max(self.sent_at, self.again_at) + self.form.size:
            return None
        sent, again = (self.form.unpack_from(answer, place)[0] for place in (self.sent_at, self.again_at))
        round_trip, least = (_number(answer, place, 4) for place in (self.round_trip_at, self.least_at))
        return Segments(sent, again, self.unit_s * round_trip, 1e-6 * _number(answer, self.busy_at, 8), self.unit_s * least)


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
    "linux": KernelInfo(11, 192, 156, 100, struct.Struct("=I"), round_trip_at=68, unit_s=1e-6, busy_at=168, least_at=148, window_option=10),
    "darwin": KernelInfo(0x106, 112, sent_at=56, again_at=104, form=struct.Struct("=Q"), round_trip_at=44, unit_s=1e-3),
}
"""By `sys.platform`: `tcpi_data_segs_out`, `tcpi_total_retrans`, `tcpi_rtt`, `tcpi_busy_time` and `tcpi_min_rtt` of `struct tcp_info` and
TCP_WINDOW_CLAMP (linux/tcp.h), `tcpi_txpackets`, `tcpi_txretransmitpackets` and `tcpi_srtt` of `struct tcp_connection_info` (netinet/tcp.h
of macOS)."""


class SegmentCounts:
    """Counts from one look to the next."""

    def __init__(self) -> None:
        self._seen: dict[Ends, Segments] = {}
        self.total = Segments()
        """Since the first look."""

    def look(self, bounds: UnderWayBounds | None = None) -> dict[str, Segments]:
        """What was sent to each address since the last look. Empty where the kernel does not tell: on neither Linux nor macOS.

        `bounds`: what may be under way over each connection that leaves this machine (Linux); None: leave it as it is.
        """
        kernel = KERNELS.get(sys.platform)
        now = {} if kernel is None else dict(filter(None, (_told_of(number, kernel, bounds) for number in _open_files())))
        found = defaultdict[str, Segments](Segments)
        for ends, so_far in now.items():
            host = ends[1].removeprefix("::ffff:")
            found[host] += so_far.since(self._seen.get(ends, Segments()))
        self._seen, self.total = now, sum(found.values(), self.total)
        return dict(found)


def _open_files() -> list[int]:
    try:
        return [int(each.name) for each in OPEN_FILES.iterdir()]
    except OSError:
        return []


def _is_here(host: str) -> bool:
    """Whether an address is of this machine: what goes there crosses no line."""
    return ipaddress.ip_address(host.removeprefix("::ffff:").partition("%")[0]).is_loopback


def _told_of(number: int, kernel: KernelInfo, bounds: UnderWayBounds | None) -> tuple[Ends, Segments] | None:
    """A connection's ends and what it has sent; None if the open file is no TCP connection."""
    try:
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            return None
        with socket.socket(fileno=os.dup(number)) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
                return None
            host, port = connection.getpeername()[:2]
            segments = kernel.read(connection)
            if bounds is not None and segments is not None and not _is_here(str(host)):
                kernel.bound(connection, bounds, segments.least_s)
            return ((connection.getsockname()[1], str(host), port), segments) if segments is not None else None
    except OSError:  # it was closed meanwhile, or listens
        return None
