"""A machine that sleeps longer than others wait for it: it fences itself, comes back, and ends where they do."""

from __future__ import annotations

import signal

import pytest

from peerd.table.view import TTL_PERIODS
from tests.swarm.daemons import Daemon, Swarm, until
from tests.swarm.runs import PERIOD_S, assert_equals_reference, exported_steps, swarm_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.slow, pytest.mark.timeout(300)]

PACE_MS = 60
TTL_S = TTL_PERIODS * PERIOD_S


def test_a_peer_that_was_stopped_longer_than_its_ttl_fences_itself_and_rejoins() -> None:
    with Swarm(swarm_manifest(num_stages=2)) as swarm:
        first = swarm.start(stage=0, compute_stand_in_ms=PACE_MS)
        sleeper, stays = (swarm.join(1, compute_stand_in_ms=PACE_MS) for _ in range(2))
        for daemon in swarm.daemons:
            daemon.wait_until_serving()
        sleeper.wait_until_mid_step(stays.status["peer"]["step"] + 1)
        peer, incarnation = sleeper.ready.peer, sleeper.status["peer"]["incarnation"]

        sleeper.signal(signal.SIGSTOP)
        until(lambda: age_of(peer, first) > TTL_S)
        went_on_from = stays.status["peer"]["step"]
        stays.wait_for_step(went_on_from + 2)
        sleeper.signal(signal.SIGCONT)

        until(lambda: sleeper.status["peer"]["incarnation"] > incarnation)
        assert "fenced" in sleeper.log
        sleeper.wait_for_step(stays.status["peer"]["step"] + 2)
        swarm.assert_exact()
        exported = swarm.export(sleeper)
        assert exported_steps(exported) > went_on_from + 2
        assert_equals_reference(exported, swarm.manifest, exported_steps(exported), swarm.folder / "cache" / "peerd")


def age_of(peer: str, seen_by: Daemon) -> float:
    """Seconds since the peer's record last rose; endless where it is not listed any more."""
    return min((row["age_s"] for stage in seen_by.table["stages"] for row in stage["peers"] if row["id"] == peer), default=float("inf"))
