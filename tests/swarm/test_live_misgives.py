"""A donor gives newcomers a made-up state: they find that, take another one, and train as one machine would."""

from __future__ import annotations

import pytest

from tests.swarm.daemons import Swarm
from tests.swarm.runs import assert_equals_reference, certified, exported_steps, swarm_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.slow, pytest.mark.timeout(300)]

PACE_MS = 40
REFUSED = b"the downloaded state is refused"
LIAR = "scripts.benchmarks._liars.misgives"
MOST_NEWCOMERS = 3
AVERAGES_KEPT = 4
"""Before that a newcomer comes to its stage's state from the first weights, by averages alone."""


def test_a_newcomer_whose_donor_makes_its_state_up_ends_with_that_of_its_stage() -> None:
    """One of the honest donors rounds a little differently, as another device would: so each state that is offered has one vote.

    Both take a moment to answer, so the liar's is the first of the newest.
    """
    with Swarm(certified(swarm_manifest(num_stages=2))) as swarm:
        swarm.start(stage=0, compute_stand_in_ms=PACE_MS)
        honest, unlike, liar = (swarm.join(1, compute_stand_in_ms=PACE_MS, allow_faults=True) for _ in range(3))
        for daemon in swarm.daemons:
            daemon.wait_until_serving()
        swarm.wait_for_step(AVERAGES_KEPT + 2)
        honest.request("lie", module=LIAR, factor=1.0, late_s=0.2)
        unlike.request("lie", module=LIAR, factor=1.0000002, late_s=0.2)
        liar.request("lie", module=LIAR)
        for _ in range(MOST_NEWCOMERS):
            newcomer = swarm.join(1, compute_stand_in_ms=PACE_MS)
            newcomer.wait_until_serving(120)
            if REFUSED in newcomer.log_file.read_bytes():
                break
        else:
            pytest.fail("no newcomer was given what the liar makes up")
        newcomer.wait_for_step(newcomer.status["peer"]["step"] + 3)
        swarm.assert_exact()
        exported = swarm.export(newcomer)
        assert_equals_reference(exported, swarm.manifest, exported_steps(exported), swarm.folder / "cache" / "peerd")
