"""The lines of simulated peers, and networks too large to write down pair by pair. Rates are bytes per second, delays one-way seconds.

Transfers to one peer leave one after another, as in the daemon's lanes, and those to several share the uplink in the order in which they
were asked for. A downlink takes as many bytes as it can, whichever come first: one that comes slowly holds up no other. So a transfer costs
the same whatever the number of peers.

A connection that has been idle is slow at first (planner/slow_start.py), and more so where other tensors fill the lines on its way: each
round trip of its slow start waits behind what they have under way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import Protocol

from peerd.planner.network import PeerSpec, Topology
from peerd.planner.slow_start import FIRST_WINDOW, held_up_s
from peerd.policy.route.receive_window import SENT_QUEUE_S

ACCESS_DELAY_S = 0.004
"""Of both access lines together."""
EXTENT_S = 0.12
"""From one end of the plane on which simulated homes lie to the other; it is half as wide."""
HOMES = ((0.35, 5, 50), (0.4, 20, 100), (0.2, 50, 250), (0.05, 500, 500))
"""Shares of homes by their lines: Mbit/s up and down."""
BYTES_PER_MBIT = 125e3
LEAST_IDLE_S = 0.2
"""A connection that sent nothing for a round trip and that long may have half as much on the way, for each such time (tcp_cwnd_restart)."""
CONNECTIONS = 2
"""So many usually have something under way on a busy line. As much as both may have (policy/route/receive_window.py) makes a queue of one
round trip and `SENT_QUEUE_S` for each connection."""
MOST_CONNECTIONS = 1 << 16
"""In a swarm in which more pairs exchange tensors each transfer counts as the first one of its connection."""
SPREAD = 0.5
"""Standard deviation of the logarithm of simulated devices' speeds."""


class SimulatedLinks(Protocol):
    """Peers, and what is known of pairs of them."""

    @property
    def peers(self) -> tuple[PeerSpec, ...]: ...

    def delay_s(self, one: int, other: int) -> float: ...

    def pair_rate(self, one: int, other: int) -> float:
        """The limit of the path, without both access lines; infinite if it has none."""


class Pairs:
    """The links of a network that is written down pair by pair."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology

    @property
    def peers(self) -> tuple[PeerSpec, ...]:
        return self._topology.peers

    def delay_s(self, one: int, other: int) -> float:
        return self._topology.delay_s[one][other]

    def pair_rate(self, one: int, other: int) -> float:
        return self._topology.rate[one][other]


class Homes:
    """Peers at places drawn on a plane, with home lines and unlike devices. Only access lines bind."""

    def __init__(self, num_peers: int, flops: float, seed: int) -> None:
        """`flops`: floating-point operations per second of a typical device."""
        random = Random(f"homes/{seed}")
        lines = random.choices([(up, down) for _, up, down in HOMES], [share for share, _, _ in HOMES], k=num_peers)
        self.peers = tuple(
            PeerSpec(
                name=f"home-{number}",
                flops=flops * math.exp(random.gauss(0, SPREAD)),
                up=up * BYTES_PER_MBIT,
                down=down * BYTES_PER_MBIT,
            )
            for number, (up, down) in enumerate(lines)
        )
        self._places = [(random.random() * EXTENT_S, random.random() * EXTENT_S / 2) for _ in range(num_peers)]

    def delay_s(self, one: int, other: int) -> float:
        return ACCESS_DELAY_S + math.dist(self._places[one], self._places[other])

    def pair_rate(self, _one: int, _other: int) -> float:
        return math.inf


@dataclass(slots=True)
class Connection:
    """One direction of a TCP connection: how many bytes it may have on the way, since when it has been idle, and when it is free."""

    window: float = FIRST_WINDOW
    idle_since_s: float = 0.0
    free_s: float = 0.0

    def rest(self, now_s: float, round_trip_s: float) -> None:
        """Take account of the time in which nothing was sent."""
        idles = int((now_s - self.idle_since_s) / (round_trip_s + LEAST_IDLE_S))
        if idles > 0:
            self.window = max(FIRST_WINDOW, self.window / 2.0 ** min(idles, 60))

    def held_up_s(self, num_bytes: float, rate: float, round_trip_s: float) -> float:
        """How long a transfer waits for acknowledgements, s, beyond what its bytes take at this rate. The window grows by what it sends."""
        waited_s = held_up_s(num_bytes, rate, round_trip_s, self.window)
        self.window = min(self.window + num_bytes, max(self.window, 2 * rate * round_trip_s))
        return waited_s


class SharedLines:
    """What is under way. A transfer is asked for when it begins to wait; they are asked for in the order of time."""

    def __init__(self, links: SimulatedLinks, *, slow_start: bool = True) -> None:
        self._links = links
        self._slow_start = slow_start
        self._up = [peer.up for peer in links.peers]
        self._down = [peer.down for peer in links.peers]
        self._up_free_s, self._down_free_s = [0.0] * len(self._up), [0.0] * len(self._up)
        self._connections: dict[tuple[int, int], Connection] = {}
        self.sent_bytes = [0.0] * len(self._up)

    def send(self, one: int, other: int, num_bytes: float, now_s: float) -> tuple[float, float]:
        """When a transfer begins, and when the whole of it has arrived. Within a peer nothing is sent."""
        if one == other:
            return now_s, now_s
        up, down, pair = self._up[one], self._down[other], self._links.pair_rate(one, other)
        delay_s = self._links.delay_s(one, other)
        round_trip_s = delay_s + self._links.delay_s(other, one)
        connection = self._connection(one, other)
        began_s = max(now_s, self._up_free_s[one])
        self._up_free_s[one] = began_s + num_bytes / up
        began_s = max(began_s, connection.free_s)
        held_up_s = 0.0
        if self._slow_start:
            connection.rest(began_s, round_trip_s)
            with_queues_s = round_trip_s + self._queues_s(one, other, began_s, round_trip_s)
            held_up_s = connection.held_up_s(num_bytes, min(up, down, pair), with_queues_s)
        connection.free_s = began_s + num_bytes / min(up, pair) + held_up_s
        connection.idle_since_s = connection.free_s + round_trip_s
        self._down_free_s[other] = max(now_s, self._down_free_s[other]) + num_bytes / down
        taken_s = max(connection.free_s, began_s + num_bytes / down + held_up_s, self._down_free_s[other])
        self.sent_bytes[one] += num_bytes
        return began_s, taken_s + delay_s

    def _queues_s(self, one: int, other: int, at_s: float, round_trip_s: float) -> float:
        """How long segments and their acknowledgements wait behind other tensors, s. Its own uplink is free for a transfer that begins.

        Segments wait before the receiver's downlink. Acknowledgements wait before its uplink and before the sender's downlink.
        """
        most_s = round_trip_s + CONNECTIONS * SENT_QUEUE_S
        busy_until_s = (self._down_free_s[other], self._up_free_s[other], self._down_free_s[one])
        return sum(min(max(free_s - at_s, 0.0), most_s) for free_s in busy_until_s)

    def _connection(self, one: int, other: int) -> Connection:
        found = self._connections.get((one, other))
        if found is None:
            found = Connection()
            if len(self._connections) < MOST_CONNECTIONS:
                self._connections[one, other] = found
        return found
