"""A language model of transformers computes the same in three stages as in one, bit for bit, or is refused."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import sys
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from peerd.equality import MAX_STAGES, check_split
from peerd.errors import ManifestError, UsageError
from peerd.models.hf.layout import layout_of
from peerd.models.hf.manifest_model import choose_model
from peerd.models.stages import (
    build_stage,
    estimate_forward_flops,
    initial_parameter_spec,
    measured_loads,
    with_cut,
)
from tests.models.hf_models import ARCHITECTURES, hf_manifest, hf_model

QUICK = ("gpt2", "bert", "deepseek_v3")
"""Learned positions; a masked model with an unused parameter; experts, and layers of two kinds."""
OTHERS = ("gpt_neo", "gptj", "codegen")
"""Two kinds of layers, given as patterns; rotary embeddings on a part of each head. `scripts/bench architectures` tries all."""
TIED = ("gpt2", "llama", "bert", "qwen2", "gemma2", "opt", "cohere", "roberta", "falcon", "smollm3", "starcoder2", "lfm2", "mamba")
UNTIEABLE = "rembert"
QUICK_TIED = ("gpt2", "bert")
"""Learned positions; a second tied pair, of which both lie in the last stage."""


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in (*ARCHITECTURES, *OTHERS)]
)
def test_losses_and_all_gradients_of_three_stages_are_those_of_the_whole(name: str) -> None:
    """The architecture's own default sizes, which the check makes small."""
    assert MAX_STAGES == 3
    model = choose_model(name, {}, {})
    check_split(dataclasses.replace(hf_manifest(1), model=model))


def test_the_check_does_not_depend_on_where_the_run_is_cut_or_how_its_sequences_grow() -> None:
    """The tiny copy has fewer layers, and shorter sequences than the run begins with."""
    model = hf_model(num_hidden_layers=6)
    check_split(hf_manifest(2, model, cut=(2, 4), sequence_length=64, first_sequence_length=32, sequence_length_steps=5))


def test_first_weights_follow_the_architectures_rules_and_do_not_depend_on_the_split() -> None:
    whole = dict(build_stage(hf_manifest(1), 0, "cpu").named_parameters())
    stages = [build_stage(hf_manifest(3), stage, "cpu") for stage in range(3)]
    split = {name: value for stage in stages for name, value in stage.named_parameters()}
    assert split.keys() == whole.keys()
    assert all(torch.equal(split[name], whole[name]) for name in whole)
    assert bool((whole["model.norm.weight"] == 1).all())
    drawn = whole["model.embed_tokens.weight"].detach()
    assert float(drawn.std()) == pytest.approx(0.02, rel=0.05)
    assert drawn.flatten()[:3].tolist() == EMBEDDING_STARTS, "peers of different releases must start a run alike"
    for stage in range(3):
        assert initial_parameter_spec(hf_manifest(3), stage) == {n: tuple(v.shape) for n, v in stages[stage].named_parameters()}


EMBEDDING_STARTS = [0.012385253794491291, 0.0038922119420021772, -0.014008789323270321]


def test_a_copy_of_a_stage_computes_alike_and_on_its_own() -> None:
    """A peer keeps the previous step's parameters as a copy of its stage."""
    stage = build_stage(hf_manifest(3), 1, "cpu")
    held = copy.deepcopy(stage)
    hidden = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0))
    before = stage(hidden)
    assert torch.equal(held(hidden), before)
    with torch.no_grad():
        next(stage.parameters()).zero_()
    assert torch.equal(held(hidden), before)
    assert not torch.equal(stage(hidden), before)


def test_tied_embeddings_are_untied_and_unused_parameters_are_nobodys() -> None:
    layout = layout_of(hf_model("bert"))
    assert layout.unused == {"cls.predictions.bias"}
    assert "cls.predictions.decoder.weight" in layout.after
    assert "bert.embeddings.word_embeddings.weight" in layout.before


