"""The boundary "subspace" in transformers models of the Llama family, held against the plain model that computes the same."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

pytest.importorskip("transformers")
from transformers import AutoModelForCausalLM

from peerd.config.manifest import Manifest
from peerd.config.model_kinds import SUBSPACE_FAMILY, HuggingFaceConfig
from peerd.equality import check_split
from peerd.generate import open_text_model
from peerd.models.hf.stage import HuggingFaceStage
from peerd.models.published import publish
from peerd.models.stages import build_stage, measured_loads
from peerd.models.subspace import Unfolded
from peerd.planner.workload import estimate_stage
from peerd.reference import backpropagate, train_reference
from peerd.stage.export import write_export
from peerd.stage.hf_export import write_hf_export
from tests.models.hf_models import hf_manifest, hf_model
from tests.stage.test_options import Chain
from tests.tiny_run import corpus_of, replace_train

RANK = 8
FAMILY = [name if name in ("llama", "qwen2") else pytest.param(name, marks=pytest.mark.slow) for name in SUBSPACE_FAMILY]
"""Qwen2 has biases where Llama has none."""


def narrowed(name: str = "llama", **changes: Any) -> HuggingFaceConfig:
    return replace(hf_model(name, **changes), boundary="subspace", boundary_rank=RANK)


def stages_of(manifest: Manifest) -> list[HuggingFaceStage]:
    """In double precision."""
    found = [build_stage(manifest, stage, "cpu").double() for stage in range(manifest.train.num_stages)]
    return [stage for stage in found if isinstance(stage, HuggingFaceStage)]


def parameters_of(stages: list[HuggingFaceStage]) -> dict[str, Tensor]:
    return {name: parameter for stage in stages for name, parameter in stage.named_parameters()}


def windows() -> Tensor:
    return torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(5))


@pytest.fixture
def norms_in_double_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The family's own norms compute in float32, whose rounding would hide what is looked for."""

    def forward(norm: Any, hidden: Tensor) -> Tensor:
        return functional.rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)

    for stage in (build_stage(hf_manifest(1, hf_model(name)), 0, "cpu") for name in ("llama", "qwen2")):
        monkeypatch.setattr(type(stage.get_submodule("model.norm")), "forward", forward)


@pytest.mark.parametrize("name", FAMILY)
def test_three_stages_equal_the_whole_model_to_a_billionth(name: str) -> None:
    model, tokens = narrowed(name), windows()
    found, whole = stages_of(hf_manifest(3, model)), stages_of(hf_manifest(1, model))
    loss, expected = (backpropagate(stages, tokens[:, :-1], tokens) for stages in (found, whole))
    assert loss == pytest.approx(expected, abs=1e-9)
    gradients = {name: parameter.grad for name, parameter in parameters_of(whole).items()}
    for path, parameter in parameters_of(found).items():
        assert torch.allclose(parameter.grad, gradients[path], rtol=0, atol=1e-9), path  # type: ignore[arg-type]
    check_split(hf_manifest(3, model))


@pytest.mark.usefixtures("norms_in_double_precision")
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_hidden_states_and_gradients_at_each_cut_are_those_of_the_plain_model(name: str) -> None:
    """Compressed or not: c U^T + T is the plain model's hidden state, and c's gradient is all of its gradient that counts."""
    model, tokens = narrowed(name), windows()
    manifest = hf_manifest(3, model)
    narrow, plain = stages_of(manifest), stages_of(hf_manifest(3, model.plain))
    unfolded = Unfolded(model, manifest.seed, {path: value.detach() for path, value in parameters_of(narrow).items()})
    with torch.no_grad():
        for path, parameter in parameters_of(plain).items():
            parameter.copy_(unfolded[path])
    coordinates, hidden, crossed = tokens[:, :-1], tokens[:, :-1], list[tuple[Tensor, Tensor]]()
    for ours, theirs in zip(narrow, plain, strict=True):
        if not ours.is_first:
            crossed.append((coordinates.detach().requires_grad_(), hidden.detach().requires_grad_()))
            coordinates, hidden = crossed[-1]
        if not ours.is_last:
            coordinates, hidden = ours(coordinates, tokens), theirs(hidden)
    _compare_last(narrow, plain, crossed[-1], tokens)
    torch.autograd.backward([narrow[1](crossed[0][0], tokens), plain[1](crossed[0][1])], [each.grad for each in crossed[1]])
    coordinates_of = narrow[1].coordinates
    assert coordinates_of is not None
    widen = coordinates_of.of(tokens[:, :-1])
    for received, plainly in crossed:
        assert received.shape == (2, 16, RANK)
        assert torch.allclose(widen(received), plainly, rtol=0, atol=1e-12)
        assert received.grad is not None
        assert plainly.grad is not None
        assert torch.allclose(received.grad, plainly.grad @ unfolded.basis.double(), rtol=0, atol=1e-12)


