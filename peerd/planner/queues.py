"""What queues cost: devices and lines wait for work while microbatches wait at others, as only so many are in flight.

Mean value analysis of a closed network of queues (Reiser and Lavenberg 1980, in the approximation of Schweitzer 1979).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

UNEVEN = 1 / 3
"""What queues cost beside those where passes and arrivals are as uneven as chance makes them (exponential). Passes take about as long
each, and a step's microbatches come evenly to each peer: in `peerd simulate run` queues of homes cost an eighth to two fifths as much."""
MOST_ROUNDS, ENOUGH = 100, 1e-3


def waiting_share(works_s: Sequence[float], in_flight: float, way_s: float) -> float:
    """How much longer a step's microbatches take than at the busiest queue, as a share of that.

    `works_s`: what each queue (a device, an uplink, a downlink) works for a microbatch of the swarm, the mean over those that pass it and
    those that do not; `way_s`: what a microbatch spends besides, between peers.
    """
    if math.isinf(in_flight):
        return 0.0
    queued, others = [in_flight / len(works_s)] * len(works_s), max(0.0, 1 - 1 / in_flight)
    through = 0.0
    for _ in range(MOST_ROUNDS):
        waits_s = [work_s * (1 + others * here) for work_s, here in zip(works_s, queued, strict=True)]
        before, through = through, in_flight / (way_s + sum(waits_s))
        queued = [through * wait_s for wait_s in waits_s]
        if abs(through - before) <= ENOUGH * through:
            break
    return UNEVEN * max(0.0, 1 / max(works_s) / through - 1)
