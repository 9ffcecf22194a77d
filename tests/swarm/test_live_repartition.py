"""A run of two stages goes on as one of four: its peers' checkpoints are gathered by parameter name."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from peerd.config import manifest as manifests
from tests.swarm.daemons import Swarm, run_peerd, until
from tests.swarm.runs import assert_equals_reference, swarm_manifest, with_train

pytestmark = pytest.mark.swarm

LAYERS, BEGUN, STEPS = 4, 4, 8


@pytest.mark.parametrize("bits", [8, pytest.param(32, marks=pytest.mark.slow)])
def test_two_stages_go_on_as_four_as_if_nothing_had_happened(bits: int) -> None:
    manifest = swarm_manifest(num_stages=2, steps=BEGUN, optimizer_bits=bits)
    manifest = replace(
        manifest,
        model=replace(manifest.decoder, num_layers=LAYERS),
        swarm=replace(manifest.swarm, checkpoint_every_steps=2),
    )
    with Swarm(manifest) as swarm:
        homes = _train_two_stages(swarm)
        sources = [word for home in homes for word in ("--from", home)]
        flags = ["--stages", 4, "--steps", STEPS, "--name", "tiny", "--data", manifest.data.source, "--force"]
        made = run_peerd(swarm.environment, "new", swarm.folder / "organiser", *sources, *flags)
        assert made.returncode == 0, made.stderr
        assert f"at step {BEGUN}, in 4 stages" in made.stdout
        for home in homes:
            shutil.rmtree(home)
        swarm.manifest = manifests.load(swarm.run_file)
        first = swarm.start(stage=0)
        others = [swarm.join(stage, join=first.ready.join) for stage in (3, 1, 2)]
        for daemon in (first, *others):
            daemon.wait_for_step(STEPS)
        assert all("beginning from the state of an earlier run" in daemon.log for daemon in (first, *others))
        swarm.assert_exact()
        exported = swarm.export(others[0])
        assert_equals_reference(exported, with_train(manifest, steps=STEPS), STEPS, swarm.folder / "cache" / "peerd")


def _train_two_stages(swarm: Swarm) -> list[str]:
    """To the end, then everybody is killed. The homes."""
    everybody = [swarm.start(stage=0, ephemeral=False), swarm.join(1, ephemeral=False)]
    for daemon in everybody:
        daemon.wait_for_step(BEGUN)
        until(partial(_checkpoints, daemon.home.folder))
    for daemon in everybody:
        daemon.kill()
    return [str(daemon.home.folder) for daemon in everybody]


def _checkpoints(home: Path) -> list[Path]:
    return list(home.glob(f"checkpoints/*/*-{BEGUN}-*.safetensors"))
