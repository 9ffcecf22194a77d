"""Real daemons on a real GPU: they train, and a pause gives the card back. Skipped where there is none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.gpu.card import NEEDS_GPU, used_bytes
from tests.swarm.daemons import Daemon, Swarm, until
from tests.swarm.runs import swarm_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300), NEEDS_GPU]
MORE_BYTES = 64 << 20
"""Above a process that has opened the card and holds nothing of it."""
EMPTY = "import torch; torch.zeros(1, device='cuda'); torch.cuda.synchronize(); print(flush=True); input()"


def held(daemon: Daemon) -> int:
    return daemon.status["memory"]["held"]


def used() -> int:
    found = used_bytes()
    assert found is not None
    return found


@contextmanager
def process_of(program: str) -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield
        process.communicate(b"\n")


def test_a_pause_gives_back_all_but_what_an_empty_process_takes() -> None:
    nobody = used()
    with process_of(EMPTY):
        empty = used() - nobody
    until(lambda: used() <= nobody + (8 << 20))
    with Swarm(swarm_manifest(num_stages=2)) as swarm:
        first = swarm.start(stage=0)
        daemon = swarm.join(1, device="cuda")
        daemon.wait_until_serving()
        daemon.wait_for_step(3)
        assert daemon.request("pause", silence_s=120.0)["resting"] is True
        left = used() - nobody
        print(f"an empty process {empty / 1e6:.0f} MB, a paused peer {left / 1e6:.0f} MB")
        assert held(daemon) == 0
        assert left <= empty + MORE_BYTES
        step = first.status["peer"]["step"]
        daemon.request("resume")
        until(lambda: not daemon.status["owner"]["resting"])
        daemon.wait_for_step(step + 2)
        swarm.assert_exact()
        assert daemon.status["counters"]["internal_errors"] == 0


def test_two_peers_on_one_card_train_as_on_processors() -> None:
    with Swarm(swarm_manifest(num_stages=2)) as swarm:
        first = swarm.start(stage=0, device="cuda")
        second = swarm.join(1, device="cuda")
        second.wait_until_serving()
        third = swarm.join(1, device="cpu")
        third.wait_until_serving()
        swarm.wait_for_step(first.status["peer"]["step"] + 4)
        swarm.assert_exact()
        losses = [each["loss"] for each in first.history]
        assert losses[-1] < losses[0]
