"""Dropout in models of transformers, at their own places or after each layer: the masks are the same for every split."""

from __future__ import annotations

import copy
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from peerd.config.manifest import Manifest
from peerd.models.dropout import Dropout, dropout_of
from peerd.models.hf.manifest_model import choose_model, remarks_on
from peerd.models.hf.tiny import tiny_copy
from peerd.models.module import StageModule
from peerd.models.stages import build_stage
from peerd.reference import mean_gradients
from tests.models.hf_models import ARCHITECTURES, hf_manifest, hf_model

QUICK = ("gpt2", "llama", "bert", "falcon")
"""Models with dropouts of their own; with none; behind norms; on attention's weights only."""


def with_dropout(name: str, num_stages: int, dropout: float = 0.3) -> Manifest:
    return hf_manifest(num_stages, tiny_copy(choose_model(name, {}, {"num_hidden_layers": 3}), 3), dropout=dropout, microbatches_per_step=2)


def gradients_of(manifest: Manifest) -> tuple[float, dict[str, Tensor]]:
    """The loss and all gradients of step 5."""
    stages = [build_stage(manifest, stage, "cpu") for stage in range(manifest.train.num_stages)]

    def microbatch(step: int, index: int) -> tuple[Tensor, Tensor]:
        chance = torch.Generator().manual_seed(10 * step + index)
        tokens, labels = torch.randint(0, manifest.model.vocab_size, (2, 2, 16), generator=chance).unbind(0)
        return tokens, labels

    data: Any = SimpleNamespace(microbatch=microbatch)
    loss, found = mean_gradients(manifest, data, stages, 5)
    return loss, {name: value for of_stage in found for name, value in of_stage.items()}


def hidden_states(manifest: Manifest) -> Tensor:
    return torch.randn(manifest.boundary_shape(1), generator=torch.Generator().manual_seed(0))


def dropouts_of(stage: StageModule) -> set[str]:
    return {name for name, module in stage.named_modules() if isinstance(module, Dropout)}


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES])
def test_what_is_left_out_does_not_depend_on_the_split(name: str) -> None:
    loss, split = gradients_of(with_dropout(name, 3))
    whole_loss, whole = gradients_of(with_dropout(name, 1))
    assert loss == whole_loss
    assert split.keys() == whole.keys()
    assert all(torch.equal(split[name], whole[name]) for name in whole)
    plain_loss, plain = gradients_of(with_dropout(name, 3, 0.0))
    assert loss != plain_loss
    every_layer = [name for name in plain if any(part.isdigit() for part in name.split(".")) and plain[name].any()]
    assert all(not torch.equal(split[name], plain[name]) for name in every_layer)


def test_an_architecture_keeps_its_own_places_but_attentions_weights_and_others_get_one_for_each_layer() -> None:
    own = {"transformer.drop"} | {f"transformer.h.{layer}.{place}" for layer in range(3) for place in ("attn.resid_dropout", "mlp.dropout")}
    assert dropouts_of(build_stage(with_dropout("gpt2", 1), 0, "cpu")) == own
    stages = [build_stage(with_dropout("llama", 3), stage, "cpu") for stage in range(3)]
    assert [dropouts_of(stage) for stage in stages] == [
        {"model.layers.0.peerd_dropout_before", "model.layers.0.peerd_dropout"},
        {"model.layers.1.peerd_dropout"},
        {"model.layers.2.peerd_dropout"},
    ]
    assert not dropouts_of(build_stage(with_dropout("gpt2", 1, 0.0), 0, "cpu")), "a run without dropout is what it was"


def test_of_what_a_layer_adds_a_share_is_left_out_and_the_rest_made_up_for() -> None:
    """Before the last norm and head: the hidden states of a middle stage of one layer."""
    manifest = with_dropout("llama", 3)
    stage, hidden = build_stage(manifest, 1, "cpu"), hidden_states(manifest)
    with torch.no_grad():
        plain = stage(hidden)
        with dropout_of(stage, manifest, 0, 0):
            found = stage(hidden)
    left_out = found == hidden
    assert 0.2 < float(left_out.double().mean()) < 0.4
    added = (plain - hidden) / 0.7
    assert torch.allclose((found - hidden)[~left_out], added[~left_out], atol=1e-6)


def test_masks_are_a_microbatchs_own_and_evaluation_and_copies_have_none_of_another() -> None:
    manifest = with_dropout("llama", 3)
    stage, hidden = build_stage(manifest, 1, "cpu"), hidden_states(manifest)
    held = copy.deepcopy(stage)

    def run(module: nn.Module, step: int, index: int) -> Tensor:
        with torch.no_grad(), dropout_of(module, manifest, step, index):
            return module(hidden)  # type: ignore[no-any-return]

    first = run(stage, 1, 0)
    assert torch.equal(run(stage, 1, 0), first)
    assert torch.equal(run(held, 1, 0), first)
    assert not torch.equal(run(stage, 1, 1), first)
    assert not torch.equal(run(stage, 2, 0), first)
    with torch.no_grad(), dropout_of(stage, manifest, 1, 0):
        assert torch.equal(held(hidden), build_stage(with_dropout("llama", 3, 0.0), 1, "cpu")(hidden))


def test_masks_count_as_memory_and_the_organiser_is_told_of_dropout() -> None:
    manifests = [with_dropout("llama", 3, dropout) for dropout in (0.0, 0.1)]
    plain, masked = (build_stage(each, 1, "cpu").graph_bytes(each.tokens_per_microbatch) for each in manifests)
    assert masked > plain
    assert "its dropout is left out unless [train] dropout says how much" in remarks_on(hf_model("gpt2"), None)


def test_a_list_of_blocks_says_itself_what_it_leaves_out() -> None:
    from tests.models.test_blocks import resnet_manifest

    with pytest.raises(ValueError, match=r"train\.dropout does not go with a list of blocks"):
        dataclasses.replace(resnet_manifest(), train=dataclasses.replace(resnet_manifest().train, dropout=0.1))
