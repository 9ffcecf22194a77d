"""What a machine lacks while its peer trains: room on its disk, files that it may open, the right time, a key of its own.

The peer says so, trains on, and loses nothing. All share one swarm of one stage: a peer whose home lies on a small disk, and a mate.
"""

from __future__ import annotations

import json
import resource
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from peerd.config.paths import Home
from peerd.errors import ExitCode
from tests.small_disk import kept_full, needs_root, small_disk
from tests.swarm.daemons import Daemon, Swarm, run_peerd, until
from tests.swarm.runs import assert_equals_reference, exported_steps, swarm_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.slow, pytest.mark.timeout(120), needs_root]

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
    with kept_full(swarm.folder / "disk"):
        until(lambda: all(words in problems(peer).get("disk", "") for words in ("history", "the disk is full")))

        def told() -> str:  # not while a small file finds room that an old checkpoint left
            text = run_peerd(swarm.environment, "status", "--home", peer.home.folder).stdout
            return " ".join(text.split()) if "the disk is full" in text else ""

        assert "free some space; training goes on" in until(told)
        assert problems(mate) == {}
        step = peer.status["peer"]["step"]
        peer.wait_for_step(step + 5)
    until(lambda: newest_checkpoint(folder) > step + 5 and "history" not in problems(peer).get("disk", ""))
    swarm.assert_exact()
    exported = swarm.export(mate)
    assert_equals_reference(exported, swarm.manifest, exported_steps(exported), swarm.folder / "cache" / "peerd")


def test_open_files_that_run_out_are_told_before_they_are_gone(swarm: Swarm) -> None:
    peer, mate = swarm.daemons
    limits = resource.prlimit(peer.process.pid, resource.RLIMIT_NOFILE)

    def told_with_few_left() -> str:
        few = psutil.Process(peer.process.pid).num_fds() + 4
        resource.prlimit(peer.process.pid, resource.RLIMIT_NOFILE, (few, limits[1]))
        return problems(peer).get("open-files", "")

    assert "this peer needs 74 open files at least, 10 more for each other peer, and the limit is" in until(told_with_few_left)
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


def test_a_clock_that_is_a_day_off_is_known_whose_it_is_and_keeps_nobody_out(swarm: Swarm) -> None:
    """The address that newcomers join by is that of the peer whose clock is off."""
    peer, mate = swarm.daemons
    swarm.join(0).wait_until_serving()
    peer.request("fault", kind="skewed-clock", by_s=-86400.0, for_s=60.0)
    newcomer = swarm.join(0)
    newcomer.wait_until_serving()
    said = f"this machine's clock is 24.0 hours ahead of {peer.ready.peer}'s, and agrees with those of "  # how many answer in time
    assert said in newcomer.log
    until(lambda: "this machine's clock is 24.0 hours behind those of 3 peers, which agree" in problems(peer).get("clock", ""))
    until(lambda: any(item["code"] == "clocks-differ" and item["severity"] == "warning" for item in mate.status["health"]))
    peer.request("fault", kind="skewed-clock", by_s=0.0, for_s=0.0)
    until(lambda: "clock" not in problems(peer))
    swarm.assert_exact()


def test_a_copied_home_is_told_that_its_identity_is_in_use_and_the_peer_that_has_it_goes_on(swarm: Swarm) -> None:
    _, mate = swarm.daemons[:2]
    before = mate.status["peer"]["incarnation"]
    twins: list[Daemon] = []
    for address in (swarm.address, mate.ready.join, ""):
        home = Home(swarm.folder / f"twin{len(twins)}")
        home.folder.mkdir()
        for name in (home.identity.name, home.state.name):
            shutil.copy(mate.home.folder / name, home.folder / name)
        twins.append(swarm.spawn(join=address, home=str(home.folder)))
    for twin in twins:
        assert twin.exit_code() == ExitCode.IDENTITY_IN_USE, twin.log
        assert "identity" in twin.error_lines[0]
        assert "delete" in twin.error_lines[0]
    assert mate.status["peer"]["incarnation"] == before
    swarm.assert_exact()


def test_a_checkup_with_a_wrong_clock_names_the_clock_and_no_firewall(swarm: Swarm) -> None:
    off = {**swarm.environment, **swarm.clock_off_by(3600.0)}
    checkup = run_peerd(off, "doctor", swarm.address, "--json", "--home", swarm.folder / "none")
    assert checkup.stderr == ""
    found = {check["code"]: check for check in json.loads(checkup.stdout)["checks"]}
    assert found["clock"]["verdict"] == "problem"
    assert "this machine's clock is 60.0 minutes ahead of" in found["clock"]["title"]
    assert "firewall" not in found["dht"]["remedy"]


def newest_checkpoint(folder: Path) -> int:
    return max(int(path.name.split("-")[1]) for path in folder.glob("*.safetensors"))
