"""Local steps in one process: they equal plain training where they must, they learn, and nothing but the run decides them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from peerd.child import main
from peerd.config.manifest import Manifest, WireConfig
from peerd.errors import ExitCode, UsageError
from peerd.models.stages import StageModule, build_stage
from peerd.planner.load import Load
from peerd.planner.memory import optimizer_bytes
from peerd.reference import MAX_REPLICAS, ReferenceRequest, ReferenceResult, train_reference
from peerd.replicas import Replicas
from peerd.stage.optimizer import optimizer_parts
from tests.test_reference import assert_same_bits, request, write_run
from tests.tiny_run import corpus_of, real_text, replace_train, tiny_manifest

PLAIN = {"outer_learning_rate": 1.0, "outer_momentum": 0.0}
LOCAL = tiny_manifest(2, microbatches_per_step=8, local_batch=2, learning_rate=0.01)


def train(manifest: Manifest, cache: Path, steps: int, num_replicas: int) -> ReferenceResult:
    return train_reference(manifest, corpus_of(manifest, cache), steps, num_replicas=num_replicas)


def test_one_copy_that_averages_alone_is_plain_training_in_smaller_steps(tmp_path: Path) -> None:
    """A step of 8 microbatches with an update after each 2 is four steps of 2."""
    local = tiny_manifest(2, microbatches_per_step=8, local_batch=2, accumulate="float64", **PLAIN)
    corpus = corpus_of(local, tmp_path)
    found = train_reference(local, corpus, 1)
    plain = replace_train(local, num_stages=1, local_batch=0, microbatches_per_step=2)

    class Quarters:
        """The microbatches of the local step, as those of four."""

        def microbatch(self, step: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            return corpus.microbatch(0, 2 * step + index)

        def evaluation_microbatch(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            return corpus.evaluation_microbatch(index)

    expected = train_reference(plain, Quarters(), 4)
    assert found.parameters.keys() == expected.parameters.keys()
    assert all(torch.allclose(value, expected.parameters[name], atol=1e-6) for name, value in found.parameters.items())
    assert found.history[0].loss == pytest.approx(sum(entry.loss for entry in expected.history) / 4)


@pytest.mark.parametrize(("codec", "share"), [("none", 0.8), ("sparse:64", 0.9)])
def test_several_copies_learn_together(tmp_path: Path, codec: str, share: float) -> None:
    manifest = tiny_manifest(2, 0.1, microbatches_per_step=32, local_batch=2, microbatch_size=4, sequence_length=32, evaluate_every_steps=6)
    manifest = replace(replace_train(manifest, learning_rate=0.01, steps=6, outer_momentum=0.5), wire=WireConfig(weight_gradients=codec))
    found = train(manifest, tmp_path, 6, num_replicas=3)
    first, last = found.evaluations
    assert last.loss < share * first.loss
    assert set(found.optimizer_state) == {f"{name}.{part}" for name in found.parameters for part in ("outer_momentum", "step")}


def test_a_run_with_local_steps_repeated_is_the_same_run(tmp_path: Path) -> None:
    assert_same_bits(*(train(LOCAL, tmp_path, 2, num_replicas=3) for _ in range(2)))


@pytest.mark.parametrize("after", [2, 3])
def test_a_synchronous_beginning_is_plain_training(tmp_path: Path, after: int) -> None:
    local = replace_train(LOCAL, local_steps_after=after)
    plain = replace_train(LOCAL, local_batch=0)
    one, other = train(local, tmp_path, after, 3), train(plain, tmp_path, after, 1)
    assert all(torch.equal(one.parameters[name], other.parameters[name]) for name in one.parameters)
    found, other = train(local, tmp_path, after + 1, 3), train(replace_train(local, local_steps_after=after + 1), tmp_path, after + 1, 3)
    assert any(not torch.equal(found.parameters[name], other.parameters[name]) for name in found.parameters)
    assert {float(value) for name, value in found.optimizer_state.items() if name.endswith(".step")} == {1.0}, "the outer momentum is new"
    assert all(not value.any() for name, value in found.optimizer_state.items() if name.endswith(".exp_avg_sq"))


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_state_with_a_synchronous_beginning_is_no_other_runs(optimizer: str, bits: int) -> None:
    """Its first moments are the outer momentum later on: as moments of gradients they would ruin a run."""
    settings = {"optimizer": optimizer, "optimizer_bits": bits}
    local = replace_train(LOCAL, local_steps_after=2, **settings).train
    plain = replace_train(LOCAL, local_batch=0, **settings).train
    assert optimizer_parts(local) != optimizer_parts(plain)
    load = Load(num_parameters=1000, num_in_layers=900)
    assert optimizer_bytes(local, load) == optimizer_bytes(plain, load)


@pytest.mark.parametrize("bits", [32, 8])
def test_own_updates_go_on_with_the_moments_of_a_synchronous_beginning(tmp_path: Path, bits: int) -> None:
    """One copy that averages alone, and updates after a whole step's microbatches, goes on as plain training does."""
    plain = replace_train(LOCAL, local_batch=0, microbatches_per_step=2, accumulate="float64", optimizer_bits=bits)
    local = replace_train(plain, local_batch=2, local_steps_after=2, **PLAIN)
    found, expected = train(local, tmp_path, 5, 1), train(plain, tmp_path, 5, 1)
    assert all(torch.allclose(value, expected.parameters[name], atol=1e-6) for name, value in found.parameters.items())


