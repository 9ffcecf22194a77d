"""A machine that sleeps longer than others wait for it: it fences itself, comes back, and ends where they do."""

from __future__ import annotations

import signal

import pytest

from peerd.table.view import TTL_PERIODS
from tests.swarm.daemons import Swarm, until
from tests.swarm.runs import PERIOD_S, assert_equals_reference, swarm_manifest

pytestmark = pytest.mark.swarm


def test_a_peer_that_was_stopped_longer_than_its_ttl_fences_itself_and_rejoins() -> None:
    with Swarm(swarm_manifest(num_stages=2, steps=12)) as swarm:
        first = swarm.start(stage=0, compute_stand_in_ms=120)
        sleeper, stays = (swarm.join(1, compute_stand_in_ms=120) for _ in range(2))
        stays.wait_until_serving()
        sleeper.wait_until_mid_step(1)
        peer, incarnation = sleeper.ready.peer, sleeper.status["peer"]["incarnation"]
        sleeper.signal(signal.SIGSTOP)
        age_s = TTL_PERIODS * PERIOD_S + 1
        until(lambda: peer not in {row["id"] for row in first.table["stages"][1]["peers"] if row["age_s"] < age_s and not row["suspect"]})
        went_on_from = stays.status["peer"]["step"]
        stays.wait_for_step(went_on_from + 2)
        sleeper.signal(signal.SIGCONT)
        swarm.wait_for_step(12)
        swarm.assert_exact()
        assert sleeper.status["peer"]["incarnation"] > incarnation
        assert "fenced" in sleeper.log
        assert_equals_reference(swarm.export(sleeper), swarm.manifest, 12, swarm.folder / "cache" / "peerd")
