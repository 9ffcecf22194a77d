"""Daemons on an accelerator whose memory other programs take: they rest and come back, and none ends or asks for ever."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from peerd.config.manifest import ModelConfig
from tests.pretend.meter import GB
from tests.pretend.plugin import environment
from tests.swarm.daemons import Daemon, Swarm, until
from tests.swarm.runs import swarm_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]

TOTAL = 8 * GB


class DeviceSwarm(Swarm):
    """Its daemons have the pretend device; `others` is what other programs take of it."""

    @property
    def others(self) -> Path:
        return self.folder / "others"

    @property
    def environment(self) -> dict[str, str]:
        return super().environment | environment(self.others)

    def take(self, num_bytes: int, hidden: int = 0) -> None:
        beside = self.folder / "others-new"
        beside.write_text(f"{num_bytes} {hidden}")
        beside.replace(self.others)

    def begun(self) -> tuple[Daemon, Daemon]:
        """Start a peer of each stage, the second on the device, of which nobody else has memory."""
        self.take(0)
        first, second = self.start(stage=0), self.join(1, device="pretend")
        second.wait_until_serving()
        return first, second


def held(daemon: Daemon) -> int:
    return daemon.status["memory"]["held"]


def calls_of(daemon: Daemon) -> int:
    return daemon.status["counters"]["microbatch_calls"]


def codes(daemon: Daemon) -> set[str]:
    return {item["code"] for item in daemon.status["health"]}


def test_a_pause_gives_the_memory_back_and_a_resume_waits_until_there_is_some() -> None:
    swarm = DeviceSwarm(swarm_manifest(num_stages=2))
    with swarm:
        first, daemon = swarm.begun()
        daemon.wait_for_step(2)
        assert daemon.status["peer"]["device"] == "Pretend GPU 0"
        assert held(daemon) > 0
        assert daemon.status["memory"]["total"] == TOTAL

        assert daemon.request("pause", silence_s=120.0)["resting"] is True
        assert held(daemon) == 0
        swarm.take(TOTAL)
        daemon.request("resume")
        until(lambda: "no-memory" in codes(daemon))
        assert "GB may be had" in daemon.status["memory"]["shortage"]
        assert daemon.process.poll() is None
        swarm.take(0)
        step = first.status["peer"]["step"]
        until(lambda: not daemon.status["owner"]["resting"])
        daemon.wait_for_step(step + 2)
        assert "no-memory" not in codes(daemon)
        swarm.assert_exact()


def test_memory_that_ends_in_a_pass_makes_a_peer_rest_and_the_run_goes_on_when_there_is_some() -> None:
    swarm = DeviceSwarm(swarm_manifest(num_stages=2))
    with swarm:
        first, daemon = swarm.begun()
        daemon.wait_for_step(2)
        swarm.take(TOTAL - held(daemon) // 2)
        until(lambda: daemon.status["owner"]["resting"])
        assert held(daemon) == 0
        assert daemon.process.poll() is None
        until(lambda: all(peer["leaving"] or peer["suspect"] for peer in first.table["stages"][1]["peers"]))
        step, calls = first.status["peer"]["step"], calls_of(first)
        assert calls <= 4 * first.status["counters"]["accumulated_microbatches"] + 8
        since_s = first.status["uptime_s"]
        until(lambda: first.status["uptime_s"] >= since_s + 3)
        assert calls_of(first) == calls, "nobody is called who does not compute"
        swarm.take(0)
        until(lambda: not daemon.status["owner"]["resting"])
        daemon.wait_for_step(step + 2)
        swarm.assert_exact()
        assert first.status["counters"]["internal_errors"] == daemon.status["counters"]["internal_errors"] == 0


def test_a_peer_whose_stage_does_not_fit_though_it_should_says_so_and_does_not_end() -> None:
    swarm = DeviceSwarm(swarm_manifest(num_stages=2))
    with swarm:
        _, daemon = swarm.begun()
        assert daemon.request("pause", silence_s=120.0)["resting"] is True
        swarm.take(0, hidden=TOTAL)
        daemon.request("resume")
        until(lambda: "no-memory" in codes(daemon))
        assert held(daemon) == 0
        assert daemon.process.poll() is None
        assert daemon.status["counters"]["internal_errors"] == 0


@pytest.mark.slow
def test_a_peer_whose_memory_does_not_suffice_any_more_moves_to_a_stage_that_fits_and_says_so() -> None:
    """The first stage has the embedding of a large vocabulary, and another peer."""
    model = ModelConfig(num_layers=3, d_model=32, num_heads=2, d_ff=64, vocab_size=8192)
    swarm = DeviceSwarm(replace(swarm_manifest(num_stages=3), model=model))
    with swarm:
        swarm.take(0)
        stays, daemon = swarm.start(stage=0), swarm.join(0, device="pretend")
        others = [swarm.join(stage) for stage in (1, 2)]
        for each in (daemon, *others):
            each.wait_until_serving()
        daemon.wait_for_step(2)
        swarm.take(TOTAL - held(daemon) // 2)
        until(lambda: daemon.status["peer"]["stage"] == 1)
        daemon.wait_until_serving()
        assert [item["title"] for item in daemon.status["health"] if item["code"] == "memory"] == [
            "the device's memory did not suffice for stage 0: this peer serves another one"
        ]
        assert 0 < held(daemon) <= TOTAL
        daemon.wait_for_step(stays.status["peer"]["step"] + 2)
        swarm.assert_exact()
        assert all(each.status["counters"]["internal_errors"] == 0 for each in swarm.daemons)
