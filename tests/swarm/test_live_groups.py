"""A stage that is larger than a group: daemons average in two levels, one dies in a round, and the model is that of a single machine."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from peerd.config.manifest import Manifest
from peerd.daemon.faults import Point
from tests.swarm.daemons import Daemon, Swarm, until
from tests.swarm.runs import assert_equals_reference, certified, exported_steps, swarm_manifest

AT_ONCE = 7
"""Daemons that join together: each start takes seconds of a core."""

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]


def in_groups(group_size: int, microbatches: int, period_s: float = 1.0) -> Manifest:
    manifest = swarm_manifest(num_stages=1, microbatches_per_step=microbatches)
    return replace(manifest, swarm=replace(manifest.swarm, group_size=group_size, announce_period_s=period_s))


def averages_in_groups(daemon: Daemon) -> bool:
    """One that is alone in its group makes sections alone, and of a large group not everybody makes some."""
    counters = daemon.counters
    return bool(counters["group_sums"] or counters["average_sections"])


def survives_a_death_in_a_round(manifest: Manifest, num_peers: int, pace_ms: int, patience_s: float = 60.0) -> int:
    """Train until a member that dies in a round is gone and three more steps are done. Returns by how many members rounds were given up."""
    with Swarm(manifest) as swarm:
        first = swarm.start(stage=0, compute_stand_in_ms=pace_ms)
        while left := num_peers - len(swarm.daemons):
            number = min(left, AT_ONCE)
            joining = [first, *(swarm.join(0, data="", compute_stand_in_ms=pace_ms, allow_faults=True) for _ in range(number))]
            for daemon in joining:
                daemon.wait_until_serving(patience_s)
        victim = swarm.daemons[-1]
        until(lambda: all(map(averages_in_groups, swarm.living)) and swarm.total("average_sections") > 0, timeout_s=patience_s)
        assert swarm.total("group_sums")
        assert first.status["run"]["group_size"] == manifest.swarm.group_size

        before = sum(daemon.counters["rounds_failed"] for daemon in swarm.living if daemon is not victim)
        victim.request("fault", kind="kill", at=Point.SENDER)
        assert victim.exit_code(patience_s) == -signal.SIGKILL
        until(lambda: swarm.total("rounds_failed") > before, timeout_s=patience_s)
        until(lambda: len(first.table["stages"][0]["peers"]) == num_peers - 1, timeout_s=patience_s)
        swarm.wait_for_step(max(daemon.status["peer"]["step"] for daemon in swarm.living) + 3, patience_s)
        given_up = swarm.total("rounds_failed") - before

        swarm.assert_exact()
        assert all(peer["phase"] != "unaveraged" for peer in first.table["stages"][0]["peers"])
        (counted,) = first.request("contributions")["stages"]
        rows = {row["peer"]: row["microbatches"] for row in counted["peers"]}
        assert all(rows[daemon.ready.peer] for daemon in swarm.living)
        assert sum(rows.values()) <= counted["steps"] * manifest.train.microbatches_per_step
        exported = swarm.export(swarm.living[-1])
        assert_equals_reference(exported, manifest, exported_steps(exported), swarm.folder / "cache" / "peerd")
    return given_up


def test_a_stage_in_groups_survives_a_death_in_a_round_and_equals_one_process() -> None:
    survives_a_death_in_a_round(in_groups(2, 24), num_peers=6, pace_ms=20)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_64_daemons_of_a_stage_survive_a_death_in_a_round_and_equal_one_process() -> None:
    """It takes a quarter of an hour on two cores, and 16 GB. With news each second the daemons would have time for little else."""
    survives_a_death_in_a_round(in_groups(8, 192, period_s=8.0), num_peers=64, pace_ms=8000, patience_s=1100)


@pytest.mark.slow
@pytest.mark.parametrize("group_size", [2, 3])
def test_a_stage_in_certified_groups_survives_a_death_in_a_round_and_equals_one_process(group_size: int) -> None:
    survives_a_death_in_a_round(certified(in_groups(group_size, 24)), num_peers=6, pace_ms=20)


@pytest.mark.slow
@pytest.mark.parametrize("lie", ["misnames", "sections", "forks"])
def test_a_liar_in_certified_groups_stops_no_step_and_changes_none(lie: str) -> None:
    manifest = certified(in_groups(3, 24))
    with Swarm(manifest) as swarm:
        first = swarm.start(stage=0, compute_stand_in_ms=20)
        others = [swarm.join(0, data="", compute_stand_in_ms=20, allow_faults=True) for _ in range(5)]
        for daemon in swarm.daemons:
            daemon.wait_until_serving(60)
        until(lambda: all(map(averages_in_groups, swarm.living)), timeout_s=60)
        liar, honest = others[-1], [first, *others[:-1]]
        liar.request("lie", module=f"scripts.benchmarks._liars.{lie}")
        lied_at = max(daemon.status["peer"]["step"] for daemon in honest)
        for daemon in honest:
            daemon.wait_for_step(lied_at + 5, 120)
            assert [daemon.counters[each] for each in ("duplicate_microbatches", "lost_microbatches", "inexact_steps")] == [0, 0, 0]
        exported = swarm.export(honest[1])
        assert exported_steps(exported) >= lied_at + 5
        assert_equals_reference(exported, manifest, exported_steps(exported), swarm.folder / "cache" / "peerd")
