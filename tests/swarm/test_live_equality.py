"""The main promise, through the command line: the swarm trains what one machine would have trained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from peerd.config.manifest import dump
from tests.swarm.daemons import Swarm, run_peerd
from tests.swarm.runs import assert_close, swarm_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]

STEPS = 3
FILES = ["history.jsonl", "model.safetensors", "optimizer.safetensors", "run.toml"]


@pytest.fixture
def place() -> Iterator[Swarm]:
    """No daemon of ours: a folder with a run file, in which nothing of the demo may be left."""
    with Swarm(swarm_manifest(num_stages=3)) as swarm:
        yield swarm


def demo_and_reference(place: Swarm, *flags: object) -> tuple[dict[str, Any], Path, Path]:
    """The demo's JSON, what it wrote, and what the reference run of it wrote."""
    out, expected = place.folder / "A", place.folder / "B"
    demo = run_peerd(place.environment, "demo", *flags, "--steps", STEPS, "--out", out, "--json")
    assert demo.returncode == 0, demo.stderr
    assert sorted(path.name for path in out.iterdir()) == FILES
    reference = run_peerd(place.environment, "reference", out / "run.toml", "--steps", STEPS, "--out", expected)
    assert reference.returncode == 0, reference.stderr
    assert sorted(path.name for path in expected.iterdir()) == FILES
    found = json.loads(demo.stdout)
    assert isinstance(found, dict)
    for name in ("duplicate_microbatches", "lost_microbatches", "inexact_steps"):
        assert found[name] == 0
    assert found["steps"] == STEPS
    return found, out, expected


def losses_in(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "history.jsonl").read_text().splitlines()]


def test_six_unlike_peers_in_three_stages_equal_one_machine(place: Swarm) -> None:
    found, out, expected = demo_and_reference(
        place, "--run", place.run_file, "--stages", 3, "--peers", 6, "--slow", "1=2", "--accumulate", "float64"
    )
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert_close(load_file(out / name), load_file(expected / name))
    assert losses_in(out) == losses_in(expected) == found["losses"]
    assert found["faults"] == []
    assert sum(found["microbatches_by_peer"]) >= 3 * 8 * STEPS


@pytest.mark.slow
def test_packed_moments_are_those_of_one_machine(place: Swarm) -> None:
    """Every code and every scale."""
    manifest = swarm_manifest(num_stages=2, optimizer_bits=8)
    manifest = replace(manifest, model=replace(manifest.decoder, d_model=64, d_ff=128))  # so large are matrices that are packed
    place.run_file.write_text(dump(manifest))
    found, out, expected = demo_and_reference(place, "--run", place.run_file, "--peers", 4)
    moments = load_file(out / "optimizer.safetensors")
    assert_close(load_file(out / "model.safetensors"), load_file(expected / "model.safetensors"))
    assert_close(moments, load_file(expected / "optimizer.safetensors"))
    assert {moments[f"{name}.exp_avg_sq"].dtype for name in ("embedding.weight", "head.weight")} == {torch.uint8}
    assert losses_in(out) == losses_in(expected) == found["losses"]


@pytest.mark.slow
def test_sums_in_float32_change_the_losses_by_less_than_a_ten_thousandth(place: Swarm) -> None:
    place.run_file.write_text(dump(swarm_manifest(num_stages=2, accumulate="float32")))
    found, out, expected = demo_and_reference(place, "--run", place.run_file, "--peers", 4)
    assert losses_in(out) == pytest.approx(losses_in(expected), abs=1e-4)
    assert {"loss_first", "loss_last", "tokens_per_second", "replayed_microbatches", "bytes_per_boundary_crossing"} <= found.keys()


def test_a_microbatch_costs_two_tensors_per_boundary_and_little_else(place: Swarm) -> None:
    """Sizes at which a tensor is 64 KiB, so that what travels beside it shows."""
    manifest = swarm_manifest(num_stages=2, microbatch_size=8, sequence_length=64)
    place.run_file.write_text(dump(manifest))
    found, _, _ = demo_and_reference(place, "--run", place.run_file, "--peers", 2)
    assert found["boundary_tensor_bytes"] == manifest.boundary_bytes == 64 * 1024
    assert found["transfers_per_boundary"] == pytest.approx(2, rel=0.05)
    assert found["bytes_per_boundary_crossing"] == pytest.approx(manifest.boundary_bytes, rel=0.05)
