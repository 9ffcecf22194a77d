"""A run small enough to train in a test, on real text."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from peerd.config.manifest import ComputeConfig, DataConfig, Manifest, ModelConfig, TrainConfig
from peerd.data.tokens import prepare_tokens
from peerd.train.corpus import Corpus


def tiny_manifest(num_stages: int = 1, evaluation_fraction: float = 0.0, **train: Any) -> Manifest:
    """Five layers (so that no even number of stages divides them) of width 32, one torch thread; `train` replaces defaults."""
    settings: dict[str, Any] = {"microbatches_per_step": 3, "microbatch_size": 2, "sequence_length": 16} | train
    return Manifest(
        seed=7,
        data=DataConfig(evaluation_fraction=evaluation_fraction),
        model=ModelConfig(num_layers=5, d_model=32, num_heads=2, d_ff=48),
        train=TrainConfig(num_stages=num_stages, **settings),
        compute=ComputeConfig(threads=1),
    )


def replace_train(manifest: Manifest, **changes: Any) -> Manifest:
    return dataclasses.replace(manifest, train=dataclasses.replace(manifest.train, **changes))


def real_text() -> Path:
    """A hundred kilobytes of text that every machine has."""
    return Path(argparse.__file__)


def corpus_of(manifest: Manifest, cache: Path) -> Corpus:
    return Corpus(prepare_tokens(str(real_text()), cache), manifest)
