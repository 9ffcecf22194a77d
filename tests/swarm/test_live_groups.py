"""A stage that is larger than a group: daemons average in two levels, one dies in a round, and the model is that of a single machine."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from peerd.daemon.faults import Point
from tests.swarm.daemons import Swarm, until
from tests.swarm.runs import assert_equals_reference, exported_steps, swarm_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]

NUM_PEERS, GROUP_SIZE = 6, 2
PACE_MS = 20


def test_a_stage_in_groups_survives_a_death_in_a_round_and_equals_one_process() -> None:
    manifest = swarm_manifest(num_stages=1, microbatches_per_step=24)
    manifest = replace(manifest, swarm=replace(manifest.swarm, group_size=GROUP_SIZE))
    with Swarm(manifest) as swarm:
        first = swarm.start(stage=0, compute_stand_in_ms=PACE_MS)
        *_, victim = [swarm.join(0, data="", compute_stand_in_ms=PACE_MS, allow_faults=True) for _ in range(NUM_PEERS - 1)]
        for daemon in swarm.daemons:
            daemon.wait_until_serving()
        until(lambda: all(daemon.counters["group_sums"] for daemon in swarm.living))
        assert first.status["run"]["group_size"] == GROUP_SIZE

        before = sum(daemon.counters["rounds_failed"] for daemon in swarm.living if daemon is not victim)
        victim.request("fault", kind="kill", at=Point.SENDER)
        assert victim.exit_code(60) == -signal.SIGKILL
        until(lambda: swarm.total("rounds_failed") > before)
        until(lambda: len(first.table["stages"][0]["peers"]) == NUM_PEERS - 1)
        swarm.wait_for_step(max(daemon.status["peer"]["step"] for daemon in swarm.living) + 3)

        swarm.assert_exact()
        assert all(peer["phase"] != "unaveraged" for peer in first.table["stages"][0]["peers"])
        (counted,) = first.request("contributions")["stages"]
        rows = {row["peer"]: row["microbatches"] for row in counted["peers"]}
        assert all(rows[daemon.ready.peer] for daemon in swarm.living)
        assert sum(rows.values()) <= counted["steps"] * manifest.train.microbatches_per_step
        exported = swarm.export(swarm.living[-1])
        assert_equals_reference(exported, manifest, exported_steps(exported), swarm.folder / "cache" / "peerd")
