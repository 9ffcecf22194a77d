"""Models that are not peerd's own train in a swarm as on one machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from peerd.models.blocks import describe_entry
from peerd.reference import train_reference
from peerd.train.samples import Samples
from tests.swarm.daemons import Swarm, run_peerd, until
from tests.swarm.runs import assert_close, swarm_manifest

pytestmark = [pytest.mark.slow, pytest.mark.swarm, pytest.mark.timeout(600)]

STEPS = 2
FEW = ("--stages", 3, "--microbatches", 6, "--microbatch-size", 4, "--accumulate", "float64", "--steps", STEPS, "--force")
SMALL_LLAMA = (
    *("--model", "hf:llama", "--layers", 3, "--d-model", 32, "--heads", 2, "--d-ff", 48, "--set", "vocab_size=256"),
    *("--sequence-length", 32),
)
SMALL_BERT = (
    *("--model", "hf:bert", "--layers", 3, "--d-model", 32, "--heads", 2, "--d-ff", 48, "--set", "vocab_size=260"),
    *("--sequence-length", 32),
)
"""Learns tokens that are hidden from it: one more than the tokenizer has hides them."""


@pytest.fixture
def place() -> Iterator[Swarm]:
    """No daemon of ours: a folder in which nothing of the demo may be left."""
    with Swarm(swarm_manifest()) as swarm:
        yield swarm


@pytest.mark.parametrize(
    ("peers", "model", "dropout"),
    [(6, ("--model", "blocks:resnet"), 0.0), (3, SMALL_LLAMA, 0.0), (6, SMALL_BERT, 0.1)],
    ids=["resnet", "llama", "bert, masked, with dropout"],
)
def test_a_swarm_trains_another_model_as_one_machine_would(place: Swarm, peers: int, model: tuple[object, ...], dropout: float) -> None:
    folder, out, expected = place.run_file.parent, place.folder / "A", place.folder / "B"
    made = run_peerd(place.environment, "new", folder, *FEW, *model, timeout_s=300)
    assert made.returncode == 0, made.stderr
    written = place.run_file.read_text()
    assert "\ndropout = 0.0\n" in written
    place.run_file.write_text(written.replace("\ndropout = 0.0\n", f"\ndropout = {dropout}\n"))
    demo = run_peerd(place.environment, "demo", "--run", place.run_file, "--peers", peers, "--out", out, "--json", timeout_s=300)
    assert demo.returncode == 0, demo.stderr
    reference = run_peerd(place.environment, "reference", out / "run.toml", "--steps", STEPS, "--out", expected, timeout_s=300)
    assert reference.returncode == 0, reference.stderr
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert_close(load_file(out / name), load_file(expected / name))
    assert losses_in(out) == losses_in(expected) == json.loads(demo.stdout)["losses"]


def test_a_swarm_evaluates_a_list_of_blocks_on_samples_of_its_own() -> None:
    tiny = swarm_manifest(num_stages=3, evaluation_fraction=0.1, evaluate_every_steps=2, evaluation_microbatches=3)
    manifest = replace(tiny, model=describe_entry("resnet"), data=replace(tiny.data, evaluation_fraction=0.0))
    with Swarm(manifest) as swarm:
        first = swarm.start(stage=0)
        for stage in (1, 2):
            swarm.join(stage)
        found = until(lambda: len(first.evaluations) > 2 and first.evaluations, timeout_s=120)
        assert found
        expected = {each.step: each.loss for each in train_reference(manifest, Samples(manifest), max(found)).evaluations}
        assert found == pytest.approx({step: expected[step] for step in found}, abs=1e-6)


def losses_in(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "history.jsonl").read_text().splitlines()]
