"""Peers spread over stages as their throughput asks, in real daemons; a stand-in sleeps in place of work, so that many fit two cores."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.swarm.daemons import Daemon, Swarm, until
from tests.swarm.runs import swarm_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.slow, pytest.mark.timeout(400)]

PERIOD_S = 30.0
LAST_MOVE_S = 20.0
"""The last of three decisions falls within three periods; then comes the end of a step, and a download."""
STAND_IN_MS = 200.0
MICROBATCHES = 48
ALONE_S = MICROBATCHES * STAND_IN_MS / 1000
"""What a step takes at the least while a stage has one peer."""


def test_seven_and_one_become_four_and_four_and_recover_from_the_loss_of_three() -> None:
    manifest = swarm_manifest(num_stages=2, steps=100_000, microbatches_per_step=MICROBATCHES, microbatch_size=1)
    with Swarm(replace(manifest, swarm=replace(manifest.swarm, rebalance_period_s=PERIOD_S))) as swarm:
        first = swarm.start(stage=1, keeps_stage=True, compute_stand_in_ms=STAND_IN_MS)
        others = [swarm.join(0, keeps_stage=True, compute_stand_in_ms=STAND_IN_MS)]
        others += [swarm.join(0, compute_stand_in_ms=STAND_IN_MS) for _ in range(6)]
        for daemon in others:
            daemon.wait_until_serving(timeout_s=120)
        until(lambda: is_measured(first), timeout_s=120)
        until(lambda: serving(first) == [4, 4], timeout_s=3 * PERIOD_S + LAST_MOVE_S)
        assert is_measured(first), "who has moved computes as it did before"
        assert sum(daemon.status["moves"] for daemon in others) == 3
        assert swarm.total("replayed_microbatches") == 0
        balanced = first.status["peer"]["step"]
        first.wait_for_step(balanced + 6, timeout_s=90)
        assert ALONE_S / mean_step_s(first, balanced, balanced + 5) > 2, "the stage that was one peer is four now"
        for daemon in [each for each in others if each.status["peer"]["stage"] == 1]:
            daemon.kill()
        until(lambda: serving(first) in ([3, 2], [2, 3]), timeout_s=4 * PERIOD_S + LAST_MOVE_S)
        first.wait_for_step(first.status["peer"]["step"] + 3, timeout_s=90)
        swarm.assert_exact()


def test_by_queues_a_peer_moves_to_where_microbatches_wait_and_says_so() -> None:
    period_s = 9.0
    manifest = swarm_manifest(num_stages=2, steps=100_000, microbatches_per_step=MICROBATCHES, microbatch_size=1)
    with Swarm(replace(manifest, swarm=replace(manifest.swarm, rebalance_period_s=period_s, rebalance="queues"))) as swarm:
        first = swarm.start(stage=1, keeps_stage=True, compute_stand_in_ms=STAND_IN_MS)
        others = [swarm.join(0, compute_stand_in_ms=STAND_IN_MS) for _ in range(3)]
        for daemon in others:
            daemon.wait_until_serving(timeout_s=120)
        until(lambda: backlogs(first)[1] > 2, timeout_s=120)
        before = backlogs(first)[1]
        until(lambda: serving(first) == [2, 2], timeout_s=6 * period_s + LAST_MOVE_S)
        assert sum(daemon.status["moves"] for daemon in others) == 1
        until(lambda: backlogs(first)[1] <= before / 2, timeout_s=6 * period_s)
        assert any("queued" in each.status["rebalancing"] for each in swarm.daemons)
        swarm.assert_exact()


def backlogs(daemon: Daemon) -> list[float]:
    """What waits in each stage, by the peers' records."""
    return [sum(row["backlog"] for row in stage["peers"]) for stage in daemon.table["stages"]]


def serving(daemon: Daemon) -> list[int]:
    """Peers per stage that serve, as one daemon sees it."""
    stages = daemon.table["stages"]
    return [sum(1 for row in stage["peers"] if row["phase"] != "joining" and not row["suspect"] and not row["leaving"]) for stage in stages]


def is_measured(daemon: Daemon) -> bool:
    """Whether it knows how fast everybody is."""
    return all(row["throughput"] > 0 or row["phase"] == "joining" for stage in daemon.table["stages"] for row in stage["peers"])


def mean_step_s(daemon: Daemon, begin: int, end: int) -> float:
    """Of the steps after `begin` up to `end`, by the times of their commits."""
    times = {step["step"]: step["time_s"] for step in daemon.history}
    return (times[end] - times[begin]) / (end - begin)
