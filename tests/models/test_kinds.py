"""A new kind of model needs a config with the properties that peerd reads, and a builder for its stages."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from peerd.config.manifest import Manifest
from peerd.config.model_kinds import MODEL_KINDS, ReadsText
from peerd.equality import check_split
from peerd.errors import UsageError
from peerd.models import kinds
from peerd.models.kinds import Builder
from peerd.models.module import StageModule
from peerd.models.published import check_publishable
from peerd.models.stages import input_of, labels_shape, with_cut
from peerd.models.weights import generator_of, give_memory
from peerd.reference import train_reference
from tests.tiny_run import corpus_of, tiny_manifest

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BagConfig(ReadsText):
    """A model that predicts each label from its token alone."""

    title: ClassVar = "bag of words"
    objective: ClassVar = "causal"
    masked_share: ClassVar = 0.0
    mask_token: ClassVar = 0
    publishes_as: ClassVar = ""
    needs_split_check: ClassVar = True
    layers_per_group: ClassVar = 1
    boundary_layers: ClassVar[tuple[int, ...]] = ()
    narrows_at_cuts: ClassVar = False
    tie_word_embeddings: ClassVar = False
    kind: Literal["bag"] = "bag"
    num_layers: int = 3
    vocab_size: int = 256

    def boundary_shape(self, _layer: int, sequence_length: int) -> tuple[int, ...]:
        return (sequence_length, WIDTH)


class BagStage(StageModule):
    def __init__(self, manifest: Manifest, stage: int, layers: range) -> None:
        super().__init__(stage, manifest.train.num_stages)
        with torch.device("meta"):
            self.layers = nn.ModuleDict({str(layer): nn.Linear(WIDTH, WIDTH) for layer in layers})
            if self.is_first:
                self.words = nn.Embedding(manifest.model.vocab_size, WIDTH)
            if self.is_last:
                self.head = nn.Linear(WIDTH, manifest.model.vocab_size)

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Tensor:
        hidden: Tensor = self.words(inputs) if self.is_first else inputs
        for layer in self.layers.values():
            hidden = layer(hidden).tanh()
        logits: Tensor = self.head(hidden) if self.is_last else hidden
        return logits if labels is None else functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def initialise(self, seed: int, device: torch.device) -> None:
        give_memory(self, device)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator_of(seed, name)))

    def graph_bytes(self, num_tokens: int) -> int:
        return 8 * WIDTH * len(self.layers) * num_tokens

    def forward_flops(self, microbatch: int, sequence: int) -> int:
        return 2 * sum(parameter.numel() for parameter in self.parameters()) * microbatch * sequence


class BagBuilder(Builder):
    def stage(self, manifest: Manifest, stage: int, layers: range) -> StageModule:
        return BagStage(manifest, stage, layers)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Manifest:
    monkeypatch.setitem(kinds._BUILDERS, "bag", BagBuilder())
    return replace(tiny_manifest(2, cut="cost"), model=cast("Any", BagConfig()))


def test_it_is_checked_cut_by_its_cost_and_trained(run: Manifest, tmp_path: Path) -> None:
    check_split(run)
    manifest = with_cut(run)
    assert sum(manifest.layer_counts or ()) == 3
    losses = [entry.loss for entry in train_reference(manifest, corpus_of(manifest, tmp_path), 3).history]
    assert losses[-1] < losses[0]


def test_its_messages_are_checked_like_those_of_other_kinds(run: Manifest) -> None:
    assert [input_of(run, stage, 16) for stage in range(2)] == [("int32", (2, 16)), ("float32", (2, 16, WIDTH))]
    assert labels_shape(run, 16) == (2, 16)
    assert run.tokens_per_microbatch == 32


def test_it_is_not_published_as_an_architecture_that_it_is_not(run: Manifest) -> None:
    with pytest.raises(UsageError, match="a bag of words is not an architecture of transformers"):
        check_publishable(run)


def test_each_kind_that_a_manifest_may_name_can_be_built() -> None:
    assert kinds._BUILDERS.keys() == MODEL_KINDS.keys()


def test_no_part_asks_which_kind_a_model_is() -> None:
    names = {kind.__name__ for kind in MODEL_KINDS.values()}
    asked = []
    for path in sorted((ROOT / "peerd").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            within = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} if called == "isinstance" else set()
            asked += [f"{path.name}:{node.lineno}"] if isinstance(node, ast.Call) and within & names else []
    assert asked == []
