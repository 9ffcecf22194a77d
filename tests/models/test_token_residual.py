"""The boundary "token-residual": all directions within stages, and between them a few coordinates beside the token."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from peerd.cli.main import run
from peerd.config.manifest import Manifest, ModelConfig
from peerd.errors import UsageError
from peerd.generate import open_text_model
from peerd.models.decoder import DecoderStage
from peerd.models.published import check_publishable
from peerd.models.stages import build_stage, model_loads
from peerd.planner.workload import estimate_stage
from peerd.reference import backpropagate, train_reference
from peerd.repartition import with_boundaries
from peerd.stage.export import write_export
from tests.models.test_subspace import RANK, parameters_of, stages_of, windows
from tests.stage.test_options import Chain
from tests.tiny_run import corpus_of, replace_train, tiny_manifest

CUTS = (2, 4)


def run_of(num_stages: int, rank: int = RANK, **model: Any) -> Manifest:
    manifest = tiny_manifest(num_stages)
    return replace(manifest, model=replace(manifest.decoder, boundary="token-residual", boundary_rank=rank, **model))


def moved(stages: list[DecoderStage]) -> list[DecoderStage]:
    """Their ends no longer have the directions that they begin with."""
    with torch.no_grad():
        for name, parameter in parameters_of(stages).items():
            if name.startswith(("narrow.", "widen.")):
                parameter.add_(0.1 * torch.rand(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    return stages


def test_three_stages_equal_the_whole_model_to_a_billionth() -> None:
    found, whole, tokens = moved(stages_of(run_of(3))), moved(stages_of(run_of(1, boundary_layers=CUTS))), windows()
    assert {name for name in parameters_of(found) if "projection" in name} == {
        f"{end}.{layer}.projection.weight" for end in ("narrow", "widen") for layer in CUTS
    }
    loss, expected = (backpropagate(stages, tokens[:, :-1], tokens) for stages in (found, whole))
    assert loss == pytest.approx(expected, abs=1e-9)
    gradients = {name: parameter.grad for name, parameter in parameters_of(whole).items()}
    for name, parameter in parameters_of(found).items():
        assert torch.allclose(parameter.grad, gradients[name], rtol=0, atol=1e-9), name  # type: ignore[arg-type]


def test_what_lies_in_the_first_directions_crosses_as_it_is_and_the_token_with_it() -> None:
    """So with all directions the model begins as the one without a narrow boundary, and its gradients at the cut are that one's."""
    tokens = windows()
    first, second = stages_of(run_of(2))
    assert first.subspace is not None
    basis = first.subspace.basis
    added = torch.rand(2, 16, RANK, dtype=torch.float64) @ basis.T
    crossed = first.narrow["3"](added)
    assert crossed.shape == (2, 16, RANK)
    assert torch.allclose(second.widen["3"](crossed), added, rtol=0, atol=1e-6)
    assert torch.equal(first.subspace.of(tokens[:, :-1])(added), added + first.subspace.rows(tokens[:, :-1]))
    full, uncut = stages_of(run_of(2, rank=32)), stages_of(run_of(1, rank=32))
    losses = [backpropagate(stages, tokens[:, :-1], tokens) for stages in (full, uncut)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    whole = parameters_of(uncut)
    for name in whole:
        assert torch.allclose(_gradient(full, name), _gradient(uncut, name), rtol=0, atol=1e-6), name


def _gradient(stages: list[DecoderStage], name: str) -> Tensor:
    found = parameters_of(stages)[name].grad
    assert found is not None
    return found


def test_as_many_fewer_bytes_cross_as_the_rank_is_smaller_than_the_width() -> None:
    narrow, plain = run_of(3), tiny_manifest(3)
    assert plain.boundary_bytes == 32 // RANK * narrow.boundary_bytes
    uploads = [estimate_stage(each, model_loads(each), range(1, 3)).upload_bytes_per_token for each in (plain, narrow)]
    assert uploads[0] == 32 / RANK * uploads[1] == 2 * 4 * 32


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_chain_of_peers_trains_what_the_reference_trains(precision: str, tmp_path: Path) -> None:
    manifest = replace_train(run_of(3), accumulate="float64", precision=precision)
    corpus = corpus_of(manifest, tmp_path)
    chain, expected = Chain(manifest, keep_graph=True), train_reference(manifest, corpus, 4)
    chain.train(corpus)
    assert [entry.loss for entry in chain.states[-1].history] == [entry.loss for entry in expected.history]
    assert all(torch.equal(chain.parameters[name], value) for name, value in expected.parameters.items())
    assert expected.history[-1].loss < expected.history[0].loss
    first = dict(build_stage(manifest, 1, "cpu").named_parameters())
    assert not torch.equal(first["widen.2.projection.weight"], expected.parameters["widen.2.projection.weight"]), "it is trained"


def test_an_export_speaks_and_goes_on_with_the_boundaries_that_it_was_trained_with(tmp_path: Path) -> None:
    manifest = run_of(3)
    trained = train_reference(manifest, corpus_of(manifest, tmp_path), 2)
    write_export(tmp_path / "out", manifest, trained.parameters, trained.optimizer_state, trained.history)
    tokens, hidden = windows()[:1], windows()[:1, :-1]
    for stage in range(3):
        module = build_stage(manifest, stage, "cpu")
        with torch.no_grad():
            for name, value in module.named_parameters():
                value.copy_(trained.parameters[name])
            hidden = module(hidden, tokens) if stage < 2 else _logits(module, hidden, tokens)
    found = open_text_model([tmp_path / "out"]).logits(tokens[0, :-1].tolist())
    assert torch.allclose(found, hidden[0, -1], rtol=0, atol=1e-5)
    assert with_boundaries(manifest).decoder.boundary_layers == CUTS
    with pytest.raises(UsageError, match=r"exactly a decoder with model\.boundary"):
        check_publishable(manifest)


def _logits(module: torch.nn.Module, hidden: Tensor, tokens: Tensor) -> Tensor:
    """The last stage's; it gives a loss where it has the tokens."""
    assert isinstance(module, DecoderStage)
    assert module.subspace is not None
    hidden = module.widen[str(CUTS[-1])](hidden)
    widen = module.subspace.of(tokens[:, :-1])
    for block in module.blocks.values():
        hidden = block(hidden, module.rotary[:, : hidden.shape[1]], widen)
    logits: Tensor = module.head(module.final_norm(widen(hidden)))
    return logits


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({}, r'model\.boundary_rank is 0; with the boundary "token-residual" it must be 1 to model\.d_model \(128\)'),
        ({"boundary_rank": 129}, r"model\.boundary_rank is 129"),
        ({"boundary_rank": 8, "tie_word_embeddings": True}, r"tie_word_embeddings cannot go with"),
        ({"boundary_rank": 8, "boundary_layers": (9,)}, r"boundary_layers must be some of 1, 2, 3"),
    ],
)
def test_what_does_not_go_with_it_is_refused_in_one_sentence(model: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ModelConfig(boundary="token-residual", **model)  # type: ignore[arg-type]


@pytest.mark.parametrize("boundary", ["subspace", "token-residual"])
def test_a_run_that_goes_on_keeps_its_seed_which_its_table_follows_from(
    boundary: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    manifest = run_of(3)
    earlier = replace(manifest, model=replace(manifest.decoder, boundary=boundary))  # type: ignore[arg-type]
    reply = {"manifest": asdict(earlier), "step": 2, "optimizer": True, "inexact_steps": 0}
    monkeypatch.setattr("peerd.cli.launch.run_child", lambda *_arguments, **_named: reply)
    command = ["new", str(tmp_path / "on"), "--from", str(tmp_path), "--seed"]
    assert run([*command, "8"]) == 2
    assert "with this boundary the seed is a part of the model; leave --seed out: it stays 7" in capfd.readouterr().err
    assert run([*command, "7", "--stages", "2", "--json"]) == 0


def test_a_checkpoint_has_weights_for_all_directions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    reply = {"model": {}, "start": True, "tokenizer": "", "remarks": []}
    monkeypatch.setattr("peerd.cli.launch.run_child", lambda *_arguments, **_named: reply)
    command = ["new", str(tmp_path / "on"), "--model", str(tmp_path), "--boundary", "subspace", "--boundary-rank", "8"]
    assert run(command) == 2
    assert "a checkpoint's weights do not fit a narrow boundary" in capfd.readouterr().err