@pytest.mark.parametrize(
    ("key", "value"), [("auto_map", {"AutoModel": "x.py"}), ("quantization_config", {}), ("_attn_implementation", "a/b")]
)
def test_a_config_that_names_other_code_is_refused(key: str, value: Any) -> None:
    model = hf_model()
    with pytest.raises(ValueError, match=key):
        dataclasses.replace(model, config=json.dumps({**model.fields, "deeper": [{key: value}]}))


def test_a_config_that_says_otherwise_than_the_manifest_is_refused() -> None:
    with pytest.raises(ManifestError, match=r"num_hidden_layers 3 and \[model\] says 4"):
        initial_parameter_spec(hf_manifest(1, dataclasses.replace(hf_model(), num_layers=4)), 0)


def test_a_machine_without_the_library_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = hf_manifest(2)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ManifestError, match=r"needs the package transformers, which is not installed here; install it with `pip install"):
        build_stage(manifest, 0, "cpu")


def test_what_transformers_does_not_know_is_refused_in_one_line() -> None:
    with pytest.raises(UsageError, match="knows no architecture 'lama'"):
        choose_model("lama", {}, {})
    with pytest.raises(UsageError, match="has no field hiden_size"):
        choose_model("llama", {}, {"hiden_size": 3})
    with pytest.raises(ManifestError, match="an encoder with a decoder"):
        choose_model("t5", {}, {})


@pytest.mark.parametrize(("name", "changes"), [("gemma4_assistant", {}), ("dots3_note", {"num_attention_heads": 4})])
def test_an_architecture_whose_own_defaults_are_refused_or_differ_by_layer_is_refused_in_one_line(name: str, changes: Any) -> None:
    """Architectures of this release of transformers; another release may have none of the kind."""
    if name not in pytest.importorskip("transformers").CONFIG_MAPPING:
        pytest.skip("this transformers does not know it")
    with pytest.raises(ManifestError, match=f"this is not a config of a {name}"):
        choose_model(name, {}, changes)


def test_a_model_whose_layers_are_one_shared_block_is_refused_by_its_module() -> None:
    with pytest.raises(ManifestError, match=r"does not split.*layer"):
        layout_of(choose_model("albert", {}, {}))


def test_a_gradient_that_differs_is_refused_by_the_name_of_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a stage's norm that computes slightly differently from the whole model's."""
    from peerd.models.hf.stage import HuggingFaceStage

    usual = HuggingFaceStage.forward

    def slightly_off(self: HuggingFaceStage, *arguments: Any) -> torch.Tensor:
        return usual(self, *arguments) * (1.0 if self.stage else 1.0 + 1e-3)

    monkeypatch.setattr(HuggingFaceStage, "forward", slightly_off)
    with pytest.raises(ManifestError, match=r"model\.\S+ does not split: the gradient of model\.\S+ differs"):
        check_split(hf_manifest(2))


@pytest.mark.parametrize("name", ["gemma2", "mixtral"])
@pytest.mark.parametrize("stage", [0, 2])
def test_the_graph_estimate_is_what_torch_saves(name: str, stage: int) -> None:
    """Exact with eager attention; experts that get unequal numbers of tokens save a few percent more."""
    manifest = hf_manifest(3, hf_model(name))
    module = build_stage(manifest, stage, "cpu")
    own = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    saved: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        module(tokens if module.is_first else torch.randn(2, 16, 32, requires_grad=True), tokens if module.is_last else None)
    total = sum(tensor.untyped_storage().nbytes() for place, tensor in saved.items() if place not in own)
    momentary = 2 * 4 * 256 * 32 if module.is_last else 0
    graph_bytes = module.graph_bytes(manifest.tokens_per_microbatch)
    assert graph_bytes - momentary == pytest.approx(total, rel=0.01 if name == "gemma2" else 0.08)


def test_flops_of_a_llama_are_those_of_its_products() -> None:
    """Per layer four projections, three of the gated hidden layer, and attention's two products over the whole sequence."""
    num_tokens, width, inner, sequence, vocabulary = 2 * 16, 32, 48, 16, 256
    per_layer = 2 * num_tokens * (4 * width**2 + 3 * width * inner + 2 * sequence * width)
    rotary = 2 * num_tokens * 8  # the rotary table's own product: a position with each of a head's 8 rates
    found = [estimate_forward_flops(hf_manifest(3), stage) for stage in range(3)]
    expected = [per_layer, per_layer, per_layer + 2 * num_tokens * width * vocabulary]
    assert all(0 <= one - other <= rotary for one, other in zip(found, expected, strict=True)), (found, expected)


