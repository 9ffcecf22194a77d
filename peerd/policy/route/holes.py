"""Holes in routers, through which two peers behind routers exchange packets directly: which addresses are sent to, and when one has closed.

A router lets packets in from an address and port to which its own machine has sent something. So both peers send at the same time, each
to the address at which a third peer sees the other.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from peerd.policy.hashing import digest
from peerd.table.circuit import direct
from peerd.table.record import PeerId, Reach
from peerd.table.view import LiveView

DOUBT_S = 1.0
"""After this time without an answer the other end is asked, in the tunnel, to send packets. Most often the line is only full."""
ASK_EACH_S = 0.5
QUESTIONS = 4
"""A hole has closed when so many questions in a row were answered in the tunnel and none of the packets that were sent with them came."""
SILENT_S = DOUBT_S + (QUESTIONS - 1) * ASK_EACH_S
"""The least time in which that is found out."""
ROUND_TRIPS = 2
"""Where round trips take long, at least so many of them pass without any packet from the peer."""
UNASKED_SILENT_S = 15.0
"""A hole counts as closed after this time even if the answers are too few: then the tunnel hardly reaches the peer, either."""
LONGEST_LOOK_S = 1.0
"""A look that comes later counts as one after this time: then this process stood still, and has not read what has arrived."""
MOST_ADDRESSES = 4
MAX_ADDRESS = 64
"""Characters of an address."""


@dataclass(frozen=True, slots=True)
class QuicCounts:
    """What a connection has carried since its beginning, in bytes, as UDP, with all that it sends of its own accord."""

    sent: int = 0
    """Given to the system. It may wait for the line there, where what the tunnel carries waits, too."""
    received: int = 0


class HoleState(Enum):
    OPEN = "open"
    DOUBTFUL = "doubtful"
    """The other end is to be asked in the tunnel: it sends packets through the hole, and then answers."""
    CLOSED = "closed"


@dataclass(slots=True)
class Silence:
    """Notices that nothing comes back through a hole. Pure: the clock and the counts are given.

    No time tells a closed hole from a full line, in which packets wait for seconds or are lost in a row. But the tunnel crosses the same
    line: an answer that comes in the tunnel has waited behind the packets that were sent before it. So questions last as long as the line
    takes, and a hole that has closed under an empty line is found at once. Any packet of the peer ends a silence.
    """

    _last: QuicCounts = QuicCounts()
    _looked_s: float | None = None
    _silent_s: float = 0.0
    """Time since the last packet of the peer."""
    _out_s: float | None = None
    """Time since packets went out of which nothing has come back since; None: none did."""
    _since_asked_s: float = ASK_EACH_S
    _received_when_asked: int | None = None
    """None: no question is open."""
    _is_answered: bool = False
    """Whether the open question was answered since the last look."""
    _num_in_vain: int = 0
    """Questions in a row that were answered in the tunnel alone."""

    def look(self, now: QuicCounts, round_trip_s: float, now_s: float) -> HoleState:
        """Return whether the hole is open, by what was carried until now. `round_trip_s`: as the connection last measured it.

        After DOUBTFUL `answered` or `failed` must be called once; the next DOUBTFUL comes after that.
        """
        passed_s = min(now_s - self._looked_s, LONGEST_LOOK_S) if self._looked_s is not None else 0.0
        self._since_asked_s += passed_s
        if now.received != self._last.received:
            self._silent_s, self._out_s, self._num_in_vain = 0.0, None, 0
        else:
            # What goes out in the look after a packet has come may acknowledge it, and gets no answer.
            goes_out = now.sent != self._last.sent and self._silent_s > 0.0
            self._silent_s += passed_s
            self._out_s = self._out_s + passed_s if self._out_s is not None else 0.0 if goes_out else None
        if self._is_answered:
            self._num_in_vain += now.received == self._received_when_asked
            self._received_when_asked, self._is_answered = None, False
        self._last, self._looked_s = now, now_s
        return self._state(ROUND_TRIPS * round_trip_s)

    def answered(self) -> None:
        """The other end has answered the question: what it sent before comes by the next look, if the hole is open."""
        self._is_answered = True

    def failed(self) -> None:
        """The question has brought no answer, which says nothing about the hole."""
        self._received_when_asked = None

    def _state(self, least_s: float) -> HoleState:
        if self._out_s is None or self._out_s < DOUBT_S:
            return HoleState.OPEN
        is_unanswered = self._num_in_vain >= QUESTIONS and self._silent_s >= least_s
        if is_unanswered or self._out_s >= max(UNASKED_SILENT_S, least_s):
            return HoleState.CLOSED
        if self._received_when_asked is not None or self._since_asked_s < ASK_EACH_S:
            return HoleState.OPEN
        self._received_when_asked, self._since_asked_s = self._last.received, 0.0
        return HoleState.DOUBTFUL


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
