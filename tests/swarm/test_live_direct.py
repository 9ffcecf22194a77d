"""Direct connections, by TLS and over local sockets, in a live swarm.

They are used where they can be, left where a cap or an owner says so, and the model is the same.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.swarm.daemons import Daemon, Swarm, run_peerd, until
from tests.swarm.runs import assert_equals_reference, swarm_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]

STEPS = 12
PACE: dict[str, Any] = {"compute_stand_in_ms": 60}


def path(origin: Daemon, to: Daemon) -> str:
    """How one sends the other tensors, as it says."""
    peers = [peer for stage in origin.table["stages"] for peer in stage["peers"] if peer["id"] == to.ready.peer]
    return peers[0]["path"] if peers else ""


def test_a_swarm_over_direct_connections_equals_one_machine_and_a_cap_ends_them() -> None:
    manifest = swarm_manifest(num_stages=2, steps=STEPS)
    with Swarm(manifest) as swarm:
        first = swarm.start(stage=0, **PACE)
        mate, last, tunnels_only = swarm.join(0, **PACE), swarm.join(1, local=False, **PACE), swarm.join(1, direct=False, **PACE)
        for daemon in swarm.daemons:
            daemon.wait_until_serving()
        until(lambda: path(first, last) == path(last, mate) == "direct")
        until(lambda: path(first, mate) == path(mate, first) == "local")
        before = swarm.total("replayed_microbatches")  # who joins may launch what another has launched already
        assert path(first, tunnels_only) == path(tunnels_only, last) == "tunnel"
        told = first.status["direct"]
        assert told["port"] > 0
        assert told["peers"] > told["local"] >= 1  # a trainer calls its own stage, too
        assert "no-direct" in tunnels_only.status["direct"]["why"]

        capped = run_peerd(swarm.environment, "limits", "--upload", "400Mbit", "--home", last.home.folder)
        assert capped.returncode == 0, capped.stderr
        closed = {"port": 0, "peers": 0, "local": 0, "why": "a cap is set, which the tunnel keeps"}
        until(lambda: last.status["direct"].items() >= closed.items())
        until(lambda: path(first, last) == "tunnel")
        capped = run_peerd(swarm.environment, "limits", "--upload", "400Mbit", "--home", mate.home.folder)
        assert capped.returncode == 0, capped.stderr
        until(lambda: mate.status["direct"]["why"])
        assert path(first, mate) == path(mate, first) == "local"

        swarm.wait_for_step(STEPS)
        swarm.assert_exact()
        assert swarm.total("replayed_microbatches") == before
        assert_equals_reference(swarm.export(first), manifest, STEPS)
