"""A peer joins a stage whose steps are short beside what it has to download, or comes back to one whose steps are long."""

from __future__ import annotations

import time

import pytest

from peerd.config.manifest import ComputeConfig, Manifest, ModelConfig, SwarmConfig, TrainConfig
from tests.swarm.daemons import Swarm, until
from tests.swarm.runs import swarm_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.slow, pytest.mark.timeout(300)]

NUM_PARAMETERS, D_MODEL = 9_100_000, 64
"""A joiner downloads 12 bytes of each: 109 MB."""
PACE_MS, MICROBATCHES = 40, 8
STEPS_TIMED, STEP_S, SERVES_WITHIN_S = 5, 0.36, 20.0
"""On a machine that does nothing else. Where steps take longer all else does, too."""


def large_state() -> Manifest:
    """A stage with a large state and next to no work: its parameters are nearly all in the two embeddings."""
    return Manifest(
        name="joining",
        model=ModelConfig(num_layers=1, d_model=D_MODEL, num_heads=2, d_ff=64, vocab_size=NUM_PARAMETERS // (2 * D_MODEL)),
        train=TrainConfig(num_stages=1, microbatches_per_step=MICROBATCHES, microbatch_size=1, sequence_length=8, steps=0),
        compute=ComputeConfig(threads=1),
        swarm=SwarmConfig(rebalance_period_s=0.0, checkpoint_every_steps=0),
    )


def test_a_joiner_of_109_mb_serves_within_20_s_while_steps_take_a_third_of_a_second() -> None:
    with Swarm(large_state()) as swarm:
        first = swarm.start(compute_stand_in_ms=PACE_MS)
        first.wait_for_step(2)
        began_s, step = time.monotonic(), first.status["peer"]["step"]
        first.wait_for_step(step + STEPS_TIMED)
        step_s = (time.monotonic() - began_s) / STEPS_TIMED

        joiner = swarm.join(compute_stand_in_ms=PACE_MS)
        assert joiner.ready.join, "how long an interpreter takes to start is not what is measured"
        began_s = time.monotonic()
        joiner.wait_until_serving()
        took_s = time.monotonic() - began_s
        print(f"steps of {step_s:.2f} s; a joiner serves after {took_s:.1f} s, and has downloaded {joiner.counters['reloads']} times")

        assert joiner.counters["reloads"] == 1
        assert took_s < SERVES_WITHIN_S * max(1.0, step_s / STEP_S)
        swarm.assert_exact()


LONG_PACE_MS = 2000
"""A step of eight microbatches takes longer than a daemon takes to go and to come back."""


def test_a_peer_that_comes_back_within_three_steps_downloads_no_state() -> None:
    with Swarm(swarm_manifest(num_stages=1)) as swarm:
        first = swarm.start(compute_stand_in_ms=LONG_PACE_MS)
        second = swarm.join(compute_stand_in_ms=LONG_PACE_MS)
        second.wait_until_serving()
        second.wait_for_step(2)
        downloads = second.counters["reloads"]
        second.request("pause")
        until(lambda: second.status["owner"]["resting"])
        second.request("resume")
        until(lambda: not second.status["owner"]["resting"])
        second.wait_until_serving()

        assert "from the checkpoint of step" in second.log
        assert second.counters["reloads"] == downloads
        swarm.wait_for_step(first.status["peer"]["step"] + 1)
        swarm.assert_exact()