def _compare_last(narrow: list[HuggingFaceStage], plain: list[HuggingFaceStage], entered: tuple[Tensor, Tensor], tokens: Tensor) -> None:
    """The logits of both last stages are equal; their gradients lie in what has entered. (The loss is in single precision.)"""
    ours = narrow[2].without_loss(entered[0], tokens[:, :-1])
    theirs = plain[2](entered[1])
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)
    torch.autograd.backward([ours, theirs], [torch.ones_like(ours)] * 2)


def test_as_many_fewer_bytes_cross_as_the_rank_is_smaller_than_the_width() -> None:
    narrow, plain = (hf_manifest(3, model) for model in (narrowed(), hf_model()))
    assert plain.boundary_bytes == 32 // RANK * narrow.boundary_bytes
    loads = [(each, measured_loads(each)) for each in (plain, narrow)]
    uploads = [estimate_stage(each, load, range(1, 2)).upload_bytes_per_token for each, load in loads]
    assert uploads[0] == 32 / RANK * uploads[1] == 2 * 4 * 32
    plainly, narrowly = (load.groups[0] for _, load in loads)
    fewer = (32 - RANK) * (32 + 48)  # of both matrices that write
    assert plainly.num_parameters - narrowly.num_parameters == fewer


def test_a_chain_of_peers_trains_what_the_reference_trains(tmp_path: Path) -> None:
    """In bfloat16, too, the stream of coordinates is float32. Graphs are kept, or forward passes are made again."""
    for precision, keep_graph in (("float32", False), ("bfloat16", True)):
        manifest = replace_train(hf_manifest(3, narrowed()), accumulate="float64", precision=precision, dropout=0.1)
        corpus = corpus_of(manifest, tmp_path)
        chain, expected = Chain(manifest, keep_graph=keep_graph), train_reference(manifest, corpus, 4)
        chain.train(corpus)
        assert [entry.loss for entry in chain.states[-1].history] == [entry.loss for entry in expected.history]
        assert all(torch.equal(chain.parameters[name], value) for name, value in expected.parameters.items())
        assert expected.history[-1].loss < expected.history[0].loss


@pytest.mark.parametrize("name", FAMILY)
def test_the_export_loads_in_transformers_with_equal_logits(name: str, tmp_path: Path) -> None:
    changes = {"attention_bias": True, "mlp_bias": True} if name == "llama" else {}  # a bias of coordinates becomes one of hidden states
    manifest = hf_manifest(3, narrowed(name, **changes))
    trained = train_reference(manifest, corpus_of(manifest, tmp_path), 2)
    write_hf_export(tmp_path / "out", manifest, trained.parameters, step=2)
    model, told = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told.values())
    assert type(model).__name__.lower() == f"{name}forcausallm"
    write_export(tmp_path / "native", manifest, trained.parameters, trained.optimizer_state, trained.history)
    tokens = windows()[:1, :-1]
    ours = open_text_model([tmp_path / "native"]).logits(tokens[0].tolist())
    with torch.no_grad():
        theirs = model(input_ids=tokens, use_cache=False).logits[0, -1]
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-5)
    assert "boundary" not in json.dumps(publish(manifest, trained.parameters).config)


def test_first_weights_do_not_depend_on_the_split_and_a_copy_computes_on_its_own() -> None:
    whole = parameters_of(stages_of(hf_manifest(1, narrowed())))
    stages = stages_of(hf_manifest(3, narrowed()))
    found = parameters_of(stages)
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    assert found["model.embed_tokens.weight"].shape == (256, RANK)
    tokens, received = windows(), torch.ones(2, 16, RANK, dtype=torch.float64)
    before, held = stages[1](received, tokens), copy.deepcopy(stages[1])
    _spoil(dict(stages[1].named_parameters()))
    assert torch.equal(held(received, tokens), before)
    assert not torch.equal(stages[1](received, tokens), before)
    with pytest.raises(ValueError, match="needs the tokens"):
        held(received)


@torch.no_grad()
def _spoil(parameters: Mapping[str, nn.Parameter]) -> None:
    for parameter in parameters.values():
        parameter.zero_()


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("gpt2", {"boundary_rank": 8}, r'"subspace" is made for llama, mistral, qwen2, qwen3; model\.config is of a gpt2'),
        ("llama", {}, r'model\.boundary_rank is 0; with the boundary "subspace" it must be 1 to model\.d_model \(32\)'),
        ("llama", {"boundary_rank": 33}, r"model\.boundary_rank is 33"),
        ("llama", {"boundary_rank": 8, "tie_word_embeddings": True}, r"tie_word_embeddings cannot go with"),
    ],
)
def test_what_does_not_go_with_it_is_refused_in_one_sentence(name: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        replace(hf_model(name), boundary="subspace", **changes)
