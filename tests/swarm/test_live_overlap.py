"""Delayed updates in a real swarm: steps overlap, a peer dies with microbatches of two steps, and the model is the reference's."""

from __future__ import annotations

import pytest

from tests.swarm.daemons import Daemon, Swarm, until
from tests.swarm.runs import assert_equals_reference, certified, exported_steps, swarm_manifest
from tests.swarm.test_live_kill import PACE_MS, go_on

pytestmark = [pytest.mark.swarm, pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_delayed_run_survives_the_death_of_a_peer_that_holds_microbatches_of_two_steps() -> None:
    with Swarm(certified(swarm_manifest(num_stages=2, delayed_updates=True, max_gradient_norm=0.3))) as swarm:
        first = swarm.start(stage=0, compute_stand_in_ms=PACE_MS)
        second, victim, survivor = (swarm.join(stage, compute_stand_in_ms=PACE_MS) for stage in (0, 1, 1))
        for daemon in swarm.daemons:
            daemon.wait_until_serving()

        kill_while_steps_overlap(victim)
        go_on(survivor)
        kill_while_steps_overlap(first)
        go_on(survivor)

        swarm.assert_exact()
        exported = swarm.export(second)
        assert exported_steps(exported) >= 4
        assert_equals_reference(exported, swarm.manifest, exported_steps(exported), swarm.folder / "cache" / "peerd")


def kill_while_steps_overlap(daemon: Daemon) -> None:
    """While it holds a part of two steps that nobody else has."""
    until(lambda: daemon.status["peer"]["done"] and daemon.status["peer"]["next_done"])
    daemon.kill()
