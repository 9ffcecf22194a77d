"""A weight that two stages hold, in a real swarm: one weight to the last bit, also when a peer dies in mid-step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from peerd.config.manifest import Manifest
from tests.swarm.daemons import Daemon, Swarm, until
from tests.swarm.runs import assert_equals_reference, swarm_manifest
from tests.swarm.test_live_kill import PACE_MS, kill_in_mid_step

pytestmark = [pytest.mark.swarm, pytest.mark.slow, pytest.mark.timeout(300)]

WEIGHT, STEPS = "embedding.weight", 6


def tied_manifest() -> Manifest:
    manifest = swarm_manifest(num_stages=3, steps=STEPS, max_gradient_norm=0.3)
    return replace(manifest, model=replace(manifest.decoder, tie_word_embeddings=True))


def test_six_peers_in_three_stages_train_one_weight_and_one_of_them_dies() -> None:
    with Swarm(tied_manifest()) as swarm:
        first = swarm.start(stage=0, compute_stand_in_ms=PACE_MS)
        victim, _, _, last, _ = (swarm.join(stage, compute_stand_in_ms=PACE_MS) for stage in (0, 1, 1, 2, 2))
        for daemon in swarm.daemons:
            daemon.wait_until_serving()
        kill_in_mid_step(victim)
        for daemon in (first, last):
            daemon.wait_for_step(STEPS, timeout_s=120)
        swarm.assert_exact()
        assert_equals_reference(swarm.export(last), swarm.manifest, STEPS, swarm.folder / "cache" / "peerd")
        assert_one_weight(first, last)


def assert_one_weight(first: Daemon, last: Daemon) -> None:
    """Both stages' checkpoints at the run's end hold it, and what the optimizer keeps of it, with the same bits."""
    ours, theirs = _tied_tensors(first), _tied_tensors(last)
    assert ours.keys() == theirs.keys()
    assert {f"parameters/{WEIGHT}", f"optimizer/{WEIGHT}.exp_avg", "tied/chain"} <= ours.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def _tied_tensors(daemon: Daemon) -> dict[str, torch.Tensor]:
    path = until(lambda: next(daemon.home.folder.rglob(f"*of3-{STEPS}-*.safetensors"), None))
    assert path is not None
    with safe_open(path, framework="pt") as file:
        names = [name for name in file.keys() if WEIGHT in name or name.startswith("tied/")]  # noqa: SIM118 - not a dict
        return {name: file.get_tensor(name) for name in names}
