"""What queues cost: peers wait for work while microbatches wait at others, as only so many are in flight.

Mean value analysis of a closed network of queues (Reiser and Lavenberg 1980, in the approximation of Schweitzer 1979). Shares follow
rates, so the peers of a stage are alike: each computes for the same part of the time, and a microbatch visits one of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

UNEVEN = 1 / 3
"""What queues cost beside those where passes and arrivals are as uneven as chance makes them (exponential). Passes take about as long
each, and a step's microbatches come evenly to each peer: in `peerd simulate run` queues of homes cost an eighth to two fifths as much."""
MOST_ROUNDS, ENOUGH = 100, 1e-4


def waiting_share(rates: Sequence[float], sizes: Sequence[int], in_flight: float, way_s: float) -> float:
    """How much longer a step's microbatches take than at the slowest stage's rate, as a share of that.

    `rates`: microbatches per second of each stage, all positive; `sizes`: its peers; `way_s`: what a microbatch spends between peers.
    """
    if math.isinf(in_flight):
        return 0.0
    works_s = [1 / rate for rate in rates]
    queued, others = [in_flight / sum(sizes)] * len(sizes), max(0.0, 1 - 1 / in_flight)
    through = 0.0
    for _ in range(MOST_ROUNDS):
        waits_s = [work_s * (1 + others * here) for work_s, here in zip(works_s, queued, strict=True)]
        before, through = through, in_flight / (way_s + sum(size * wait_s for size, wait_s in zip(sizes, waits_s, strict=True)))
        queued = [through * wait_s for wait_s in waits_s]
        if abs(through - before) <= ENOUGH * through:
            break
    return UNEVEN * max(0.0, min(rates) / through - 1)
