"""Stochastic wiring among unlike peers: the faster one gets the more work, and the slower one is still worth having."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.swarm.daemons import Daemon, Swarm
from tests.swarm.runs import swarm_manifest

pytestmark = pytest.mark.swarm

PACE_MS = 50
SLOWER = 3
ALONE, TOGETHER = 2, 5
"""Steps measured with the fast peer alone and with both."""


def test_a_peer_three_times_slower_gets_a_third_of_the_work_and_the_step_is_faster_with_it() -> None:
    with Swarm(swarm_manifest(num_stages=1, microbatches_per_step=32)) as swarm:
        fast = swarm.start(compute_stand_in_ms=PACE_MS)
        fast.wait_for_step(1 + ALONE)
        alone_s = typical_step_s(fast, 1)

        slow = swarm.join(compute_stand_in_ms=PACE_MS, slow_factor=SLOWER)
        slow.wait_until_serving()
        together_from = fast.status["peer"]["step"] + 1  # the first step that both begin
        fast.wait_for_step(together_from)
        before = accumulated(fast, slow)
        fast.wait_for_step(together_from + TOGETHER)
        after = accumulated(fast, slow)
        together_s = typical_step_s(fast, together_from)

        share = (after[0] - before[0]) / (after[1] - before[1])
        assert 2.2 <= share <= 3.8
        assert together_s < alone_s
        swarm.assert_exact()


def accumulated(*daemons: Daemon) -> list[int]:
    return [daemon.counters["accumulated_microbatches"] for daemon in daemons]


def typical_step_s(daemon: Daemon, first: int) -> float:
    """The median time from one commit to the next, beginning with that of step `first`."""
    times = [entry["time_s"] for entry in daemon.history if entry["step"] >= first - 1]
    return sorted(later - earlier for earlier, later in pairwise(times))[(len(times) - 1) // 2]
