"""Two homes behind routers that map no port: tensors take the way through both routers, and the relay while a cap is set, or when a router
closes it."""

from __future__ import annotations

import pytest

from peerd.link.quic import is_installed
from tests.swarm.daemons import Daemon, Swarm, run_peerd, until
from tests.swarm.home_networks import home_networks, why_not
from tests.swarm.runs import assert_equals_reference, exported_steps, swarm_manifest

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "-"),
    pytest.mark.skipif(not is_installed(), reason="needs the package iroh"),
]

PATIENCE_S = 90.0


def path(origin: Daemon, to: Daemon) -> str:
    """How one sends the other tensors, as it says."""
    peers = [peer for stage in origin.table["stages"] for peer in stage["peers"] if peer["id"] == to.ready.peer]
    return str(peers[0].get("path", "")) if peers else ""


def test_two_homes_exchange_tensors_through_their_routers_and_go_back_to_the_relay_when_one_closes() -> None:
    manifest = swarm_manifest(num_stages=2)
    with home_networks(2) as networks, Swarm(manifest) as swarm:
        relay = swarm.start(within=networks.public, host=networks.address, stage=0, relay=True)
        first, second = homes = [swarm.join(stage=1, within=home) for home in networks.homes]
        for home in homes:
            until(lambda home=home: home.status["reach"]["state"] == "relayed", PATIENCE_S)  # type: ignore[misc]
        until(lambda: path(first, second) == path(second, first) == "quic", PATIENCE_S)
        told = first.status["direct"]
        assert told["quic"] >= 1
        assert told["quic_why"] == ""
        assert told["seen_at"].startswith("11.22.33.11:")

        for cap in ("400Mbit", "none"):
            done = run_peerd(swarm.environment, "limits", "--upload", cap, "--home", second.home.folder)
            assert done.returncode == 0, done.stderr
            ways = {"relay", "tunnel"} if cap != "none" else {"quic"}
            until(lambda ways=ways: {path(first, second), path(second, first)} <= ways, PATIENCE_S)  # type: ignore[misc]

        networks.lose_udp(home=1)
        until(lambda: "quic" not in (path(first, second), path(second, first)), PATIENCE_S)
        swarm.wait_for_step(first.status["peer"]["step"] + 2, PATIENCE_S)
        swarm.assert_exact()
        exported = swarm.export(relay)
        assert_equals_reference(exported, manifest, exported_steps(exported), swarm.folder / "cache" / "peerd")
