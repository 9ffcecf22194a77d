"""Microbatches that last tens of announce periods, as ones of minutes do at five seconds: no deadline fires, and their progress shows."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from peerd.errors import ExitCode
from tests.swarm.daemons import Daemon, Swarm, run_peerd, until
from tests.swarm.runs import assert_equals_reference, swarm_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.slow, pytest.mark.timeout(300)]

PERIOD_S = 0.5
PACE_MS = 12_000
"""24 periods, and longer than a caller waits for a sign of life."""
MICROBATCHES, STEPS = 4, 2


def test_microbatches_of_tens_of_announce_periods_fire_no_deadline_and_their_progress_shows() -> None:
    """One peer is twice as slow. Two more join while the others compute, and one leaves in the middle of the last step."""
    manifest = swarm_manifest(num_stages=2, steps=STEPS, microbatches_per_step=MICROBATCHES)
    manifest = replace(manifest, swarm=replace(manifest.swarm, announce_period_s=PERIOD_S))
    with Swarm(manifest) as swarm:
        first = swarm.start(stage=0, compute_stand_in_ms=PACE_MS)
        slow = swarm.join(1, compute_stand_in_ms=PACE_MS, slow_factor=2.0)
        until(lambda: computes(slow, for_s=1.0))
        leaver, stays = (swarm.join(stage, compute_stand_in_ms=PACE_MS) for stage in (0, 1))
        for daemon in (leaver, stays):
            daemon.wait_until_serving()
        until(lambda: computes(slow, for_s=11.0))
        until(lambda: re.search(r"computes +microbatch \d+ of step \d+ for \d+s", shown(swarm, slow, "status", "--long")))
        until(lambda: re.search(r"works \d\ds", shown(swarm, first, "peers")))
        until(lambda: nothing_is_wrong(swarm) and leaver.status["peer"]["step"] == STEPS - 1, timeout_s=120)
        until(lambda: computes(leaver, for_s=1.0))
        left = run_peerd(swarm.environment, "leave", "--home", leaver.home.folder)
        assert (left.returncode, left.stderr) == (0, "")
        assert leaver.exit_code() == ExitCode.OK
        until(lambda: nothing_is_wrong(swarm) and all(each.status["peer"]["step"] == STEPS for each in swarm.living), timeout_s=120)
        for name in ("replayed_microbatches", "suppressed_microbatches", "ledger_resets", "faults_seen", "messages_refused", "reloads"):
            assert {name: swarm.total(name)} == {name: 0}
        assert not [line for daemon in swarm.daemons for line in daemon.log.splitlines() if is_bad(line)]
        swarm.assert_exact()
        assert_equals_reference(swarm.export(stays), manifest, STEPS, swarm.folder / "cache" / "peerd")


def computes(daemon: Daemon, for_s: float) -> bool:
    found = daemon.status.get("computing")
    return found is not None and found["for_s"] >= for_s


def shown(swarm: Swarm, daemon: Daemon, *verb: str) -> str:
    done = run_peerd(swarm.environment, *verb, "--home", daemon.home.folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def nothing_is_wrong(swarm: Swarm) -> bool:
    """No daemon has anything to tell but that its speed is a stand-in's."""
    told = [item for daemon in swarm.living for item in daemon.status["health"]]
    assert {item["code"] for item in told} <= {"stand-in"}, told
    return True


def is_bad(line: str) -> bool:
    """A line of a log that tells of trouble."""
    return json.loads(line).get("level") in ("warning", "error")
