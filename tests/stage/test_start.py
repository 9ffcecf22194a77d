"""The state a run begins from: by parameter name, so it fits any number of stages, and no other model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from peerd.config.manifest import Manifest, ModelConfig, StartConfig
from peerd.errors import ManifestError
from peerd.models.stages import initial_parameter_spec
from peerd.stage.history import HistoryEntry
from peerd.stage.optimizer import optimizer_parts, optimizer_spec
from peerd.stage.start import StartState, start_lineage, write_start
from tests.tiny_run import tiny_manifest

HISTORY = tuple(HistoryEntry(step=step, loss=2.0 - step, tokens=8) for step in range(3))


def whole_model(manifest: Manifest) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Some parameters and an optimizer's state for them."""
    shapes = {name: shape for stage in range(manifest.train.num_stages) for name, shape in initial_parameter_spec(manifest, stage).items()}
    generator = torch.Generator().manual_seed(1)
    return (
        {name: torch.rand(shape, generator=generator) for name, shape in shapes.items()},
        {name: torch.rand(value.shape, generator=generator) for name, value in optimizer_spec(manifest.train, shapes).items()},
    )


def beginning_at(path: Path, manifest: Manifest) -> Manifest:
    return dataclasses.replace(manifest, start=StartConfig(state=str(path)))


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
def test_the_stages_of_any_split_hold_the_whole_state_between_them(tmp_path: Path, num_stages: int) -> None:
    parameters, optimizer = whole_model(tiny_manifest(2))
    path = tmp_path / "start.safetensors"
    write_start(path, 3, parameters, optimizer, HISTORY)
    start = StartState(path)
    manifest = start.agree(beginning_at(path, tiny_manifest(num_stages)))
    assert (manifest.start.step, manifest.start.blake3) == (3, start.digest())
    parts = [start.of_stage(manifest, stage) for stage in range(num_stages)]
    assert {(part.step, part.lineage, part.history) for part in parts} == {(3, start_lineage(manifest), HISTORY)}
    expected = {f"parameters/{name}": value for name, value in parameters.items()}
    expected |= {f"optimizer/{name}": value for name, value in optimizer.items()}
    assert sum(len(part.tensors) for part in parts) == len(expected), "no tensor belongs to two stages"
    joined = {name: value for part in parts for name, value in part.tensors.items()}
    assert all(torch.equal(joined[name], value) for name, value in expected.items())


@pytest.mark.parametrize(("kind", "goes_on"), [("adamw", True), ("lamb", True), ("sgd", False), ("muon", False)])
def test_the_state_of_another_optimizer_is_left_out(tmp_path: Path, kind: str, goes_on: bool) -> None:
    """LAMB keeps the same averages as AdamW; SGD and Muon begin anew."""
    manifest = tiny_manifest(2)
    path = tmp_path / "start.safetensors"
    write_start(path, 3, *whole_model(manifest), HISTORY)
    start, other = StartState(path), beginning_at(path, tiny_manifest(2, optimizer=kind))
    part = start.of_stage(start.agree(other), 1)
    moments = {name: value for name, value in part.tensors.items() if name.startswith("optimizer/")}
    assert any(bool(value.any()) for value in moments.values()) == goes_on
    assert {name.rpartition(".")[2] for name in moments} == optimizer_parts(other.train)


@pytest.mark.parametrize("is_local", [True, False])
def test_the_velocity_of_gradients_is_no_outer_momentum_nor_the_other_way_round(tmp_path: Path, is_local: bool) -> None:
    with_gradients = tiny_manifest(2, optimizer="sgd", momentum=0.9)
    with_local_steps = tiny_manifest(2, local_batch=2, outer_momentum=0.9)
    before, after = (with_gradients, with_local_steps) if is_local else (with_local_steps, with_gradients)
    path = tmp_path / "start.safetensors"
    write_start(path, 3, *whole_model(before), HISTORY)
    part = StartState(path).of_stage(StartState(path).agree(beginning_at(path, after)), 1)
    moments = {name: value for name, value in part.tensors.items() if name.startswith("optimizer/")}
    assert {name.rpartition(".")[2] for name in moments} == optimizer_parts(after.train)
    assert not any(value.any() for value in moments.values())


def test_without_an_optimizers_state_its_averages_begin_at_zero(tmp_path: Path) -> None:
    manifest = tiny_manifest(2)
    parameters, optimizer = whole_model(manifest)
    path = tmp_path / "start.safetensors"
    write_start(path, 0, parameters, {}, ())
    part = StartState(path).of_stage(StartState(path).agree(beginning_at(path, manifest)), 1)
    zeros = {name: value for name, value in part.tensors.items() if name.startswith("optimizer/")}
    assert 0 < len(zeros) < len(optimizer)
    assert not any(value.any() for value in zeros.values())


def test_another_models_state_is_refused_by_the_name_that_does_not_fit(tmp_path: Path) -> None:
    manifest = tiny_manifest(2)
    path = tmp_path / "start.safetensors"
    write_start(path, 3, *whole_model(manifest), HISTORY)
    wider = dataclasses.replace(manifest, model=ModelConfig(num_layers=5, d_model=32, num_heads=2, d_ff=52))
    deeper = dataclasses.replace(manifest, model=dataclasses.replace(manifest.decoder, num_layers=6))
    for other, reason in ((wider, "has the shape"), (deeper, "is missing")):
        with pytest.raises(ManifestError, match=reason):
            StartState(path).agree(beginning_at(path, other))


def test_a_state_that_changed_since_the_run_began_is_refused(tmp_path: Path) -> None:
    manifest = tiny_manifest(2)
    path = tmp_path / "start.safetensors"
    parameters, optimizer = whole_model(manifest)
    write_start(path, 3, parameters, optimizer, HISTORY)
    begun = StartState(path).agree(beginning_at(path, manifest))
    assert StartState(path).agree(begun) == begun
    write_start(path, 3, {name: value + 1 for name, value in parameters.items()}, optimizer, HISTORY)
    with pytest.raises(ManifestError, match="its hash differs"):
        StartState(path).agree(begun)


def test_a_run_whose_end_is_reached_already_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "start.safetensors"
    write_start(path, 3, *whole_model(tiny_manifest(2)), HISTORY)
    assert StartState(path).agree(beginning_at(path, tiny_manifest(2, steps=4))).start.step == 3
    with pytest.raises(ManifestError, match="ends at step 3"):
        StartState(path).agree(beginning_at(path, tiny_manifest(2, steps=3)))


@pytest.mark.parametrize("content", [None, b"", b"no tensors at all", b"\x08\0\0\0\0\0\0\0{}      "])
def test_what_is_no_such_file_is_one_clear_error(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "start.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ManifestError) as caught:
        StartState(path)
    assert str(path) in caught.value.message
    assert "peerd new --from" in caught.value.remedy
