"""Sustained chaos through the command line: peers fall one after another, and the result is that of one machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from peerd.cli.demo_chaos import PLAIN, FaultKind
from peerd.cli.demo_strikes import ALONE
from tests.swarm.daemons import Swarm, run_peerd
from tests.swarm.runs import assert_close, swarm_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.slow]

SHARE = 1e-5
"""Of each tensor's largest value, the most that swarm and reference may differ by."""
DEMO_TIMEOUT_S = 1500.0


@pytest.fixture
def place() -> Iterator[Swarm]:
    """No daemon of ours: a folder with a run file, in which nothing of the demo may be left."""
    with Swarm(swarm_manifest(num_stages=3)) as swarm:
        yield swarm


def demo(place: Swarm, *flags: object) -> tuple[dict[str, Any], Path]:
    """The demo's JSON, whose counts of what must not happen are 0, and what it wrote."""
    out = place.folder / "A"
    done = run_peerd(place.environment, "demo", *flags, "--out", out, "--json", timeout_s=DEMO_TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for name in ("duplicate_microbatches", "lost_microbatches", "inexact_steps"):
        assert {name: found[name]} == {name: 0}, done.stderr
    for fault in found["faults"]:
        assert {"t_s", "peer", "stage", "phase", "kind"} <= fault.keys()
    return found, out


def assert_as_one_machine(place: Swarm, out: Path, steps: int) -> None:
    expected = place.folder / "B"
    done = run_peerd(place.environment, "reference", out / "run.toml", "--steps", steps, "--out", expected, timeout_s=DEMO_TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert_close(load_file(out / name), load_file(expected / name), SHARE)


@pytest.mark.timeout(240)
def test_three_peers_fall_in_eight_steps_and_nothing_is_lost(place: Swarm) -> None:
    """Three stages of two peers, without replacements: one of each may fall, and then nobody."""
    flags = ("--run", place.run_file, "--peers", 6, "--steps", 8, "--compute-stand-in", 20, "--chaos", "kill:every=1s")
    found, out = demo(place, *flags, "--seed", 1)
    assert [fault["kind"] for fault in found["faults"]] == ["kill"] * 3
    assert {fault["stage"] for fault in found["faults"]} == {0, 1, 2}
    assert found["steps"] == 8
    assert_as_one_machine(place, out, 8)


@pytest.mark.slow
@pytest.mark.timeout(2 * DEMO_TIMEOUT_S)
@pytest.mark.parametrize("seed", range(10))
def test_a_peer_is_killed_every_four_seconds_and_the_model_is_that_of_one_machine(place: Swarm, seed: int) -> None:
    chaos = ("--chaos", "kill:every=4s,respawn=yes", "--seed", seed)
    found, out = demo(place, "--stages", 3, "--peers", 9, "--steps", 40, "--accumulate", "float64", *chaos)
    assert sum(fault["kind"] == "kill" for fault in found["faults"]) >= 10
    assert found["replayed_microbatches"] > 0
    assert found["steps"] == 40
    assert_as_one_machine(place, out, 40)


@pytest.mark.slow
@pytest.mark.timeout(2 * DEMO_TIMEOUT_S)
@pytest.mark.parametrize("kind", sorted({*PLAIN} - {FaultKind.KILL, *ALONE}))
def test_every_kind_of_chaos_leaves_the_model_as_it_should_be(place: Swarm, kind: FaultKind) -> None:
    flags = ("--run", place.run_file, "--peers", 6, "--steps", 30, "--compute-stand-in", 60)
    found, out = demo(place, *flags, "--chaos", f"{kind}:every=2s,respawn=yes", "--seed", 3)
    assert sum(fault["kind"] == kind for fault in found["faults"]) >= 10
    assert_as_one_machine(place, out, 30)


@pytest.mark.slow
@pytest.mark.timeout(2 * DEMO_TIMEOUT_S)
@pytest.mark.parametrize("seed", range(3))
def test_a_stage_that_is_wiped_comes_back_from_disk_and_its_steps_are_computed_again(place: Swarm, seed: int) -> None:
    flags = ("--run", place.run_file, "--peers", 6, "--steps", 30, "--compute-stand-in", 60)
    found, out = demo(place, *flags, "--chaos", "stage-wiped:every=4s,respawn=yes", "--seed", seed)
    wiped = [fault for fault in found["faults"] if fault["kind"] == "stage-wiped"]
    assert len(wiped) >= 2
    assert all("which served again from disk" in fault["detail"] for fault in wiped)
    assert sum(fault["steps_again"] for fault in wiped) > 0
    assert_as_one_machine(place, out, 30)


@pytest.mark.slow
@pytest.mark.timeout(2 * DEMO_TIMEOUT_S)
@pytest.mark.parametrize("seed", range(3))
def test_who_sleeps_while_its_mates_train_on_and_pause_gets_their_state_when_they_resume(place: Swarm, seed: int) -> None:
    flags = ("--run", place.run_file, "--peers", 6, "--steps", 100, "--compute-stand-in", 60)
    found, out = demo(place, *flags, "--chaos", "pause-stale:every=2s,respawn=yes", "--seed", seed)
    assert len(found["faults"]) >= 3
    assert all("brought it back" in fault["detail"] for fault in found["faults"])
    assert_as_one_machine(place, out, 100)


@pytest.mark.slow
@pytest.mark.timeout(2 * DEMO_TIMEOUT_S)
@pytest.mark.parametrize("seed", range(10))
def test_all_kinds_of_chaos_together_leave_the_model_as_it_should_be(place: Swarm, seed: int) -> None:
    flags = ("--run", place.run_file, "--peers", 6, "--steps", 45, "--compute-stand-in", 100)
    found, out = demo(place, *flags, "--chaos", "mixed:every=2s,respawn=yes", "--seed", seed)
    assert set(PLAIN) <= {fault["kind"] for fault in found["faults"]}
    assert_as_one_machine(place, out, 45)
