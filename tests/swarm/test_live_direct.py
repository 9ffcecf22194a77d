"""Direct connections in a live swarm: used where they can be, left where a cap or an owner says so, and the model is the same."""

from __future__ import annotations

import pytest

from tests.swarm.daemons import Daemon, Swarm, run_peerd, until
from tests.swarm.runs import assert_equals_reference, swarm_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]

STEPS = 12
PACE = {"compute_stand_in_ms": 60}


def paths_of(daemon: Daemon) -> dict[str, str]:
    """How it sends tensors, by peer."""
    return {peer["id"]: peer["path"] for stage in daemon.table["stages"] for peer in stage["peers"] if "path" in peer}


def test_a_swarm_over_direct_connections_equals_one_machine_and_a_cap_ends_them() -> None:
    manifest = swarm_manifest(num_stages=2, steps=STEPS)
    with Swarm(manifest) as swarm:
        first = swarm.start(stage=0, **PACE)
        mate, last, tunnels_only = swarm.join(0, **PACE), swarm.join(1, **PACE), swarm.join(1, direct=False, **PACE)
        for daemon in swarm.daemons:
            daemon.wait_until_serving()
        peers = {daemon: daemon.ready.peer for daemon in swarm.daemons}
        until(lambda: paths_of(first)[peers[last]] == paths_of(mate)[peers[first]] == "direct")
        assert paths_of(first)[peers[tunnels_only]] == "tunnel"
        assert set(paths_of(tunnels_only).values()) == {"tunnel"}
        told = first.status["direct"]
        assert told["port"] > 0
        assert told["peers"] >= 1
        assert "no-direct" in tunnels_only.status["direct"]["why"]

        capped = run_peerd(swarm.environment, "limits", "--upload", "400Mbit", "--home", last.home.folder)
        assert capped.returncode == 0, capped.stderr
        until(lambda: last.status["direct"]["port"] == 0)
        assert last.status["direct"]["peers"] == 0
        until(lambda: paths_of(first)[peers[last]] == "tunnel")

        swarm.wait_for_step(STEPS)
        swarm.assert_exact()
        assert swarm.total("replayed_microbatches") == 0
        assert_equals_reference(swarm.export(first), manifest, STEPS)
