"""A member that lives, computes and joins no round: its mates leave it out, and the run goes on exactly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.swarm.daemons import Daemon, Swarm, until
from tests.swarm.runs import assert_equals_reference, exported_steps, swarm_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(180)]
STEPS = 8


LIARS: dict[str, dict[str, object]] = {
    "silent": {"module": "scripts.benchmarks._liars.silent"},
    "banned": {"module": "scripts.benchmarks._liars.slow_calls", "calls": 1, "num_bytes": 1 << 50, "every_s": 0.01},
}
"""One joins no round. Whoever gets what the other sends bans it, so that no call of its is read, and leaves it out at once."""


@pytest.mark.parametrize("liar", ["silent", pytest.param("banned", marks=pytest.mark.slow)])
def test_hole_36_a_member_with_which_no_round_succeeds_is_left_out_and_the_run_goes_on_exactly(liar: str) -> None:
    with Swarm(swarm_manifest(num_stages=2)) as swarm:
        first = swarm.start(stage=0, compute_stand_in_ms=20)
        mates = [swarm.join(1, compute_stand_in_ms=60, allow_faults=True) for _ in range(3)]
        for daemon in swarm.daemons:
            daemon.wait_until_serving()
        *honest, absent = mates
        swarm.wait_for_step(2)
        absent.request("lie", **LIARS[liar])
        until(lambda: all(phase_of(absent, at) == "sidelined" for at in swarm.daemons if at is not absent), 60)
        for daemon in honest:
            assert "sidelined" in [note["code"] for note in daemon.status["health"]]
        assert ("it is banned here" in first.log + "".join(daemon.log for daemon in honest)) == (liar == "banned")
        step, done = first.status["peer"]["step"], absent.counters["accumulated_microbatches"]
        for daemon in (first, *honest):  # the other, once banned, gets no average from its mates, and takes no part before it has one
            daemon.wait_for_step(step + STEPS)
        assert absent.counters["accumulated_microbatches"] - done <= swarm.manifest.train.microbatches_per_step
        if liar == "silent":  # the other is in an average now and then, between two bans
            assert_told_to_everybody(absent, first)
        swarm.assert_exact()
        exported = swarm.export(honest[0])
        assert_equals_reference(exported, swarm.manifest, exported_steps(exported), swarm.folder / "cache" / "peerd")


def assert_told_to_everybody(absent: Daemon, far: Daemon) -> None:
    """That a peer works for nothing stands in its own status, and at a peer of another stage in the table, the events and the health."""
    until(lambda: row_of(absent, far)["unaveraged"] >= 5, 60)
    until(lambda: [event["kind"] for event in events_of(absent, far) if "averaged" in event["kind"]] == ["unaveraged"], 20)
    assert "others-unaveraged" in [note["code"] for note in far.status["health"]]
    assert "unaveraged" in [note["code"] for note in absent.status["health"]]


def phase_of(peer: Daemon, at: Daemon) -> str:
    return str(row_of(peer, at).get("phase", ""))


def row_of(peer: Daemon, at: Daemon) -> Mapping[str, Any]:
    rows = [row for stage in at.table["stages"] for row in stage["peers"]]
    return next((row for row in rows if row["id"] == peer.ready.peer), {})


def events_of(peer: Daemon, at: Daemon) -> list[dict[str, Any]]:
    return [event for event in at.request("history", events=True)["events"] if event["peer"] == peer.ready.peer]
