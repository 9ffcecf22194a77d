"""Peers that die in mid-step: the others go on, and the model is the one a single machine would have trained."""

from __future__ import annotations

import pytest

from tests.swarm.daemons import Daemon, Swarm
from tests.swarm.runs import assert_equals_reference, certified, exported_steps, swarm_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]

PACE_MS = 40


def test_a_run_survives_the_death_of_a_peer_and_then_of_the_bootstrap_peer() -> None:
    with Swarm(certified(swarm_manifest(num_stages=2))) as swarm:
        first = swarm.start(stage=0, compute_stand_in_ms=PACE_MS)
        second, victim, survivor = (swarm.join(stage, compute_stand_in_ms=PACE_MS) for stage in (0, 1, 1))
        for daemon in swarm.daemons:
            daemon.wait_until_serving()

        kill_in_mid_step(victim)
        go_on(survivor)
        kill_in_mid_step(first)
        go_on(survivor)

        swarm.assert_exact()
        assert swarm.total("faults_seen") >= 1
        exported = swarm.export(second)
        assert exported_steps(exported) >= 4
        assert_equals_reference(exported, swarm.manifest, exported_steps(exported), swarm.folder / "cache" / "peerd")


def kill_in_mid_step(daemon: Daemon) -> None:
    """While its ledger holds a part of the step that nobody else has."""
    daemon.wait_until_mid_step(daemon.status["peer"]["step"] + 1)
    daemon.kill()


def go_on(daemon: Daemon) -> None:
    daemon.wait_for_step(daemon.status["peer"]["step"] + 2)
