"""The owner's say in real daemons: a pause hands on what is held and comes back, alone too; limits hold and are kept."""

from __future__ import annotations

import json
import signal
import time

import pytest

from peerd.cli.launch import stop_process
from peerd.errors import ExitCode
from tests.swarm.daemons import Daemon, Swarm, run_peerd, until
from tests.swarm.machine import slowdown
from tests.swarm.runs import swarm_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]

PACE_MS = 40
RESUMES_WITHIN_S = 5.0
"""From the owner's word until the next microbatch is done."""


def rests(daemon: Daemon) -> bool:
    return daemon.status["owner"]["resting"]


def owner(swarm: Swarm, daemon: Daemon, *arguments: str) -> dict[str, object]:
    done = run_peerd(swarm.environment, *arguments, "--json", "--home", daemon.home.folder)
    assert (done.returncode, done.stderr) == (0, "")
    reply: dict[str, object] = json.loads(done.stdout)
    return reply


def events_of(daemon: Daemon, peer: str) -> list[str]:
    return [event["kind"] for event in daemon.request("history", events=True)["events"] if event["peer"] == peer]


def test_a_pause_costs_no_work_and_ends_with_resume() -> None:
    with Swarm(swarm_manifest(num_stages=2)) as swarm:
        first = swarm.start(stage=0, compute_stand_in_ms=PACE_MS)
        stays, pauses = (swarm.join(1, compute_stand_in_ms=PACE_MS) for _ in range(2))
        for daemon in swarm.daemons:
            daemon.wait_until_serving()
        pauses.wait_until_mid_step(1)
        until(lambda: stays.request("history", events=True)["events"])  # it has looked at its table for the first time

        held, p2pd = pauses.counters["accumulated_microbatches"], pauses.p2pd
        assert pauses.request("pause", silence_s=120.0)["resting"] is True
        # One was under way when they were counted, and another one when it paused.
        assert pauses.counters["accumulated_microbatches"] <= held + 2
        assert owner(swarm, pauses, "pause")["resting"] is True
        status = pauses.status
        assert (status["peer"]["paused"], status["peer"]["phase"]) == (True, "joining")
        until(lambda: all(row["paused"] for row in stays.table["stages"][1]["peers"] if row["id"] == status["peer"]["id"]))
        until(lambda: {"paused", "left", "gone"} & set(events_of(stays, status["peer"]["id"])))  # a slow machine may look too late
        assert "leaving" not in events_of(stays, status["peer"]["id"])
        assert [item["title"] for item in status["health"]] == ["paused: its owner paused it"]
        refused = run_peerd(swarm.environment, "wait", "--serving", "--home", pauses.home.folder)
        assert "paused" in refused.stderr
        step = stays.status["peer"]["step"]
        stays.wait_for_step(step + 2)
        assert {name: swarm.total(name) for name in ("replayed_microbatches", "ledger_resets")} == {
            "replayed_microbatches": 0,
            "ledger_resets": 0,
        }

        done, resumed_s = pauses.counters["accumulated_microbatches"], time.monotonic()
        assert owner(swarm, pauses, "resume")["paused"] == ""
        until(lambda: pauses.counters["accumulated_microbatches"] > done)
        assert time.monotonic() - resumed_s < RESUMES_WITHIN_S * slowdown()
        until(lambda: pauses.status["peer"]["tokens"] > status["peer"]["tokens"] > 0)
        assert not rests(pauses)
        assert pauses.p2pd == p2pd, "a pause keeps the connections"
        pauses.wait_for_step(step + 3)
        swarm.assert_exact()
        assert first.status["moves"] == 0


