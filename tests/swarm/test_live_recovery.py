"""What a swarm comes back from: p2pd's death or hang, everybody's death at once, a stage with too many peers."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sqlite3
from dataclasses import replace

import pytest

from peerd.config.manifest import Manifest
from tests.swarm.daemons import Daemon, Swarm, until
from tests.swarm.runs import assert_equals_reference, exported_steps, swarm_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.slow]

STEPS = 12


def test_a_run_resumes_exactly_after_everybody_was_killed() -> None:
    with Swarm(_checkpointing(swarm_manifest(num_stages=2, steps=STEPS))) as swarm:
        lasting = {"ephemeral": False, "compute_stand_in_ms": 60}
        first = swarm.start(stage=0, **lasting)
        everybody = [first, swarm.join(1, **lasting), swarm.join(0, **lasting)]
        for daemon in everybody:
            daemon.wait_until_serving()
        everybody[1].wait_until_mid_step(5)
        for daemon in everybody:
            daemon.kill()
        drafts = [each.home.checkpoints(first.ready.run) / ".elsewhere-1-00c0ffee.part" for each in everybody[1:]]
        for path in drafts:
            path.write_bytes(b"half a checkpoint")
        back = [_again(swarm, everybody[number]) for number in (1, 2)]  # the organiser's daemon does not come back
        for daemon in back:
            daemon.wait_for_step(STEPS)
        assert any("resuming from disk" in daemon.log for daemon in back)
        assert not any(path.exists() for path in drafts)
        swarm.assert_exact()
        assert_equals_reference(swarm.export(back[0]), swarm.manifest, STEPS, swarm.folder / "cache" / "peerd")
        shutil.rmtree(first.home.folder)


def test_a_peer_that_comes_back_from_a_pause_brings_what_its_stage_has_lost_meanwhile() -> None:
    """A mate slept; the other trained on, paused, and finds the mate awake with older parameters."""
    with Swarm(_checkpointing(swarm_manifest(num_stages=2))) as swarm:
        other = swarm.start(stage=1, compute_stand_in_ms=60)
        sleeper, trains = (swarm.join(0, compute_stand_in_ms=60, ephemeral=False) for _ in range(2))
        for daemon in swarm.daemons:
            daemon.wait_until_serving()
        sleeper.wait_until_mid_step(2)
        sleeper.signal(signal.SIGSTOP)
        slept_at = trains.status["peer"]["step"]
        trains.wait_for_step(slept_at + 5)
        trains.request("pause", silence_s=120.0)
        reached = trains.status["peer"]["step"]
        until(lambda: other.status["peer"]["step"] >= reached)
        sleeper.signal(signal.SIGCONT)
        until(lambda: any(row["phase"] != "joining" for row in other.table["stages"][0]["peers"]))
        trains.request("resume")
        swarm.wait_for_step(reached + 2)
        assert "resuming from disk" in trains.log
        assert_goes_on_exactly(swarm, other)
        for daemon in (sleeper, trains):
            daemon.kill()
            shutil.rmtree(daemon.home.folder)


def test_a_run_goes_back_when_all_peers_of_one_stage_died_and_came_back_with_an_older_step() -> None:
    manifest = swarm_manifest(num_stages=2, steps=STEPS)
    with Swarm(replace(manifest, swarm=replace(manifest.swarm, checkpoint_every_steps=3))) as swarm:
        lives = swarm.start(stage=0, compute_stand_in_ms=60)
        dies = swarm.join(1, compute_stand_in_ms=60, ephemeral=False)
        dies.wait_until_mid_step(8)
        dies.kill()
        back = swarm.spawn(home=str(dies.home.folder), compute_stand_in_ms=60)
        until(lambda: "going back to a checkpoint" in lives.log, timeout_s=90)
        swarm.wait_for_step(STEPS)
        swarm.assert_exact()
        assert_equals_reference(swarm.export(back), swarm.manifest, STEPS, swarm.folder / "cache" / "peerd")


def assert_goes_on_exactly(swarm: Swarm, daemon: Daemon) -> None:
    swarm.assert_exact()
    exported = swarm.export(daemon)
    assert_equals_reference(exported, swarm.manifest, exported_steps(exported), swarm.folder / "cache" / "peerd")


def test_a_founder_that_begins_anew_for_want_of_a_checkpoint_says_how_far_the_run_had_come() -> None:
    manifest = swarm_manifest(num_stages=1, steps=STEPS)
    with Swarm(replace(manifest, swarm=replace(manifest.swarm, checkpoint_every_steps=0))) as swarm:
        first = swarm.start(stage=0, ephemeral=False, compute_stand_in_ms=60)
        until(lambda: _steps_on_disk(first))
        first.kill()
        again = swarm.start(stage=0, home=str(first.home.folder))
        again.wait_until_serving()
        (said,) = [line for line in again.log.splitlines() if "begins anew" in line]
        assert "it was at step" in said
        assert "peerd join" in said
        assert "begins anew" not in first.log


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_p2pd_is_rebuilt_when_it_dies_or_hangs_and_no_work_is_lost(number: signal.Signals) -> None:
    with Swarm(swarm_manifest(num_stages=2, steps=STEPS)) as swarm:
        first = swarm.start(stage=0, compute_stand_in_ms=100)
        second = swarm.join(1, compute_stand_in_ms=100)
        second.wait_until_mid_step(1)
        incarnation = second.status["peer"]["incarnation"]
        os.kill(second.p2pd, number)
        until(lambda: any(item["code"] == "p2pd-restarted" for item in second.status["health"]), timeout_s=40)
        swarm.wait_for_step(STEPS)
        swarm.assert_exact()
        assert second.status["peer"]["incarnation"] == incarnation, "neither stage nor ledger was dropped"
        assert_equals_reference(swarm.export(first), swarm.manifest, STEPS, swarm.folder / "cache" / "peerd")


def test_a_run_goes_on_after_the_p2pd_of_every_peer_was_killed_again_and_again() -> None:
    """While one is rebuilt, others may not answer it; that is no failure of its own p2pd."""
    with Swarm(swarm_manifest(num_stages=2)) as swarm:
        swarm.start(stage=0, compute_stand_in_ms=60)
        swarm.join(1, compute_stand_in_ms=60)
        for daemon in swarm.daemons:
            daemon.wait_until_serving()
        for _ in range(4):
            for daemon in swarm.daemons:
                killed = until(lambda daemon=daemon: _killed_p2pd(daemon))  # type: ignore[misc]
                until(lambda daemon=daemon, killed=killed: _living_p2pd(daemon) not in (0, killed))  # type: ignore[misc]
        step = max(daemon.status["peer"]["step"] for daemon in swarm.daemons)
        swarm.wait_for_step(step + 2, 120)
        assert_goes_on_exactly(swarm, swarm.daemons[0])


def test_a_peer_moves_to_the_stage_that_lacks_one_and_nothing_is_replayed() -> None:
    manifest = swarm_manifest(num_stages=2, steps=60)
    with Swarm(replace(manifest, swarm=replace(manifest.swarm, rebalance_period_s=4.0))) as swarm:
        first = swarm.start(stage=0, keeps_stage=True, compute_stand_in_ms=40)
        others = [swarm.join(1, compute_stand_in_ms=40) for _ in range(3)]
        for daemon in others:
            daemon.wait_until_serving()
        p2pds = {daemon.ready.peer: daemon.p2pd for daemon in others}
        until(lambda: len([row for row in first.table["stages"][0]["peers"] if row["phase"] != "joining"]) == 2, timeout_s=60)
        moved = [daemon for daemon in others if daemon.status["moves"]]
        assert len(moved) == 1
        assert moved[0].status["peer"]["stage"] == 0
        assert moved[0].p2pd == p2pds[moved[0].ready.peer], "a move keeps the connections"
        assert swarm.total("replayed_microbatches") == 0
        swarm.wait_for_step(first.status["peer"]["step"] + 2)
        swarm.assert_exact()


def _living_p2pd(daemon: Daemon) -> int:
    """Its process id; 0 where there is none at this moment."""
    try:
        return daemon.p2pd
    except (IndexError, FileNotFoundError, ProcessLookupError):
        return 0


def _killed_p2pd(daemon: Daemon) -> int:
    """The process id of the p2pd that was killed; 0 where there was none."""
    process = _living_p2pd(daemon)
    with contextlib.suppress(ProcessLookupError):
        if process:
            os.kill(process, signal.SIGKILL)
    return process


def _steps_on_disk(daemon: Daemon) -> int:
    path = daemon.home.history(daemon.ready.run)
    if not path.exists():
        return 0
    with contextlib.closing(sqlite3.connect(path)) as history:
        return int(history.execute("SELECT count(*) FROM steps").fetchone()[0])


def _checkpointing(manifest: Manifest) -> Manifest:
    return replace(manifest, swarm=replace(manifest.swarm, checkpoint_every_steps=2))


def _again(swarm: Swarm, daemon: Daemon) -> Daemon:
    """The same home once more, without an address, and without saying where its text is; this time it is removed at the end."""
    return swarm.spawn(home=str(daemon.home.folder), compute_stand_in_ms=60)
