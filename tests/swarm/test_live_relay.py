"""Peers that nobody can dial, each behind a router of its own that maps no port: they serve and average through a relay."""

from __future__ import annotations

import time

import pytest

from tests.swarm.daemons import Daemon, Swarm, until
from tests.swarm.home_networks import home_networks, why_not
from tests.swarm.runs import assert_equals_reference, exported_steps, swarm_manifest

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "-"),
]

RELAYED_WITHIN_S = 30.0
PATIENCE_S = 90.0


def test_two_homes_without_an_inbound_port_serve_and_average_through_a_relay_and_stay_exact() -> None:
    manifest = swarm_manifest(num_stages=2)
    with home_networks(2) as networks, Swarm(manifest) as swarm:
        relay = swarm.start(within=networks.public, host=networks.address, stage=0, relay=True)
        homes = [swarm.join(stage=1, within=home) for home in networks.homes]
        for home in homes:
            assert home.ready.peer
            ready_s = time.monotonic()
            until_reached(home, "relayed")
            assert time.monotonic() - ready_s < RELAYED_WITHIN_S
        row = next(peer for stage in relay.table["stages"] for peer in stage["peers"] if peer["id"] == homes[0].ready.peer)
        assert (row["reach"], "/p2p-circuit/" in row["addresses"][0]) == ("relayed", True)

        both = {home.ready.peer for home in homes}
        until(lambda: contributors(relay, stage=1) >= both, PATIENCE_S)
        # What the two of the same stage exchange goes through the relay, and nothing else does: they dial everybody else.
        assert relay.status["relay"]["circuits"] > 0
        until(lambda: relay.status["relay"]["bytes"] > 100_000, PATIENCE_S)
        paths = {peer["id"]: peer.get("path") for stage in homes[0].table["stages"] for peer in stage["peers"]}
        assert (paths[homes[1].ready.peer], paths[homes[0].ready.peer]) == ("relay", None)
        assert paths[relay.ready.peer] in ("direct", "tunnel")

        swarm.assert_exact()
        exported = swarm.export(relay)
        assert_equals_reference(exported, manifest, exported_steps(exported), swarm.folder / "cache" / "peerd")


def test_a_relay_whose_owner_caps_the_upload_stops_says_why_and_takes_the_home_back_afterwards() -> None:
    with home_networks(1) as networks, Swarm(swarm_manifest(num_stages=1)) as swarm:
        relay = swarm.start(within=networks.public, host=networks.address, relay=True)
        home = swarm.join(within=networks.homes[0])
        until_reached(home, "relayed")
        relay.request("limits", change={"upload": 50_000_000})
        until_reached(home, "client")
        assert relay.status["relay"]["off"] == "a cap on upload or download is set"
        assert "no relay is at hand" in home.status["reach"]["reason"]
        assert "unreachable" in {item["code"] for item in home.status["health"]}
        # It goes on all the same: it has dialled the other itself.
        swarm.wait_for_step(home.status["peer"]["step"] + 1, PATIENCE_S)
        relay.request("limits", change={"upload": 0})
        until_reached(home, "relayed")
        swarm.assert_exact()


def until_reached(daemon: Daemon, state: str) -> None:
    until(lambda: daemon.status["reach"]["state"] == state, PATIENCE_S)


def contributors(daemon: Daemon, stage: int) -> set[str]:
    """Peers whose microbatches are in the averages that the stage applied."""
    told = daemon.request("contributions")["stages"]
    return {peer["peer"] for each in told if each["stage"] == stage for peer in each["peers"] if peer["microbatches"]}
