"""The doctor at a home behind a router: it tells which of its two ports others do not get to, until the router forwards both."""

from __future__ import annotations

import json

import pytest

from tests.swarm.daemons import Swarm, run_peerd
from tests.swarm.home_networks import home_networks, why_not
from tests.swarm.runs import swarm_manifest

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "-"),
]

PORT, DIRECT_PORT = 31337, 31338
WAN = "11.22.33.11"


def test_a_home_is_told_which_port_others_do_not_reach_and_what_to_forward() -> None:
    with home_networks(1) as networks, Swarm(swarm_manifest(num_stages=1)) as swarm:
        swarm.start(within=networks.public, host=networks.address, compute_stand_in_ms=80).wait_until_serving()

        def doctor() -> tuple[int, dict[str, dict[str, str]]]:
            flags = ("--port", PORT, "--direct-port", DIRECT_PORT, "--device", "cpu", "--json")
            done = run_peerd(swarm.environment, "doctor", swarm.address, *flags, within=networks.homes[0])
            assert done.stdout, done.stderr
            return done.returncode, {check["code"]: check for check in json.loads(done.stdout)["checks"]}

        code, checks = doctor()
        assert code == 1
        assert {name: checks[name]["verdict"] for name in ("dial-back", "relay", "direct")} == {
            "dial-back": "problem",
            "relay": "warning",
            "direct": "warning",
        }
        assert f"0 of 1 peers reached port {PORT} at {WAN}" in checks["dial-back"]["title"]
        assert f"forward TCP port {PORT}" in checks["dial-back"]["remedy"]
        assert "no peer volunteers as a relay" in checks["relay"]["title"]
        assert f"forward TCP port {DIRECT_PORT}" in checks["direct"]["remedy"]

        networks.forward(0, PORT)
        code, checks = doctor()
        assert (code, checks["dial-back"]["verdict"], checks["relay"]["verdict"], checks["direct"]["verdict"]) == (0, "ok", "ok", "warning")
        assert f"0 of 1 peers reached port {DIRECT_PORT}" in checks["direct"]["title"]

        networks.forward(0, DIRECT_PORT)
        code, checks = doctor()
        assert (code, checks["direct"]["verdict"]) == (0, "ok"), checks
