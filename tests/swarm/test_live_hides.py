"""The first address of a newcomer leads to a peer that hides all others: the newcomer meets them all the same."""

from __future__ import annotations

import pytest

from tests.swarm.daemons import Swarm
from tests.swarm.runs import assert_equals_reference, certified, exported_steps, swarm_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.slow, pytest.mark.timeout(240)]

PACE_MS = 150


def test_a_newcomer_whose_first_address_hides_the_others_meets_them_and_trains_with_them() -> None:
    with Swarm(certified(swarm_manifest(num_stages=2))) as swarm:
        first = swarm.start(stage=0, compute_stand_in_ms=PACE_MS)
        honest = [swarm.join(1, compute_stand_in_ms=PACE_MS) for _ in range(2)]
        liar = swarm.join(1, compute_stand_in_ms=PACE_MS, allow_faults=True)
        for daemon in swarm.daemons:
            daemon.wait_until_serving()
        liar.request("lie", module="scripts.benchmarks._liars.hides")
        contacts = " ".join([liar.ready.join.partition("#")[0], first.ready.join, honest[0].ready.join])
        newcomer = swarm.join(1, compute_stand_in_ms=PACE_MS, join=contacts)
        newcomer.wait_until_serving(120)
        assert {peer["id"] for stage in newcomer.table["stages"] for peer in stage["peers"]} == {d.ready.peer for d in swarm.daemons}
        newcomer.wait_for_step(newcomer.status["peer"]["step"] + 3)
        swarm.assert_exact()
        exported = swarm.export(newcomer)
        assert_equals_reference(exported, swarm.manifest, exported_steps(exported), swarm.folder / "cache" / "peerd")