def test_the_number_of_copies_changes_the_result(tmp_path: Path) -> None:
    one, other = (train(LOCAL, tmp_path, 1, num_replicas=number) for number in (2, 4))
    assert any(not torch.equal(one.parameters[name], other.parameters[name]) for name in one.parameters)


@pytest.mark.parametrize("num_replicas", [1, 3, 8, 11])
def test_every_microbatch_counts_once_whatever_the_copies_are(num_replicas: int) -> None:
    """With plain SGD inside, no decay, and updates at the end alone, the change is the mean gradient at the step's parameters."""
    manifest = tiny_manifest(
        1, microbatches_per_step=8, local_batch=8, optimizer="sgd", momentum=0.0, learning_rate=1.0, weight_decay=0.0, accumulate="float64"
    )
    stage = build_stage(manifest, 0, "cpu")
    counted: list[int] = []

    def backpropagate(stages: Sequence[StageModule], index: int) -> float:
        """A gradient that is the microbatch's number."""
        counted.append(index)
        for parameter in stages[0].parameters():
            parameter.grad = torch.full_like(parameter, float(index))
        return float(index)

    loss, (change,) = Replicas(manifest, [stage], num_replicas).mean_changes(5, backpropagate)
    assert counted == list(range(8))
    assert loss == 3.5
    for name, parameter in stage.named_parameters():
        assert torch.allclose(change[name], torch.full_like(parameter, 3.5, dtype=torch.float64), atol=1e-5)


@pytest.mark.parametrize("number", [0, MAX_REPLICAS + 1])
def test_a_number_of_copies_that_cannot_be_is_told(number: int) -> None:
    with pytest.raises(UsageError, match="--replicas"):
        ReferenceRequest(run_file="run.toml", steps=1, out="out", replicas=number)


def test_copies_of_a_run_without_local_steps_are_refused_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_bytes(real_text().read_bytes())
    plain, local = (write_run(tmp_path, manifest, "text.txt") for manifest in (tiny_manifest(2),)), LOCAL
    assert main(["peerd.reference", request(next(plain), tmp_path / "a", replicas=2)]) == ExitCode.USAGE
    assert "the run has no local steps" in capsys.readouterr().err
    run_file = write_run(tmp_path, local, "text.txt")
    assert main(["peerd.reference", request(run_file, tmp_path / "a", replicas=2)]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["steps"] == 2