def test_the_only_peer_of_a_stage_comes_back_with_its_state_and_the_run_goes_on() -> None:
    with Swarm(swarm_manifest(num_stages=2)) as swarm:
        first = swarm.start(stage=0, compute_stand_in_ms=PACE_MS)
        alone = swarm.join(1, compute_stand_in_ms=PACE_MS)
        alone.wait_until_serving()
        alone.wait_for_step(2)
        owner(swarm, alone, "pause")
        step = alone.status["peer"]["step"]
        until(lambda: first.status["peer"]["step"] >= step)
        owner(swarm, alone, "resume")
        told = set[str]()

        def goes_on() -> bool:
            told.update(item["code"] for item in alone.status["health"])
            return alone.status["peer"]["step"] > step

        until(goes_on)
        assert not told & {"stage-empty", "no-trainer", "cut-off", "stalled"}, "it says nothing of the swarm that is not so"
        first.wait_for_step(step + 2)
        swarm.assert_exact()


def test_a_paused_daemon_leaves_when_told_and_its_pause_and_limits_outlive_it() -> None:
    with Swarm(swarm_manifest(num_stages=1)) as swarm:
        daemon = swarm.start(ephemeral=False, compute_stand_in_ms=PACE_MS)
        daemon.wait_until_serving()
        told = owner(swarm, daemon, "limits", "--upload", "80Mbit", "--hours", "00:00-23:59", "--duty", "50%")
        assert told["limits"]["upload"] == 1e7  # type: ignore[index]
        owner(swarm, daemon, "pause")
        daemon.signal(signal.SIGTERM)
        assert daemon.exit_code() == ExitCode.OK
        again = swarm.spawn(home=str(daemon.home.folder), compute_stand_in_ms=PACE_MS)
        until(lambda: rests(again), 60)
        kept = again.status["owner"]["limits"]
        assert (kept["upload"], kept["hours"], kept["duty"]) == (1e7, "00:00-23:59", 0.5)
        owner(swarm, again, "resume")
        until(lambda: not rests(again), 60)
        again.wait_until_serving()
        assert stop_process(again.process) == ExitCode.OK


@pytest.mark.slow
def test_an_upload_cap_holds_and_the_run_stays_exact() -> None:
    """80 kB a step at 480 kbit/s: the cap is what the step's time is made of, on a busy machine too."""
    cap = 60_000
    with Swarm(swarm_manifest(num_stages=2)) as swarm:
        first = swarm.start(stage=0, local=False)
        swarm.join(1, local=False).wait_until_serving()
        first.wait_for_step(1)
        owner(swarm, first, "limits", "--upload", "480kbit")
        began_s, sent = time.monotonic(), first.counters["bytes_sent"]
        first.wait_for_step(first.status["peer"]["step"] + 3, 120)
        rate = (first.counters["bytes_sent"] - sent) / (time.monotonic() - began_s)
        assert 0.5 * cap < rate < 1.2 * cap
        owner(swarm, first, "limits", "--upload", "none")
        first.wait_for_step(first.status["peer"]["step"] + 2)
        swarm.assert_exact()


@pytest.mark.slow
def test_a_quota_that_is_used_up_stops_a_peer_as_cleanly_as_its_owner_would_and_more_of_it_lets_it_go_on() -> None:
    with Swarm(swarm_manifest(num_stages=2)) as swarm:
        swarm.start(stage=0, compute_stand_in_ms=PACE_MS)
        stays, stops = (swarm.join(1, local=local, compute_stand_in_ms=PACE_MS) for local in (True, False))
        for daemon in swarm.daemons:
            daemon.wait_until_serving()
        stops.wait_until_mid_step(1)
        owner(swarm, stops, "limits", "--daily", "10kB")
        until(lambda: rests(stops), 60)
        told = stops.status["owner"]
        assert (told["paused"], told["until"]) == ("today's data quota is used up", "at midnight")
        assert told["today"] >= 10_000
        step = stays.status["peer"]["step"]
        stays.wait_for_step(step + 2)
        assert swarm.total("replayed_microbatches") == swarm.total("ledger_resets") == 0

        owner(swarm, stops, "limits", "--daily", "none")
        until(lambda: not rests(stops), 60)
        stops.wait_for_step(step + 3)
        swarm.assert_exact()
