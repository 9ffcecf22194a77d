"""What a machine lacks while its peer trains: room on its disk, files that it may open, the right time.

The peer says so, trains on, and loses nothing. All share one swarm of one stage: a peer whose home lies on a small disk, and a mate.
"""

from __future__ import annotations

import resource
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.small_disk import fill, needs_root, small_disk
from tests.swarm.daemons import Daemon, Swarm, run_peerd, until
from tests.swarm.runs import assert_equals_reference, exported_steps, swarm_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(120), needs_root]

PACE_MS = 20


@pytest.fixture(scope="module")
def swarm() -> Iterator[Swarm]:
    manifest = swarm_manifest(num_stages=1)
    manifest = replace(manifest, swarm=replace(manifest.swarm, checkpoint_every_steps=2))
    with Swarm(manifest) as swarm, small_disk(swarm.folder / "disk", kilobytes=8192) as disk:
        swarm.start(stage=0, compute_stand_in_ms=PACE_MS, home=str(disk / "home"), allow_faults=True)
        swarm.join(0, compute_stand_in_ms=PACE_MS)
        for daemon in swarm.daemons:
            daemon.wait_until_serving()
        yield swarm
        for daemon in swarm.living:
            daemon.signal(signal.SIGTERM)
            assert daemon.exit_code() == 0


def problems(daemon: Daemon) -> dict[str, str]:
    return {item["code"]: item["title"] for item in daemon.status["health"] if item["severity"] == "problem"}


def test_a_full_disk_is_told_and_costs_nothing_but_what_it_cannot_take(swarm: Swarm) -> None:
    peer, mate = swarm.daemons
    (folder,) = (peer.home.folder / "checkpoints").iterdir()
    until(lambda: len(list(folder.glob("*.safetensors"))) == 4)
    ballast = fill(swarm.folder / "disk")
    until(lambda: "history" in problems(peer).get("disk", ""))
    assert "the disk is full" in problems(peer)["disk"]
    told = run_peerd(swarm.environment, "status", "--home", peer.home.folder).stdout
    assert "the disk is full" in told
    assert "free some space; training goes on" in " ".join(told.split()), told
    assert problems(mate) == {}
    step = peer.status["peer"]["step"]
    peer.wait_for_step(step + 5)
    ballast.unlink()
    until(lambda: newest_checkpoint(folder) > step + 5 and "history" not in problems(peer).get("disk", ""))
    swarm.assert_exact()
    exported = swarm.export(mate)
    assert_equals_reference(exported, swarm.manifest, exported_steps(exported), swarm.folder / "cache" / "peerd")


def test_open_files_that_run_out_are_told_before_they_are_gone(swarm: Swarm) -> None:
    peer, mate = swarm.daemons
    limits = resource.prlimit(peer.process.pid, resource.RLIMIT_NOFILE)
    few = psutil.Process(peer.process.pid).num_fds() + 5
    resource.prlimit(peer.process.pid, resource.RLIMIT_NOFILE, (few, limits[1]))
    until(lambda: "open-files" in problems(peer))
    assert f"this peer needs 74 open files at least, 10 more for each other peer, and the limit is {few}" in problems(peer)["open-files"]
    mate.wait_for_step(mate.status["peer"]["step"] + 3)
    resource.prlimit(peer.process.pid, resource.RLIMIT_NOFILE, limits)
    until(lambda: "open-files" not in problems(peer))
    peer.wait_for_step(mate.status["peer"]["step"] + 2)
    swarm.assert_exact()


def test_a_wall_clock_that_jumps_ahead_fences_once_as_sleep_does(swarm: Swarm) -> None:
    """On WSL 2 and some Macs nothing but the wall clock tells that the machine slept."""
    peer, mate = swarm.daemons
    before = peer.status["peer"]["incarnation"]
    peer.request("fault", kind="skewed-clock", by_s=1.0, for_s=1.0)
    peer.request("fault", kind="skewed-clock", by_s=7200.0, for_s=5.0)
    until(lambda: peer.status["peer"]["incarnation"] == before + 1)
    assert "this peer did not run for 7" in peer.log
    peer.wait_for_step(mate.status["peer"]["step"] + 2)
    time.sleep(3.0)
    swarm.assert_exact()
    assert peer.status["peer"]["incarnation"] == before + 1, "set back again, it is not fenced a second time"


def newest_checkpoint(folder: Path) -> int:
    return max(int(path.name.split("-")[1]) for path in folder.glob("*.safetensors"))
