"""Training options in real swarms: what peers must agree on beyond gradients, they agree on, also when some of them die."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from peerd.config.manifest import Manifest
from peerd.config.schedule import learning_rate_at
from tests.swarm.daemons import Daemon, Swarm
from tests.swarm.runs import assert_equals_reference, exported_steps, swarm_manifest
from tests.swarm.test_live_kill import PACE_MS, go_on, kill_in_mid_step

pytestmark = [pytest.mark.swarm, pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 4
OPTIONS: dict[str, dict[str, Any]] = {
    "lamb, clipped, cosine": {"optimizer": "lamb", "max_gradient_norm": 0.3, "schedule": "cosine", "warmup_steps": 1},
    "sgd, bfloat16, dropout": {"optimizer": "sgd", "learning_rate": 0.3, "precision": "bfloat16", "dropout": 0.1},
    "muon, clipped": {"optimizer": "muon", "max_gradient_norm": 0.3, "weight_decay": 0.1},
    "delayed, clipped": {"delayed_updates": True, "max_gradient_norm": 0.3},
    "8 bits, clipped": {"optimizer_bits": 8, "max_gradient_norm": 0.3},
    "float16": {"precision": "float16", "loss_scale": 2.0**17, "loss_scale_growth_steps": 2},
}


def run_of(option: str) -> Manifest:
    manifest = swarm_manifest(num_stages=2, steps=STEPS, **OPTIONS[option])
    return replace(manifest, compute=replace(manifest.compute, offload="all"))


@pytest.mark.parametrize("option", OPTIONS)
def test_three_peers_in_two_stages_equal_one_machine(option: str) -> None:
    with Swarm(run_of(option)) as swarm:
        first = swarm.start(stage=0)
        last = [swarm.join(1) for _ in range(2)][-1]
        swarm.wait_for_step(STEPS, timeout_s=120)
        swarm.assert_exact()
        assert_told(last, swarm.manifest)
        assert_equals_reference(swarm.export(first), swarm.manifest, STEPS, swarm.folder / "cache" / "peerd")


def assert_told(daemon: Daemon, manifest: Manifest) -> None:
    """Status and history say how the parameters were updated, as one machine would have."""
    train = manifest.train
    update, steps = daemon.status["update"], daemon.history
    assert [step["learning_rate"] for step in steps] == [learning_rate_at(train, step) for step in range(STEPS)]
    assert {step["gradient_norm"] is not None or step["overflowed"] for step in steps} == {train.shares_norms}
    assert any(step["overflowed"] for step in steps) == (train.precision == "float16")
    assert (update["gradient_norm"], update["max_gradient_norm"]) == (steps[-1]["gradient_norm"], train.max_gradient_norm)
    assert (update["loss_scale"] is not None) == (train.precision == "float16")
    assert update["optimizer_bits"] == train.optimizer_bits


def test_a_clipped_run_survives_the_death_of_a_peer_and_a_newcomer() -> None:
    with Swarm(swarm_manifest(num_stages=2, max_gradient_norm=0.3)) as swarm:
        first = swarm.start(stage=0, compute_stand_in_ms=PACE_MS)
        victim, survivor = (swarm.join(1, compute_stand_in_ms=PACE_MS) for _ in range(2))
        for daemon in swarm.daemons:
            daemon.wait_until_serving()
        kill_in_mid_step(victim)
        newcomer = swarm.join(1, compute_stand_in_ms=PACE_MS)
        go_on(survivor)
        newcomer.wait_until_serving()
        go_on(newcomer)
        swarm.assert_exact()
        exported = swarm.export(first)
        assert exported_steps(exported) >= 3
        assert_equals_reference(exported, swarm.manifest, exported_steps(exported), swarm.folder / "cache" / "peerd")
