"""Peers that die in mid-step: the others go on, and the model is the one a single machine would have trained."""

from __future__ import annotations

import pytest

from tests.swarm.daemons import Swarm
from tests.swarm.runs import assert_equals_reference, swarm_manifest

pytestmark = pytest.mark.swarm

STEPS = 5


def test_a_run_survives_the_death_of_a_peer_and_then_of_the_bootstrap_peer() -> None:
    with Swarm(swarm_manifest(num_stages=2, steps=STEPS)) as swarm:
        first = swarm.start(stage=0, compute_stand_in_ms=60)
        second, victim, survivor = (swarm.join(stage, compute_stand_in_ms=60) for stage in (0, 1, 1))
        victim.wait_until_mid_step(1)
        victim.kill()
        second.wait_until_serving()
        survivor.wait_until_serving()
        first.wait_until_mid_step(2)
        first.kill()
        swarm.wait_for_step(STEPS)
        swarm.assert_exact()
        assert swarm.total("replayed_microbatches") >= 0
        assert swarm.total("faults_seen") >= 1
        assert_equals_reference(swarm.export(survivor), swarm.manifest, STEPS, swarm.folder / "cache" / "peerd")
