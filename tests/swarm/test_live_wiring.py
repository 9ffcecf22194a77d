"""Stochastic wiring among unlike peers: the faster one gets the more work, and the slower one is still worth having."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

import pytest

from tests.swarm.daemons import Daemon, Swarm
from tests.swarm.runs import swarm_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.slow, pytest.mark.timeout(300)]

PACE_MS = 100
SLOWER = 3
ALONE, TOGETHER = 2, 5
"""Steps measured with the fast peer alone, before and after, and with both."""


def test_a_peer_three_times_slower_gets_a_third_of_the_work_and_the_step_is_faster_with_it() -> None:
    with Swarm(swarm_manifest(num_stages=1, microbatches_per_step=24)) as swarm:
        fast = swarm.start(compute_stand_in_ms=PACE_MS)
        fast.wait_for_step(1 + ALONE)
        alone_s = step_times_s(fast, 1, ALONE)

        slow = swarm.join(compute_stand_in_ms=PACE_MS, slow_factor=SLOWER)
        slow.wait_until_serving()
        first = fast.status["peer"]["step"] + 1  # the first step that both begin
        fast.wait_for_step(first)
        before = accumulated(fast, slow)
        fast.wait_for_step(first + TOGETHER)
        after = accumulated(fast, slow)
        together_s = step_times_s(fast, first, TOGETHER)
        swarm.assert_exact()
        slow.request("leave")
        assert slow.exit_code() == 0

        first = fast.status["peer"]["step"] + 1
        fast.wait_for_step(first + ALONE)
        alone_s += step_times_s(fast, first, ALONE)

        share = (after[0] - before[0]) / (after[1] - before[1])
        assert 2.2 <= share <= 3.8
        assert median(together_s) < median(alone_s)
        swarm.assert_exact()


def accumulated(*daemons: Daemon) -> list[int]:
    return [daemon.counters["accumulated_microbatches"] for daemon in daemons]


def step_times_s(daemon: Daemon, first: int, num_steps: int) -> list[float]:
    """From one commit to the next, of these steps."""
    times = [entry["time_s"] for entry in daemon.history if first - 1 <= entry["step"] < first + num_steps]
    return [later - earlier for earlier, later in pairwise(times)]