def test_where_a_model_splits_does_not_depend_on_who_asks() -> None:
    with torch.no_grad():
        layout = layout_of(hf_model("llama", intermediate_size=56))
    assert layout.before == frozenset({"model.embed_tokens.weight"})
    assert layout.after == frozenset({"model.norm.weight", "lm_head.weight"})


def test_a_stage_has_no_parameter_of_another() -> None:
    module = build_stage(hf_manifest(3), 1, "cpu")
    assert {name.split(".")[2] for name, _ in module.named_parameters()} == {"1"}
    assert isinstance(module, nn.Module)
    assert not module.training, "dropout would make a microbatch's gradient depend on who computes it"


def test_a_cut_by_cost_weighs_what_each_layer_of_a_transformers_model_takes() -> None:
    """The last stage also has a head with 8 times a layer's products, so it gets fewer layers."""
    model = hf_model(num_hidden_layers=6, vocab_size=2048)
    manifest = hf_manifest(2, model, cut="cost")
    counts = with_cut(manifest).layer_counts
    assert counts is not None
    assert sum(counts) == 6
    assert counts[0] > counts[1]
    loads = measured_loads(manifest)
    assert loads.groups[0].num_parameters == sum(
        math.prod(shape) for name, shape in initial_parameter_spec(hf_manifest(6, model), 1).items() if ".layers." in name
    )


@pytest.mark.parametrize("name", [name if name in QUICK_TIED else pytest.param(name, marks=pytest.mark.slow) for name in TIED])
def test_with_tied_embeddings_losses_and_all_gradients_of_three_stages_are_those_of_the_librarys_own_tied_model(name: str) -> None:
    """The tied weight's gradient is the sum of the first and the last stage's, as torch computes it for one parameter."""
    check_split(dataclasses.replace(hf_manifest(1), model=choose_model(name, {}, {}, tied=True)))


def test_a_tied_weight_has_one_name_in_the_first_stage_and_in_the_last() -> None:
    manifest = hf_manifest(3, dataclasses.replace(hf_model(), tie_word_embeddings=True))
    stages = [build_stage(manifest, stage, "cpu") for stage in range(3)]
    weight = "model.embed_tokens.weight"
    assert [stage.tied_names for stage in stages] == [(weight,), (), (weight,)]
    held = [dict(stage.named_parameters()) for stage in stages]
    assert [weight in each for each in held] == [True, False, True]
    assert torch.equal(held[0][weight], held[2][weight])
    assert not any("lm_head.weight" in each for each in held)
    whole = build_stage(dataclasses.replace(manifest, train=dataclasses.replace(manifest.train, num_stages=1)), 0, "cpu")
    assert whole.tied_names == ()
    assert {name for each in held for name in each} == dict(whole.named_parameters()).keys()
    logits = copy.deepcopy(stages[2])(torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0)))
    assert logits.shape == (2, 16, 256)


def test_what_cannot_be_tied_is_refused_and_what_is_not_asked_for_stays_apart() -> None:
    assert not choose_model("gpt2", {}, {}).tie_word_embeddings
    assert choose_model("llama", {}, {"tie_word_embeddings": True}).tie_word_embeddings
    with pytest.raises(ManifestError, match="no input and output embeddings that could be one"):
        check_split(dataclasses.replace(hf_manifest(1), model=choose_model(UNTIEABLE, {}, {}, tied=True)))
