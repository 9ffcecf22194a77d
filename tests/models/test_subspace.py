"""The boundary "subspace": a few coordinates cross in place of hidden states, and nothing is lost by that.

The model that it computes is a plain decoder with certain matrices, so everything is held against that decoder.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from peerd.config.manifest import Manifest, ModelConfig
from peerd.errors import UsageError
from peerd.generate import open_text_model
from peerd.models.decoder import DecoderStage
from peerd.models.published import check_publishable, publish
from peerd.models.stages import build_stage, labels_shape, model_loads
from peerd.models.subspace import Subspace, Unfolded
from peerd.planner.workload import estimate_stage
from peerd.reference import backpropagate, train_reference
from peerd.stage.export import write_export
from tests.stage.test_options import Chain
from tests.tiny_run import corpus_of, replace_train, tiny_manifest

RANK = 8


def run_of(num_stages: int, rank: int = RANK) -> Manifest:
    manifest = tiny_manifest(num_stages)
    return replace(manifest, model=replace(manifest.decoder, boundary="subspace", boundary_rank=rank))


def stages_of(manifest: Manifest) -> list[DecoderStage]:
    """In double precision."""
    found = [build_stage(manifest, stage, "cpu").double() for stage in range(manifest.train.num_stages)]
    return [stage for stage in found if isinstance(stage, DecoderStage)]


def parameters_of(stages: list[DecoderStage]) -> dict[str, Tensor]:
    return {name: parameter for stage in stages for name, parameter in stage.named_parameters()}


def windows() -> Tensor:
    return torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(5))


def test_three_stages_equal_the_whole_model_to_a_billionth() -> None:
    found, whole, tokens = stages_of(run_of(3)), stages_of(run_of(1)), windows()
    loss, expected = (backpropagate(stages, tokens[:, :-1], tokens) for stages in (found, whole))
    assert loss == pytest.approx(expected, abs=1e-9)
    gradients = {name: parameter.grad for name, parameter in parameters_of(whole).items()}
    for name, parameter in parameters_of(found).items():
        assert torch.allclose(parameter.grad, gradients[name], rtol=0, atol=1e-9), name  # type: ignore[arg-type]


def test_hidden_states_and_gradients_at_each_cut_are_those_of_the_plain_decoder() -> None:
    """Compressed or not: c U^T + T is the plain decoder's hidden state, and c's gradient is all of its gradient that counts."""
    manifest, tokens = run_of(3), windows()
    narrow = stages_of(manifest)
    plain = stages_of(replace(manifest, model=replace(manifest.decoder, boundary="none", boundary_rank=0)))
    unfolded = Unfolded(manifest.decoder, manifest.seed, {name: value.detach() for name, value in parameters_of(narrow).items()})
    basis = unfolded.basis.double()
    with torch.no_grad():
        for name, parameter in parameters_of(plain).items():
            parameter.copy_(unfolded[name])
    coordinates, hidden, crossed = tokens[:, :-1], tokens[:, :-1], list[tuple[Tensor, Tensor]]()
    for ours, theirs in zip(narrow[:2], plain[:2], strict=True):  # the loss of the last stage is in single precision
        if not ours.is_first:
            crossed.append((coordinates.detach().requires_grad_(), hidden.detach().requires_grad_()))
            coordinates, hidden = crossed[-1]
        coordinates, hidden = ours(coordinates, tokens), theirs(hidden)
    assert narrow[1].subspace is not None
    widen, towards = narrow[1].subspace.of(tokens[:, :-1]), torch.rand_like(hidden)
    assert torch.allclose(widen(coordinates), hidden, rtol=0, atol=1e-12)
    torch.autograd.backward([(widen(coordinates) * towards).sum(), (hidden * towards).sum()])
    for received, plainly in crossed:
        assert received.shape == (2, 16, RANK)
        assert torch.allclose(widen(received), plainly, rtol=0, atol=1e-12)
        assert received.grad is not None
        assert plainly.grad is not None
        assert torch.allclose(received.grad, plainly.grad @ basis, rtol=0, atol=1e-12)


def test_the_directions_are_orthonormal_and_tokens_differ() -> None:
    subspace = Subspace(ModelConfig(d_model=64, boundary="subspace", boundary_rank=16), seed=3)
    subspace.draw()
    assert torch.allclose(subspace.basis.T @ subspace.basis, torch.eye(16), atol=1e-6)
    rows = subspace.rows(torch.arange(1000))
    assert float(rows.mean().abs()) < 1e-3
    assert float(rows.std()) == pytest.approx(0.02, rel=0.02)
    alike = functional.normalize(rows) @ functional.normalize(rows).T - torch.eye(1000)
    assert float(alike.abs().max()) < 0.7
    assert torch.equal(subspace.rows(torch.tensor([[7]]))[0, 0], rows[7])
    other = Subspace(ModelConfig(d_model=64, boundary="subspace", boundary_rank=16), seed=4)
    assert not torch.equal(other.rows(torch.arange(1000)), rows)


def test_the_table_is_frozen() -> None:
    """Peers of different releases must compute the same: change these digits only together with the wire version."""
    subspace = Subspace(ModelConfig(d_model=64, boundary="subspace", boundary_rank=16), seed=3)
    assert subspace.rows(torch.tensor(97))[:2].tolist() == TABLE_STARTS


TABLE_STARTS = [0.007166784256696701, 0.021257450804114342]


def test_as_many_fewer_bytes_cross_as_the_rank_is_smaller_than_the_width() -> None:
    narrow, plain = run_of(3), tiny_manifest(3)
    assert plain.boundary_bytes == 32 // RANK * narrow.boundary_bytes
    uploads = [estimate_stage(each, model_loads(each), range(1, 3)).upload_bytes_per_token for each in (plain, narrow)]
    assert uploads[0] == 32 / RANK * uploads[1] == 2 * 4 * 32


def test_labels_are_the_windows_so_that_every_stage_knows_the_tokens(tmp_path: Path) -> None:
    manifest = run_of(3)
    tokens, labels = corpus_of(manifest, tmp_path).microbatch(0, 0)
    assert tuple(labels.shape) == labels_shape(manifest, 16) == (2, 17)
    assert torch.equal(labels[:, :-1], tokens)
    assert torch.equal(labels[:, 1:], corpus_of(tiny_manifest(3), tmp_path).microbatch(0, 0)[1])
    assert [stage.needs_labels for stage in stages_of(manifest)] == [True] * 3
    with pytest.raises(ValueError, match="needs the tokens"):
        stages_of(manifest)[1](torch.zeros(2, 16, RANK, dtype=torch.float64))


def test_a_chain_of_peers_trains_what_the_reference_trains(tmp_path: Path) -> None:
    """In bfloat16, too, the stream of coordinates is float32."""
    for precision in ("float32", "bfloat16"):
        manifest = replace_train(run_of(3), accumulate="float64", precision=precision)
        corpus = corpus_of(manifest, tmp_path)
        chain, expected = Chain(manifest, keep_graph=True), train_reference(manifest, corpus, 4)
        chain.train(corpus)
        assert [entry.loss for entry in chain.states[-1].history] == [entry.loss for entry in expected.history]
        assert all(torch.equal(chain.parameters[name], value) for name, value in expected.parameters.items())
        assert expected.history[-1].loss < expected.history[0].loss


def test_the_export_computes_the_same_in_transformers_and_here(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    manifest = run_of(3)
    trained = train_reference(manifest, corpus_of(manifest, tmp_path), 2)
    tokens = windows()[:1, :-1]
    published = publish(manifest, trained.parameters)
    model = transformers.StableLmForCausalLM(transformers.StableLmConfig.from_dict(published.config))
    missing = model.load_state_dict(dict(published.tensors), strict=False)
    assert not missing.unexpected_keys
    assert not missing.missing_keys
    write_export(tmp_path / "out", manifest, trained.parameters, trained.optimizer_state, trained.history)
    ours = open_text_model([tmp_path / "out"]).logits(tokens[0].tolist())
    with torch.no_grad():
        theirs = model.eval()(input_ids=tokens, use_cache=False).logits[0, -1]
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-5)
    assert json.dumps(published.config)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"boundary": "subspace"}, r'model\.boundary_rank is 0; with the boundary "subspace" it must be 1 to model\.d_model \(128\)'),
        ({"boundary": "subspace", "boundary_rank": 129}, r"model\.boundary_rank is 129"),
        ({"boundary_rank": 8}, r'model\.boundary_rank needs model\.boundary = "subspace"'),
        ({"boundary": "subspace", "boundary_rank": 8, "tie_word_embeddings": True}, r"tie_word_embeddings cannot go with"),
        ({"boundary": "subspace", "boundary_rank": 8, "boundary_layers": (1,)}, r"boundary_layers needs model\.boundary"),
    ],
)
def test_what_does_not_go_with_it_is_refused_in_one_sentence(model: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ModelConfig(**model)  # type: ignore[arg-type]


def test_other_narrow_boundaries_are_still_no_architecture_of_transformers() -> None:
    check_publishable(run_of(2))
    squeezed = replace(tiny_manifest(2), model=replace(tiny_manifest(2).decoder, boundary="maxout"))
    with pytest.raises(UsageError, match=r"exactly a decoder with model\.boundary"):
        check_publishable(squeezed)
