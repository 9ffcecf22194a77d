"""The runs that swarm tests train, and the comparison with the same run in one process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from peerd.config.manifest import ComputeConfig, DataConfig, Manifest, ModelConfig, SwarmConfig, TrainConfig
from peerd.config.paths import cache_folder
from peerd.data.tokens import prepare_tokens
from peerd.reference import train_reference
from peerd.train.corpus import Corpus
from tests.tiny_run import real_text

PERIOD_S = 1.0


def swarm_manifest(num_stages: int = 2, steps: int = 0, evaluation_fraction: float = 0.0, **train: Any) -> Manifest:
    """A layer per stage, of width 32; eight microbatches of two short sequences; sums that no order can change."""
    settings: dict[str, Any] = {"microbatches_per_step": 8, "microbatch_size": 2, "sequence_length": 32, "accumulate": "float64"}
    return Manifest(
        name="tiny",
        seed=7,
        model=ModelConfig(num_layers=num_stages, d_model=32, num_heads=2, d_ff=64),
        data=DataConfig(source=str(real_text()), evaluation_fraction=evaluation_fraction),
        train=TrainConfig(**{**settings, "num_stages": num_stages, "steps": steps, **train}),
        compute=ComputeConfig(threads=1),
        swarm=SwarmConfig(announce_period_s=PERIOD_S, rebalance_period_s=0),  # a full minute of the wall clock changes no test
    )


def certified(manifest: Manifest) -> Manifest:
    """The same run, whose averages count once most of their stage hold them: rule 18 (certify)."""
    return replace(manifest, swarm=replace(manifest.swarm, trust="on"))


def exported_steps(exported: Path) -> int:
    """How many steps an export has behind it."""
    return len((exported / "history.jsonl").read_text().splitlines())


def assert_equals_reference(exported: Path, manifest: Manifest, steps: int, cache: Path | None = None) -> None:
    """Every tensor within 1e-6 of its largest value, every loss equal, as a single machine would have it.

    The export of a swarm that trains on may come without the optimizer; its parameters are compared all the same.
    """
    corpus = Corpus(prepare_tokens(manifest.data.source, cache or cache_folder(), manifest.data), manifest)
    expected = train_reference(manifest, corpus, steps)
    assert_close(load_file(exported / "model.safetensors"), expected.parameters)
    if (exported / "optimizer.safetensors").exists():
        assert_close(load_file(exported / "optimizer.safetensors"), expected.optimizer_state)
    losses = [json.loads(line)["loss"] for line in (exported / "history.jsonl").read_text().splitlines()]
    assert losses == [entry.loss for entry in expected.history]


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], share: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    apart = {name: _apart(found[name], expected[name]) for name in expected}
    assert {name: value for name, value in apart.items() if value > share} == {}


def _apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference as a share of the largest value; any difference of codes counts whole."""
    if expected.dtype is torch.uint8 or not expected.numel():
        return float(not torch.equal(found, expected))
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


def with_train(manifest: Manifest, **changes: Any) -> Manifest:
    return replace(manifest, train=replace(manifest.train, **changes))
