"""What `peerd status` says in the first minute, through pauses, a blackout and the end of a run is so at every look."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from peerd.table.view import TTL_PERIODS
from tests.swarm.daemons import Daemon, Swarm, until
from tests.swarm.runs import PERIOD_S, swarm_manifest
from tests.swarm.told import Look, Record, Said, untrue

HEARS_S = (TTL_PERIODS + 1) * PERIOD_S + 1.0
"""A peer that was killed is in others' tables for as long as its record lives."""
STEPS = 60
PACE_MS = 60
GOOD = Said(text="now working: 3 of 8 done run tiny: step 7 of 60, loss 3.2, about 9s left you gave 1 peers 2 peers in 2", step=7)
OTHER = replace(GOOD, stage=1, text="now wait: the round is under way run")
PAUSED = replace(GOOD, paused=True, serves=False, text="now paused: its owner paused it run tiny: this peer paused at step 7")


def found(*looks: dict[str, Said], apart_s: float = 1.0) -> list[str]:
    times = [Look(number * apart_s, said) for number, said in enumerate(looks)]
    return [line.partition(": ")[2].partition(";")[0] for line in untrue(times, num_stages=2, steps=STEPS, hears_s=HEARS_S)]


@pytest.mark.parametrize("mine", [GOOD, PAUSED])
def test_what_is_so_passes(mine: Said) -> None:
    assert found({"a": mine, "b": OTHER}) == []


@pytest.mark.parametrize(
    ("mine", "told"),
    [
        (replace(PAUSED, text="now working: 3 of 8 done run"), "its owner has paused it"),
        (replace(PAUSED, text=PAUSED.text + ", about 3s left you gave"), "a paused peer knows nothing new of the run"),
        (replace(GOOD, text="now paused: its owner paused it run"), "its owner has not paused it"),
        (replace(GOOD, text="now x run problem: nobody serves stage 1;"), "stage 1 was served all the time"),
        (replace(GOOD, text="now wait: no peer in sight serves stage 0 run"), "stage 0 was served all the time"),
        (replace(GOOD, text="now no peer in sight has the run's data run"), "a peer with the data was there all the time"),
        (replace(GOOD, text="now x run tiny: step 9 of 60"), "the peers were at steps 7 to 7"),
        (replace(GOOD, text="now x run the run is complete after 60"), "it is at step 7 of 60"),
        (replace(GOOD, text="now x run peers 3 peers in 2"), "there were 2 to 2 peers"),
        (replace(GOOD, answers=False), "it runs and does not answer"),
    ],
)
def test_what_is_not_so_is_found(mine: Said, told: str) -> None:
    assert found({"a": mine, "b": OTHER})[0] == told


def test_what_was_so_long_ago_is_found() -> None:
    assert found({"a": GOOD}) == ["some stage had no peer, so nothing was worked on", "there were 1 to 1 peers"]
    assert found(*[{"a": GOOD, "b": OTHER}] * 3) == ["the run stood still all the time"] * 2
    late = {"a": replace(GOOD, text="now working: 3 of 8 done run"), "b": replace(OTHER, serves=False)}
    assert found({"a": GOOD, "b": OTHER}, late) == []
    assert found({"a": GOOD, "b": OTHER}, *[late] * 2, apart_s=HEARS_S + 1)[0].startswith("some stage")


@pytest.mark.swarm
@pytest.mark.slow
@pytest.mark.timeout(280)
def test_the_status_says_nothing_untrue_at_any_look() -> None:
    manifest = swarm_manifest(num_stages=2, steps=STEPS)
    with Swarm(replace(manifest, swarm=replace(manifest.swarm, checkpoint_every_steps=2))) as swarm:
        record = Record(swarm)
        with record.going_on():
            first = begin(swarm, stage=0, run_file=str(swarm.run_file), ephemeral=False)
            time.sleep(HEARS_S)  # alone
            stays, pauses = (begin(swarm, stage=1, join=swarm.address, ephemeral=False) for _ in range(2))
            for daemon in swarm.daemons:
                daemon.wait_until_serving()
            first.wait_for_step(3)
            for daemon in (pauses, first):  # one of two in its stage, and the only one
                record.pause(daemon, True)
                time.sleep(HEARS_S)
                record.pause(daemon, False)
                until(partial(works, daemon))
                stays.wait_for_step(stays.status["peer"]["step"] + 3)
            for daemon in swarm.living:
                daemon.kill()
            begin(swarm, home=stays.settings.home)
            time.sleep(HEARS_S)
            for before in (first, pauses):
                begin(swarm, home=before.settings.home)
            for daemon in swarm.living:
                daemon.wait_for_step(STEPS, 120.0)
            time.sleep(HEARS_S)
        assert len(record.looks) > 40
        assert untrue(record.looks, num_stages=2, steps=STEPS, hears_s=HEARS_S) == []
        assert all("the run is complete" in said.text for said in record.looks[-1].said.values())


def works(daemon: Daemon) -> bool:
    return not daemon.status["owner"]["resting"]


def begin(swarm: Swarm, **settings: Any) -> Daemon:
    daemon = swarm.spawn(data=swarm.manifest.data.source, compute_stand_in_ms=PACE_MS, **settings)
    assert daemon.ready.pid
    return daemon
