"""A machine with two GPUs: one command starts a peer on each, and one command pauses, resumes and ends them."""

from __future__ import annotations

import contextlib
import json
import shutil
from typing import Any

import pytest
from filelock import FileLock

from peerd.config.paths import Home
from peerd.control.client import ControlClient
from peerd.errors import NoDaemonError
from tests.swarm.daemons import END_TIMEOUT_S, run_peerd, until
from tests.swarm.runs import swarm_manifest
from tests.swarm.test_live_device import DeviceSwarm

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]


class TwoGpus:
    """The command line of a machine with two pretend GPUs, one of which is an old card."""

    def __init__(self, swarm: DeviceSwarm) -> None:
        self.swarm = swarm
        self.home = swarm.new_home()

    def peerd(self, verb: str, *arguments: object) -> dict[str, Any]:
        """What a verb answers, once it has succeeded."""
        done = run_peerd(self.swarm.environment, verb, *arguments, "--home", self.home.folder, "--json")
        assert done.returncode == 0, done.stderr
        reply: dict[str, Any] = json.loads(done.stdout)
        return reply

    @property
    def daemons(self) -> list[dict[str, Any]]:
        """The status of each device's daemon, as one command shows them."""
        return [each["status"] for each in self.peerd("status")["devices"]]

    @property
    def homes(self) -> tuple[Home, Home]:
        return self.home, self.home.of_device(1)

    def wait_for_step(self, step: int) -> None:
        self.peerd("wait", "--step", step, "--timeout", 60)


def test_one_command_starts_a_peer_on_each_device_and_one_pause_gives_back_both() -> None:
    swarm = DeviceSwarm(swarm_manifest(num_stages=2))
    with swarm:
        swarm.take(0)
        first = swarm.start(stage=0)
        machine = TwoGpus(swarm)
        try:
            began = machine.peerd("join", first.ready.join, "--device", "all", "--detach", "--no-dashboard")
            assert [each["device"] for each in began["devices"]] == ["pretend:0", "pretend:1"]
            machine.wait_for_step(2)
            one, other = machine.daemons
            assert {one["peer"]["device"], other["peer"]["device"]} == {"Pretend GPU 0", "Pretend GPU 1"}
            assert one["peer"]["id"] != other["peer"]["id"]
            assert all(each["memory"]["held"] > 0 for each in (one, other))
            assert until(lambda: all(each["direct"]["local"] for each in machine.daemons))

            machine.peerd("limits", "--upload", "8Gbit")
            assert [each["owner"]["limits"]["upload"] for each in machine.daemons] == [1e9, 1e9]
            assert machine.peerd("pause")["resting"] is True
            assert [each["memory"]["held"] for each in machine.daemons] == [0, 0]
            step = first.status["peer"]["step"]
            machine.peerd("resume")
            until(lambda: not any(each["owner"]["resting"] for each in machine.daemons))
            machine.wait_for_step(step + 2)
            assert sum(each["counters"]["internal_errors"] for each in machine.daemons) == 0
            machine.peerd("leave")
            for home in machine.homes:
                _assert_ended(home)
            first.wait_for_step(step + 3)
            swarm.assert_exact()
        finally:
            for home in machine.homes:
                _end(home)
            shutil.rmtree(machine.home.folder, ignore_errors=True)


def _assert_ended(home: Home) -> None:
    with pytest.raises(NoDaemonError):
        ControlClient(home).request("status")


def _end(home: Home) -> None:
    """End what may still run, and wait until it writes nothing more."""
    with contextlib.suppress(NoDaemonError):
        ControlClient(home).request("leave", now=True)
    if home.lock.exists():
        FileLock(home.lock).acquire(timeout=END_TIMEOUT_S).lock.release()
