"""How many TCP segments this process's connections have sent, and how many of them again, as the kernel counts them by connection."""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

OPEN_FILES = Path("/proc/self/fd")
TCP_INFO, INFO_BYTES = 11, 192
"""The option on Linux, and enough of what it gives: `struct tcp_info` of linux/tcp.h."""
TOTAL_RETRANS, DATA_SEGS_OUT = 100, 156
"""Where in it the two counts stand."""
COUNT = struct.Struct("=I")


class Segments(NamedTuple):
    """Those that carry data."""

    sent: int = 0
    again: int = 0


class SegmentCounts:
    """Counts from one look to the next."""

    def __init__(self) -> None:
        self._seen: dict[int, Segments] = {}
        """By the connection's inode."""

    def look(self) -> dict[str, Segments]:
        """What was sent to each address since the last look. Empty where the kernel does not tell: elsewhere than on Linux."""
        seen, found = dict[int, Segments](), defaultdict[str, Segments](Segments)
        for number in _open_files():
            told = _told_of(number)
            if told is not None:
                inode, host, now = told
                before, so_far = self._seen.get(inode, Segments()), found[host]
                seen[inode] = now
                found[host] = Segments(so_far.sent + max(0, now.sent - before.sent), so_far.again + max(0, now.again - before.again))
        self._seen = seen
        return dict(found)


def _open_files() -> list[int]:
    try:
        return [int(each.name) for each in OPEN_FILES.iterdir()]
    except OSError:
        return []


def _told_of(number: int) -> tuple[int, str, Segments] | None:
    """The inode, the other end's address and the counts of an open file; None if it is no TCP connection."""
    try:
        status = os.fstat(number)
        if not stat.S_ISSOCK(status.st_mode):
            return None
        with socket.socket(fileno=os.dup(number)) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
                return None
            host = str(connection.getpeername()[0]).removeprefix("::ffff:")
            info = connection.getsockopt(socket.IPPROTO_TCP, TCP_INFO, INFO_BYTES)
    except OSError:  # it was closed meanwhile, or listens
        return None
    if len(info) < DATA_SEGS_OUT + COUNT.size:
        return None
    return status.st_ino, host, Segments(*(COUNT.unpack_from(info, place)[0] for place in (DATA_SEGS_OUT, TOTAL_RETRANS)))
