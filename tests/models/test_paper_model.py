"""The paper's variants of the decoder: shared layers, narrow boundaries, growing sequences. Splitting changes none of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from peerd.config.manifest import Manifest, ModelConfig, StartConfig, TrainConfig
from peerd.errors import ManifestError
from peerd.models.stages import build_stage, estimate_forward_flops, initial_parameter_spec, labels_shape, layers_of, with_cut
from peerd.reference import train_reference
from peerd.stage.start import StartState, write_start
from tests.models.test_stages import saved_bytes
from tests.tiny_run import corpus_of, replace_train, tiny_manifest

BOTTLENECK: dict[str, Any] = {"boundary": "bottleneck", "boundary_factor": 4}
MAXOUT: dict[str, Any] = {"boundary": "maxout", "boundary_factor": 4}
VARIANTS = {
    "shared": {"layers_per_group": 2},
    "bottleneck": {**BOTTLENECK, "boundary_layers": (2, 4)},
    "maxout": {**MAXOUT, "boundary_layers": (2, 4)},
    "subspace": {"boundary": "subspace", "boundary_rank": 8},
    "subspace, shared": {"boundary": "subspace", "boundary_rank": 4, "layers_per_group": 2},
    "token-residual": {"boundary": "token-residual", "boundary_rank": 8, "boundary_layers": (2, 4)},
    "all": {**MAXOUT, "boundary_layers": (2, 4), "layers_per_group": 2},
}


def paper_manifest(num_stages: int, variant: dict[str, Any], **train: Any) -> Manifest:
    """Six layers, which divide into groups of two and into stages of two or three layers."""
    manifest = tiny_manifest(1, microbatches_per_step=2, **train)
    model = dataclasses.replace(manifest.decoder, num_layers=6, **variant)
    return replace_train(dataclasses.replace(manifest, model=model), num_stages=num_stages, cut="cost")


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_the_split_changes_no_bit_of_a_run(tmp_path: Path, name: str, num_stages: int) -> None:
    """The swarm's stages against the whole model on one machine: losses, parameters and the optimizer's state."""
    ramp = {"first_sequence_length": 8, "sequence_length_steps": 2}
    split, whole = (paper_manifest(count, VARIANTS[name], **ramp) for count in (num_stages, 1))
    found, expected = (train_reference(manifest, corpus_of(manifest, tmp_path), 2) for manifest in (split, whole))
    assert found.history == expected.history
    assert [entry.tokens for entry in found.history] == [2 * 2 * 8, 2 * 2 * 8]
    for ours, theirs in ((found.parameters, expected.parameters), (found.optimizer_state, expected.optimizer_state)):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[tensor], theirs[tensor]) for tensor in theirs)


def test_layers_of_a_group_are_one_set_of_weights_applied_several_times() -> None:
    shared, apart = (paper_manifest(2, variant) for variant in (VARIANTS["shared"], {}))
    blocks = {name.split(".")[1] for stage in range(2) for name in initial_parameter_spec(shared, stage) if name.startswith("blocks")}
    assert blocks == {"0", "2", "4"}
    tokens = torch.arange(32).view(2, 16)
    module = build_stage(replace_train(shared, num_stages=1), 0, "cpu")
    unrolled = build_stage(replace_train(apart, num_stages=1), 0, "cpu")
    values = dict(module.named_parameters())
    with torch.no_grad():
        for name, parameter in unrolled.named_parameters():
            kind, layer, rest = name.split(".", 2) if name.startswith("blocks") else ("", "", "")
            parameter.copy_(values[f"{kind}.{int(layer) // 2 * 2}.{rest}" if kind else name])
        assert torch.equal(module(tokens), unrolled(tokens))


@pytest.mark.parametrize("variant", [BOTTLENECK, MAXOUT])
def test_what_crosses_a_narrow_boundary_is_narrow(variant: dict[str, Any]) -> None:
    manifest = paper_manifest(3, variant)
    assert manifest.decoder.boundary_width == 8
    assert manifest.boundary_bytes == 4 * manifest.tokens_per_microbatch * 8
    hidden = torch.zeros(2, 16, dtype=torch.int64)
    for stage in range(2):
        hidden = build_stage(manifest, stage, "cpu")(hidden)
        assert hidden.shape == (2, 16, 8)
    assert build_stage(manifest, 2, "cpu")(hidden, torch.zeros(2, 16, dtype=torch.int64)).shape == ()
    assert next(name for name in initial_parameter_spec(manifest, 1) if name.startswith("widen")) == "widen.2.norm.weight"
    assert any(name.startswith("narrow.4.") for name in initial_parameter_spec(manifest, 1))


def test_maxout_sends_the_largest_of_each_window() -> None:
    narrow = build_stage(paper_manifest(2, MAXOUT), 0, "cpu").get_submodule("narrow.3")
    hidden = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
    normal = torch.nn.functional.layer_norm(hidden, (32,))
    with torch.no_grad():
        assert torch.allclose(narrow(hidden), torch.stack([window.amax(-1) for window in normal.chunk(8, dim=-1)], dim=-1), atol=1e-6)


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_flops_and_graphs_are_those_that_torch_counts(name: str) -> None:
    """Narrow boundaries inside a stage and at its ends."""
    for num_stages in (1, 3):
        manifest = replace_train(paper_manifest(num_stages, VARIANTS[name]), sequence_length=64)
        for stage in range(num_stages):
            module = build_stage(manifest, stage, "cpu")
            tokens = torch.zeros(2, 64, dtype=torch.int64)
            inputs = tokens if module.is_first else torch.randn(2, 64, manifest.decoder.boundary_width, requires_grad=True)
            labels = torch.zeros(labels_shape(manifest, 64), dtype=torch.int64) if module.needs_labels else None
            with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
                module(inputs, labels)
            assert estimate_forward_flops(manifest, stage) == counter.get_total_flops()
            momentary = 2 * 4 * manifest.model.vocab_size * manifest.tokens_per_microbatch if module.is_last else 0
            saved = saved_bytes(manifest.train, module, inputs, labels)
            assert module.graph_bytes(manifest.tokens_per_microbatch) - momentary == pytest.approx(saved, rel=0.05)


@given(st.integers(2, 512), st.integers(2, 512), st.integers(1, 300), st.integers(0, 400))
def test_sequences_grow_to_their_full_length_and_never_shrink(one: int, other: int, ramp_steps: int, step: int) -> None:
    first, full = sorted((one, other))
    train = TrainConfig(sequence_length=full, first_sequence_length=first, sequence_length_steps=ramp_steps)
    manifest = Manifest(train=train)
    length = manifest.sequence_length_at(step)
    assert first <= length <= full
    assert length <= manifest.sequence_length_at(step + 1)
    assert manifest.sequence_length_at(0) == (first if ramp_steps else full)
    assert manifest.sequence_length_at(ramp_steps) == full


def test_a_shorter_window_is_the_beginning_of_the_full_one(tmp_path: Path) -> None:
    full = tiny_manifest(1, sequence_length=32)
    growing = replace_train(full, first_sequence_length=8, sequence_length_steps=3)
    (tokens, labels), (short, short_labels) = (corpus_of(manifest, tmp_path).microbatch(1, 0) for manifest in (full, growing))
    assert short.shape == (2, 16)
    assert torch.equal(short, tokens[:, :16])
    assert torch.equal(short_labels, labels[:, :16])


@pytest.mark.parametrize(
    ("model", "train", "says"),
    [
        ({"num_layers": 6, "layers_per_group": 4}, {}, r"model\.num_layers \(6\) must be a multiple of model\.layers_per_group \(4\)"),
        ({"num_layers": 6, "layers_per_group": 3}, {"num_stages": 3}, r"before layers 3 only, so into at most 2 stages"),
        ({"num_layers": 6, "layers_per_group": 2}, {"cut": (3, 3)}, r"cuts before layer 3.*before layers 2, 4 only"),
        ({"num_layers": 6}, {"cut": (3, 2)}, r"train\.cut must be 2 numbers of layers, at least 1 each, 6 in all"),
        ({"num_layers": 6}, {"cut": (6, 0)}, r"train\.cut must be"),
        ({"num_layers": 600}, {"cut": "cost"}, r"at most 256 places"),
        ({"d_model": 128, "boundary": "maxout", "boundary_factor": 3}, {}, r"boundary_factor is 3"),
        ({"boundary_layers": (2,)}, {}, r"boundary_layers needs model\.boundary"),
        ({"boundary": "maxout", "boundary_layers": (2, 1)}, {}, r"some of 1, 2, 3, in rising order"),
        ({"boundary": "maxout", "boundary_layers": (1,)}, {}, r"cuts before layer 2"),
        ({}, {"first_sequence_length": 8}, r"go together"),
        ({}, {"first_sequence_length": 256, "sequence_length_steps": 3}, r"train\.first_sequence_length is 256"),
    ],
)
def test_what_cannot_be_cut_or_ramped_so_is_refused_by_name(model: dict[str, Any], train: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Manifest(model=ModelConfig(**model), train=TrainConfig(**train))


def test_a_narrow_model_goes_on_in_fewer_stages_and_is_refused_in_others(tmp_path: Path) -> None:
    """Cut elsewhere into two stages, it would be another model."""
    manifest = paper_manifest(3, BOTTLENECK)
    begun = train_reference(manifest, corpus_of(manifest, tmp_path), 1)
    path = tmp_path / "start.safetensors"
    write_start(path, 1, begun.parameters, begun.optimizer_state, begun.history)
    same_places = paper_manifest(2, {**BOTTLENECK, "boundary_layers": (2, 4)})
    start = dataclasses.replace(same_places, start=StartConfig(state=str(path)))
    found = train_reference(StartState(path).agree(start), corpus_of(manifest, tmp_path), 2, start=StartState(path))
    expected = train_reference(manifest, corpus_of(manifest, tmp_path), 2)
    assert found.history == expected.history
    assert all(torch.equal(found.parameters[name], expected.parameters[name]) for name in expected.parameters)
    elsewhere = dataclasses.replace(paper_manifest(2, BOTTLENECK), start=StartConfig(state=str(path)))
    assert layers_of(elsewhere, 1).start == 3
    with pytest.raises(ManifestError, match=r"narrow\.3\.norm\.weight is missing"):
        StartState(path).agree(elsewhere)


def test_a_cut_by_cost_is_signed_as_the_numbers_it_comes_to() -> None:
    """Other peers' estimates must not matter."""
    manifest = paper_manifest(3, VARIANTS["all"])
    signed = with_cut(manifest)
    assert (manifest.train.cut, signed.train.cut) == ("cost", (2, 2, 2))
    assert [layers_of(manifest, stage) for stage in range(3)] == [layers_of(signed, stage) for stage in range(3)]
    assert with_cut(signed) is signed
