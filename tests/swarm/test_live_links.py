"""A link between two mates that is dead in one direction: rounds go around it, all do their share, and `health` names it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts.benchmarks._asymmetric import disturbed
from scripts.benchmarks._changed import KINDS
from tests.swarm.daemons import Daemon, Swarm, until
from tests.swarm.runs import assert_equals_reference, exported_steps, swarm_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(180)]

FOR_S, STEPS = 120.0, 8


@pytest.mark.parametrize("num_mates", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_hole_22_a_run_goes_on_where_a_peer_cannot_call_its_mate_that_can_call_it(num_mates: int) -> None:
    """Of two mates the one that misses a step of the other steps aside until the link is whole (gap 6)."""
    with Swarm(swarm_manifest(num_stages=2)) as swarm:
        first = swarm.start(stage=0, compute_stand_in_ms=80, allow_faults=True)
        mates = [first, *(swarm.join(0, compute_stand_in_ms=80, allow_faults=True) for _ in range(num_mates - 1))]
        last = swarm.join(1, compute_stand_in_ms=20)
        for daemon in swarm.daemons:
            daemon.wait_until_serving()
        deaf = mates[1]
        swarm.wait_for_step(2)  # a mate that is still behind when its link dies doubts what the other claims (hole 32), and names no link
        deaf.request("fault", kind="one-way", peer=first.ready.peer, for_s=FOR_S)
        title = f"{deaf.ready.peer} cannot call {first.ready.peer}, which can call it"
        for daemon in (first, deaf):
            until(lambda daemon=daemon: ("link-one-way", title) in [(i["code"], i["title"]) for i in daemon.status["health"]], 30)  # type: ignore[misc]
        began_s, before = time.monotonic(), microbatches_of(mates)
        swarm.wait_for_step(last.status["peer"]["step"] + STEPS)
        assert time.monotonic() - began_s < FOR_S / 2
        did_their_share = [now > then + STEPS for then, now in zip(before, microbatches_of(mates), strict=True)]
        if num_mates == 2 and deaf.status["peer"]["phase"] == "joining":
            assert did_their_share[0]
        else:
            assert all(did_their_share)
        deaf.request("fault", kind="one-way", peer=first.ready.peer, for_s=0)
        whole = microbatches_of(mates)
        until(lambda: all(now > then + STEPS for then, now in zip(whole, microbatches_of(mates), strict=True)), 60)
        swarm.assert_exact()
        exported = swarm.export(last)
        assert_equals_reference(exported, swarm.manifest, exported_steps(exported), swarm.folder / "cache" / "peerd")


def microbatches_of(daemons: Sequence[Daemon]) -> list[int]:
    return [daemon.counters["accumulated_microbatches"] for daemon in daemons]


needs_root = pytest.mark.skipif(os.geteuid() != 0 or not Path("/dev/net/tun").exists(), reason="makes network namespaces, which needs root")


@pytest.mark.slow
@needs_root
@pytest.mark.parametrize("kind", ["nat-rebind", "address-change"])
def test_a_run_whose_only_peer_of_a_stage_gets_new_ports_or_another_address_goes_on_within_seconds(kind: str) -> None:
    _, missed = KINDS[kind](kind, 1, 20.0)
    assert missed == []


@pytest.mark.slow
@needs_root
def test_hole_22_packets_that_are_lost_in_one_direction_between_two_mates_stop_no_stage_of_two() -> None:
    found = disturbed(mates=2, seconds=30.0, stages=2)
    assert not found.missed
    assert found.meanwhile > 0.1 * found.before
