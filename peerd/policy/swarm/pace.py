"""How long a microbatch takes, by what the peers' records say. What waits for microbatches waits in terms of that, and of no fixed time."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from statistics import median_low

from peerd.table.record import PeerId, Phase
from peerd.table.view import LiveView

Mark = tuple[int, int, int, Phase, int, int]
"""What of a record changes as its peer works."""

KNOWN_AFTER_S = 5.0
"""Before a peer has measured a few microbatches, its record says what one takes only if that is longer than this. The first one takes
seconds anyway, because each kernel runs for the first time; but others must not wait for several of minutes to hear of them."""
MOST_TIMES_TYPICAL = 10.0
"""A peer counts as at most this many times slower than the typical one of the swarm: what a peer says of itself may be false."""


def way_s(live: LiveView, num_stages: int, microbatch_size: int) -> float:
    """Computing time of a microbatch in all stages together, at the slowest peer of each, s. 0 while no peer knows what one takes."""
    known_s = [
        [microbatch_size / record.throughput for record in live.serving(stage) if record.throughput > 0] for stage in range(num_stages)
    ]
    all_s = list(chain.from_iterable(known_s))
    most_s = MOST_TIMES_TYPICAL * median_low(all_s) if all_s else 0.0
    return sum(min(max(stage_s), most_s) for stage_s in known_s if stage_s)


def still_since(before: Mapping[PeerId, tuple[Mark, float]], live: LiveView, now_s: float) -> dict[PeerId, tuple[Mark, float]]:
    """By peer, what its record says of its work, and since when it has said that; `before` is the last answer."""
    found = {}
    for record in live.records:
        mark = record.incarnation, record.stage, record.step, record.phase, record.done, record.next_done
        known = before.get(record.peer)
        found[record.peer] = known if known is not None and known[0] == mark else (mark, now_s)
    return found
