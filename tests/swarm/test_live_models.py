"""Models that are not peerd's own train in a swarm as on one machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.swarm.daemons import Swarm, run_peerd
from tests.swarm.runs import assert_close, swarm_manifest

pytestmark = [pytest.mark.slow, pytest.mark.swarm, pytest.mark.timeout(600)]

STEPS = 2
FEW = ("--stages", 3, "--microbatches", 6, "--microbatch-size", 4, "--accumulate", "float64", "--steps", STEPS, "--force")
SMALL_LLAMA = (
    *("--model", "hf:llama", "--layers", 3, "--d-model", 32, "--heads", 2, "--d-ff", 48, "--set", "vocab_size=256"),
    *("--sequence-length", 32),
)


@pytest.fixture
def place() -> Iterator[Swarm]:
    """No daemon of ours: a folder in which nothing of the demo may be left."""
    with Swarm(swarm_manifest()) as swarm:
        yield swarm


@pytest.mark.parametrize(("peers", "model"), [(6, ("--model", "blocks:resnet")), (3, SMALL_LLAMA)], ids=["resnet", "llama"])
def test_a_swarm_trains_another_model_as_one_machine_would(place: Swarm, peers: int, model: tuple[object, ...]) -> None:
    folder, out, expected = place.run_file.parent, place.folder / "A", place.folder / "B"
    made = run_peerd(place.environment, "new", folder, *FEW, *model, timeout_s=300)
    assert made.returncode == 0, made.stderr
    demo = run_peerd(place.environment, "demo", "--run", place.run_file, "--peers", peers, "--out", out, "--json", timeout_s=300)
    assert demo.returncode == 0, demo.stderr
    reference = run_peerd(place.environment, "reference", out / "run.toml", "--steps", STEPS, "--out", expected, timeout_s=300)
    assert reference.returncode == 0, reference.stderr
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert_close(load_file(out / name), load_file(expected / name))
    assert losses_in(out) == losses_in(expected) == json.loads(demo.stdout)["losses"]


def losses_in(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "history.jsonl").read_text().splitlines()]
