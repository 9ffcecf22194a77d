"""Copies that compute together (`scripts/bench local_steps`) train as the reference does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch

from peerd.config.manifest import WireConfig
from peerd.reference import train_reference
from peerd.train.corpus import Corpus
from scripts.benchmarks import _together
from scripts.benchmarks._together import train_together
from tests.tiny_run import corpus_of, replace_train, tiny_manifest


@pytest.mark.parametrize(
    ("local_batch", "codec", "momentum", "boundary"),
    [(0, "none", 0.0, "none"), (1, "int8", 0.0, "none"), (2, "none", 0.5, "none"), (0, "none", 0.0, "int4"), (2, "none", 0.0, "int4")],
)
def test_copies_that_compute_together_train_as_the_reference_does(
    local_batch: int, codec: str, momentum: float, boundary: str, tmp_path: Path
) -> None:
    manifest = tiny_manifest(2, 0.1, microbatches_per_step=12, microbatch_size=2, sequence_length=8, local_batch=local_batch)
    settings = {"steps": 4, "evaluate_every_steps": 2, "learning_rate": 0.01, "schedule": "cosine", "outer_momentum": momentum}
    wire = WireConfig(activations=boundary, activation_gradients=boundary, weight_gradients=codec)
    manifest = replace(replace_train(manifest, **settings), wire=wire)
    corpus = corpus_of(manifest, tmp_path)
    found = train_together(manifest, corpus, 3)
    expected = train_reference(manifest, corpus, 4, num_replicas=3 if local_batch else 1).evaluations
    assert [each.step for each in found] == [each.step for each in expected] == [0, 2, 4]
    assert [each.loss for each in found] == pytest.approx([each.loss for each in expected], rel=1e-4)
    assert expected[2].loss < 0.95 * expected[0].loss


@pytest.mark.parametrize("local_batch", [0, 1])
def test_a_training_that_was_stopped_goes_on_to_the_same_losses(local_batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything counts: moments, and what the codec has left out."""
    monkeypatch.setattr(_together, "SAVED_EVERY_S", 0)
    manifest = tiny_manifest(2, 0.1, microbatches_per_step=4, local_batch=local_batch, steps=5, evaluate_every_steps=5)
    manifest = replace(manifest, wire=WireConfig(weight_gradients="int4"))
    corpus, part = corpus_of(manifest, tmp_path), tmp_path / "part"
    at_once = train_together(manifest, corpus, 2)

    class Ends:
        """The same microbatches as long as there are any."""

        def __getattr__(self, name: str) -> object:
            return getattr(corpus, name)

        def microbatch(self, step: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            if (step, index) == (3, 2):
                raise KeyboardInterrupt
            return corpus.microbatch(step, index)

    with pytest.raises(KeyboardInterrupt):
        train_together(manifest, cast("Corpus", Ends()), 2, part)
    assert train_together(manifest, corpus, 2, part) == at_once
    assert train_together(replace(manifest, seed=1), corpus, 2, part) != at_once


def test_synchronous_averages_lose_what_their_codec_loses(tmp_path: Path) -> None:
    manifest = replace_train(tiny_manifest(2, 0.1, microbatches_per_step=4, steps=4, evaluate_every_steps=4), learning_rate=0.01)
    corpus = corpus_of(manifest, tmp_path)
    exact, coarse = (
        train_together(replace(manifest, wire=WireConfig(weight_gradients=codec)), corpus, 4)[1].loss for codec in ("none", "int4")
    )
    assert exact != coarse == pytest.approx(exact, rel=0.05)


def test_what_cannot_be_trained_together_is_refused(tmp_path: Path) -> None:
    manifest = tiny_manifest(2, microbatches_per_step=8, local_batch=2)
    with pytest.raises(ValueError, match="no whole updates of 3 copies"):
        train_together(manifest, corpus_of(manifest, tmp_path), 3)
