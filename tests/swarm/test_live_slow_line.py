"""A machine whose line is too slow for the run's averages: foretold by `doctor` and at the join, shown to all by its record."""

from __future__ import annotations

import json

import pytest

from peerd.config.limits import Wishes, save_wishes
from peerd.policy.owner.governor import Limits
from tests.swarm.daemons import Swarm, run_peerd, until
from tests.swarm.runs import swarm_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(180)]
CAP = 60_000
"""Bytes per second. The stage's gradients take more than twice as long at that as a round may."""


def test_a_line_too_slow_for_the_averages_is_foretold_at_the_join_and_shown_to_all() -> None:
    with Swarm(swarm_manifest(num_stages=1, microbatches_per_step=4)) as swarm:
        first = swarm.start(compute_stand_in_ms=50)
        first.wait_for_step(2)
        home = swarm.new_home()
        home.folder.mkdir(parents=True)
        save_wishes(home, Wishes(limits=Limits(upload=CAP)))
        done = run_peerd(swarm.environment, "doctor", swarm.address, "--home", home.folder, "--json")
        (check,) = [check for check in json.loads(done.stdout)["checks"] if check["code"] == "line"]
        assert check["verdict"] == "warning"
        assert check["title"].startswith("this run needs 0.95")
        assert check["title"].endswith("this machine has 0.48")
        slow = swarm.join(data="")
        slow.wait_until_serving()
        assert "this run needs 0.95" in slow.log
        assert "averages take longer for it" in slow.log
        told = until(lambda: [row["up"] for row in first.table["stages"][0]["peers"] if row["id"] == slow.ready.peer and row["up"]])
        assert 0.5 * CAP <= told[0] <= CAP
        codes = [note["code"] for note in slow.status["health"]]
        assert {"slow-line", "unaveraged"}.intersection(codes)
        until(lambda: any(slow.ready.peer in note["title"] for note in first.status["health"] if note["code"] == "slow-mates"))
