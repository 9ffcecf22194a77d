"""How many bytes may be under way over one TCP connection: to this peer, which is the window that its kernel announces, and from it.

By itself a sender has more and more bytes under way, until the buffer before the slowest line is full and loses some. Home routers hold up
to a second there, and both ways suffer. Gradients wait behind that second. So do acknowledgements on a full uplink, so what comes the other
way takes a second more for each round trip of its slow start. What is lost is lost in hundreds of segments, and TCP passes nothing on until
it has sent them again. At 6.7 Mbit/s and 300 ms one stage had 1.6 MB under way, lost 67 segments at its end, and sent nothing to that peer
for 5 s. Windows keep such queues short, whatever the sender does.

Windows follow the receivers' lines. A slow uplink to fast ones fills its own modem all the same, so a peer bounds what it has under way
itself, too. Both bounds have to be alike: where a line is full both ways, acknowledgements wait in the queue of the other direction. So a
round trip takes as long as the direction with more under way needs, and the other one carries as much less as it has less under way. With
1.7 Mbit/s and 0.15 s a tensor needs 1.32 s of the line. With a full modem upwards and 150 KB downwards gradients took 2 s, with 100 KB
upwards and 150 KB downwards activations 1.8 to 2.0, with 100 to 140 KB upwards and 70 KB downwards gradients 1.7 to 1.9.
"""

from __future__ import annotations

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
REFILLED = 1.2
"""Room for what this peer sends, of what may be under way to it. A kernel asks for more once a third of the room is free, so what is under
way is 0.8 to 1.2 of what comes the other way."""


def receive_window(line_rate: float, round_trip_s: float) -> int:
    """The bytes that may be under way to this peer over a connection whose segments take `round_trip_s` at the least.

    `line_rate`: what this peer's line carries downwards, in bytes per second, as far as it is known.
    """
    return int(min(_under_way(line_rate, round_trip_s), MOST_BYTES))


def send_room(line_rate: float, round_trip_s: float) -> int:
    """The bytes that may wait or be under way from this peer over such a connection.

    `line_rate`: what this peer's line carries upwards, as a probe has shown it.
    """
    return int(min(REFILLED * _under_way(line_rate, round_trip_s), MOST_BYTES))


def _under_way(line_rate: float, round_trip_s: float) -> float:
    under_way_s = max(round_trip_s + QUEUE_S, BEYOND * round_trip_s)
    return max(line_rate * under_way_s, LEAST_RATE * round_trip_s, LEAST_BYTES)
