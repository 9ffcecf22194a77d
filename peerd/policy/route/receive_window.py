"""How many bytes may be under way over one TCP connection: to this peer, which is the window that its kernel announces, and from it.

By itself a sender has more and more bytes under way, until the buffer before the slowest line is full and loses some. Home routers hold up
to a second there, and both ways suffer. Gradients wait behind that second. So do acknowledgements on a full uplink, so what comes the other
way takes a second more for each round trip of its slow start. What is lost is lost in hundreds of segments, and TCP passes nothing on until
it has sent them again. At 6.7 Mbit/s and 300 ms one stage had 1.6 MB under way, lost 67 segments at its end, and sent nothing to that peer
for 5 s. Windows keep such queues short, whatever the sender does.

Windows follow the receivers' lines. A slow uplink to fast ones fills its own modem all the same: at 1.7 Mbit/s round trips of 0.15 s took
1.2 s. The acknowledgements of what comes to that peer waited in the same queue, so gradients came to it in 2 s and not in the 1.3 that its
downlink takes. Hence a peer bounds what it has under way itself, too.
"""

from __future__ import annotations

from typing import NamedTuple

QUEUE_S, BEYOND = 0.2, 4 / 3
"""What may be under way is what the line carries in a round trip and `QUEUE_S`, or in so many round trips, if that is more. Two connections
that share a line then fit in a buffer of a second up to a round trip of 0.6 s. And a connection may always carry more than the line is
known to carry, so that a faster line shows."""
LEAST_BYTES = 128 << 10
"""A window is not smaller, as windows of few segments would slow a line down."""
LEAST_RATE = 1e6
"""Bytes per second; no line counts as slower. Tensors that travel alone over a long way take several round trips, as TCP begins slowly. So
they show a slow line at first: 262 KB over 0.6 s show 0.1 MB/s. A window of so little would keep them slow, and the line unknown."""
MOST_BYTES = 1 << 30
"""The kernel takes no larger numbers, and has smaller buffers."""

SENT_QUEUE_S, REFILLED = 0.1, 1.5
"""The same for what this peer sends. A kernel asks for more once a third of the room is free, so there is `REFILLED` times as much room as
is always to be under way. What two connections send fits in a modem's buffer of a second up to a round trip of 0.35 s."""
LEAST_SENT_BYTES = 48 << 10

BUSY, FULL = 0.5, 0.75
"""A connection may be held back by its bound if it has something to send for such a share of the time, and the uplink carries less than
such a share of its rate. Then this peer's modem has no queue, and round trips are those of the way."""
TRIED = 3
"""For so many looks it gets more room. If the uplink does not fill then, room is not what it lacks."""


class WayRoundTrip(NamedTuple):
    """The round trip of a connection's way, without the queue of this peer's modem, from one look to the next."""

    round_trip_s: float = 0.0
    """0: unknown."""
    tried: int = 0
    """Looks at which its bound may have held it back, since the uplink was full."""

    def next(self, least_s: float, now_s: float, busy: float, uplink: float) -> WayRoundTrip:
        """Look again. `least_s`, `now_s`: the least round trip and the usual one by the kernel.

        `busy`: the share of the time in which the connection had something to send; `uplink`: what this peer's connections carried together
        while they had something to send, as a share of its uplink's rate.

        The kernel's least one is of the last five minutes. Where a way has become longer meanwhile, a bound by it lets too little under
        way. That shows a slow line, so the next bound would be smaller still.
        """
        if uplink < FULL and busy >= BUSY:
            if self.tried >= TRIED:
                return WayRoundTrip(least_s, TRIED)
            return WayRoundTrip(max(self.round_trip_s, least_s, *([] if self.tried else [now_s])), self.tried + 1)
        return WayRoundTrip(max(least_s, min(self.round_trip_s, now_s)), 0 if uplink >= FULL else self.tried)


def send_room(line_rate: float, round_trip_s: float) -> int:
    """The bytes that may wait or be under way from this peer over a connection whose way takes `round_trip_s`.

    `line_rate`: what this peer's line carries upwards, in bytes per second, as a probe has shown it.
    """
    return int(min(max(line_rate * REFILLED * (round_trip_s + SENT_QUEUE_S), LEAST_SENT_BYTES), MOST_BYTES))


def receive_window(line_rate: float, round_trip_s: float) -> int:
    """The bytes that may be under way over a connection whose segments take `round_trip_s` at the least.

    `line_rate`: what this peer's line carries downwards, in bytes per second, as far as it is known.
    """
    under_way_s = max(round_trip_s + QUEUE_S, BEYOND * round_trip_s)
    return int(min(max(line_rate * under_way_s, LEAST_RATE * round_trip_s, LEAST_BYTES), MOST_BYTES))
