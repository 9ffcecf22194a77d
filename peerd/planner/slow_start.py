"""How long TCP holds a transfer up at first. Rates are bytes per second.

A connection that has been idle may have ten segments on the way, and about twice as many each round trip later (RFC 6928, RFC 5681).
At 100 Mbit/s and 200 ms 262 KB take four round trips more than on a connection that is busy. Where steps take seconds, the pauses at
their ends make all connections slow again, and that is a large part of a step.
"""

from __future__ import annotations

FIRST_WINDOW = 10 * 1448
"""Bytes that a connection has on the way at first, before an acknowledgement comes."""
ROUND_TRIPS = 3.5
"""Of a round: proposal and answers, the way of the parts, of the sums, and of the words between members. As `peerd trace` showed of real
daemons over links of 60 ms, where a round of 0.33 s moved parts of 58 KB."""


def held_up_s(num_bytes: float, rate: float, round_trip_s: float, window: float = FIRST_WINDOW) -> float:
    """How long a transfer waits for acknowledgements, s, beyond what its bytes take at this rate."""
    waited_s = 0.0
    while num_bytes > window and window < rate * round_trip_s:
        waited_s += round_trip_s - window / rate
        num_bytes -= window
        window *= 2
    return waited_s


def round_waits_s(num_bytes: float, num_members: int, rate: float, round_trip_s: float) -> float:
    """What a round takes beside sending all its bytes, s: its round trips, and the slow start of a part of `num_bytes` for each member."""
    return ROUND_TRIPS * round_trip_s + held_up_s(num_bytes / num_members, rate, round_trip_s)
