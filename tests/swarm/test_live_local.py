"""Local steps in real swarms: what the daemons have made of a run is computed again in one process, from what each has noted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from peerd.config.manifest import Manifest, WireConfig, dump
from peerd.data.tokens import prepare_tokens
from peerd.reference import ReferenceResult, replay_reference
from peerd.replay import read_logs
from peerd.train.corpus import Corpus
from tests.swarm.daemons import Daemon, Swarm, run_peerd, until
from tests.swarm.runs import certified, exported_steps, swarm_manifest
from tests.swarm.test_live_kill import go_on, kill_in_mid_step

pytestmark = [pytest.mark.swarm, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 3
PACE_MS = 300
"""A step of 32 microbatches takes two peers of a stage twice as long as a batch is told before it is sealed."""
APART = 1e-9


def local_run(num_stages: int = 2, steps: int = 0, **train: Any) -> Manifest:
    settings = {"microbatches_per_step": 32, "local_batch": 2, "learning_rate": 0.01, "outer_momentum": 0.5} | train
    return swarm_manifest(num_stages, steps, evaluation_fraction=0.1, evaluate_every_steps=2, evaluation_microbatches=3, **settings)


def spawn(swarm: Swarm, stage: int) -> Daemon:
    settings: dict[str, Any] = {"compute_stand_in_ms": PACE_MS, "moves": str(swarm.folder / "moves")}
    return swarm.join(stage, **settings) if swarm.daemons else swarm.start(stage=stage, **settings)


def replayed(swarm: Swarm, steps: int) -> ReferenceResult:
    manifest = swarm.manifest
    corpus = Corpus(prepare_tokens(manifest.data.source, swarm.folder / "cache" / "peerd", manifest.data), manifest)
    return replay_reference(manifest, corpus, steps, read_logs(swarm.folder / "moves"))


def lose_the_disk_of(swarm: Swarm, daemon: Daemon) -> None:
    """Delete a peer's own log, once a mate has copied it."""
    folder, peer = swarm.folder / "moves", daemon.status["peer"]["id"]
    (own,) = [path for path in folder.glob(f"{peer}-*.jsonl") if "kept-by" not in path.name]
    applied = sum('"move": "apply"' in line for line in own.read_text().splitlines())

    def copied() -> bool:
        copies = [path.read_text() for path in folder.glob(f"{peer}-*.kept-by-*.jsonl")]
        return any(text.count('"move": "give"') >= applied for text in copies)

    until(copied)
    own.unlink()


def assert_is(folder: Path, expected: ReferenceResult) -> None:
    """What a daemon has exported."""
    found = load_file(folder / "model.safetensors")
    assert found.keys() == expected.parameters.keys()
    assert max(float((found[name] - value).abs().max()) for name, value in expected.parameters.items()) <= APART
    losses = [json.loads(line)["loss"] for line in (folder / "history.jsonl").read_text().splitlines()]
    assert losses == pytest.approx([entry.loss for entry in expected.history], abs=APART)


def assert_updated(swarm: Swarm) -> None:
    """Peers updated their own parameters more than once a step."""
    for daemon in swarm.living:
        steps = daemon.status["peer"]["step"]
        assert daemon.counters["own_updates"] > steps, (daemon.counters["own_updates"], steps)
        assert daemon.status["update"].get("local_batch") == 2


def subspace_run() -> Manifest:
    """With Muon for the peers' own updates."""
    manifest = local_run(steps=STEPS, optimizer="muon")
    return replace(manifest, model=replace(manifest.decoder, boundary="subspace", boundary_rank=8))


@pytest.mark.parametrize("manifest", [local_run(steps=STEPS), certified(subspace_run())], ids=["AdamW", "Muon, subspace, certified"])
def test_two_stages_of_two_peers_make_local_steps_and_a_reference_computes_them_again(manifest: Manifest) -> None:
    with Swarm(manifest) as swarm:
        first = trained(swarm)
        evaluated = until(lambda: first.evaluations if STEPS in first.evaluations else {})
        exported, expected = swarm.export(first), replayed(swarm, STEPS)
        assert exported_steps(exported) == STEPS
        assert_is(exported, expected)
        assert evaluated == pytest.approx({each.step: each.loss for each in expected.evaluations}, abs=1e-6)
        lose_the_disk_of(swarm, first)
        assert_is(exported, replayed(swarm, STEPS))


def test_a_codec_that_leaves_most_changes_out_lets_the_loss_fall() -> None:
    with Swarm(replace(certified(local_run(steps=STEPS)), wire=WireConfig(weight_gradients="sparse:64"))) as swarm:
        first = trained(swarm)
        evaluated = until(lambda: first.evaluations if STEPS in first.evaluations else {})
        assert evaluated[STEPS] < evaluated[0]
        assert exported_steps(swarm.export(first)) == STEPS


def trained(swarm: Swarm) -> Daemon:
    """The first of two peers at each of two stages, after all steps."""
    first, *_ = [spawn(swarm, stage) for stage in (0, 1, 0, 1)]
    swarm.wait_for_step(STEPS, timeout_s=200)
    swarm.assert_exact()
    assert_updated(swarm)
    return first


def test_a_peer_is_killed_in_mid_step_and_another_joins() -> None:
    with Swarm(certified(local_run())) as swarm:
        first, victim, *_, survivor = [spawn(swarm, stage) for stage in (0, 1, 0, 1)]
        for daemon in swarm.daemons:
            daemon.wait_until_serving()
        kill_in_mid_step(victim)
        go_on(survivor)
        newcomer = spawn(swarm, 1)
        newcomer.wait_until_serving()
        go_on(newcomer)
        swarm.assert_exact()
        exported = swarm.export(first)
        assert exported_steps(exported) >= STEPS
        assert_is(exported, replayed(swarm, exported_steps(exported)))


def test_the_demo_keeps_what_its_peers_did_and_the_command_plays_it() -> None:
    with Swarm(local_run()) as place:
        place.run_file.write_text(dump(place.manifest))
        out, again = place.folder / "A", place.folder / "B"
        demo = run_peerd(
            place.environment,
            *("demo", "--run", place.run_file, "--peers", 4, "--steps", STEPS, "--kill", "3@1"),
            *("--compute-stand-in", PACE_MS, "--out", out, "--json"),
        )
        assert demo.returncode == 0, demo.stderr
        assert json.loads(demo.stdout)["inexact_steps"] == 0
        reference = run_peerd(place.environment, "reference", out / "run.toml", "--steps", STEPS, "--replay", out / "moves", "--out", again)
        assert reference.returncode == 0, reference.stderr
        found, expected = (load_file(folder / "model.safetensors") for folder in (out, again))
        assert max(float((found[name] - value).abs().max()) for name, value in expected.items()) <= APART
        assert all(torch.isfinite(value).all() for value in found.values())
