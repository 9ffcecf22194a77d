"""Gathering a run's state from an export or from peers' checkpoints, and continuing with another number of stages."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from peerd.child import main
from peerd.cli.new import recut
from peerd.config import manifest as manifest_files
from peerd.config.manifest import Manifest, StartConfig
from peerd.config.organiser import create_key
from peerd.config.paths import Home
from peerd.errors import ManifestError, UsageError
from peerd.models.stages import initial_parameter_spec
from peerd.reference import train_reference
from peerd.repartition import gather
from peerd.stage.checkpoints import CheckpointStore
from peerd.stage.export import write_export
from peerd.stage.snapshots import Downloaded
from peerd.stage.start import StartState, write_start
from peerd.swarm.identity import LocalState
from peerd.swarm.signed import pack, sign_manifest
from peerd.table.record import Lineage
from tests.tiny_run import corpus_of, tiny_manifest

EXACT = Lineage(0, b"a")


class Homes:
    """Homes of peers of one run, with checkpoints of a real training."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self.signed = sign_manifest(manifest, create_key(folder / "organiser.key"))

    def home(self, name: str) -> Home:
        home = Home(self.folder / name)
        home.folder.mkdir(exist_ok=True)
        LocalState(home).remember(self.signed.run, pack(self.signed), 0)
        return home

    def save(self, name: str, stage: int, step: int, lineage: Lineage = EXACT, shift: float = 0.0) -> Path:
        """Write one checkpoint to a home: the stage's part of the model after `step` steps, with `shift` added to all values."""
        home = self.home(name)
        trained = train_reference(self.manifest, corpus_of(self.manifest, self.folder / "cache"), step)
        names = initial_parameter_spec(self.manifest, stage)
        tensors: dict[str, Tensor] = {f"parameters/{key}": trained.parameters[key] + shift for key in names}
        tensors |= {f"optimizer/{key}": value for key, value in trained.optimizer_state.items() if key.rpartition(".")[0] in names}
        history = tuple(trained.history) if stage == self.manifest.train.num_stages - 1 else ()
        store = CheckpointStore(home.checkpoints(self.signed.run), self.manifest.train.num_stages)
        store.save(stage, Downloaded(step, lineage, tensors, history))
        return home.folder


@pytest.fixture
def homes(tmp_path: Path) -> Homes:
    return Homes(tmp_path, tiny_manifest(2))


def test_a_run_goes_on_with_other_bits_of_its_moments(tmp_path: Path) -> None:
    """Packed moments come back as they were; the others are rounded once."""
    manifest, packed = tiny_manifest(2), tiny_manifest(3, optimizer_bits=8)
    corpus, paths = corpus_of(manifest, tmp_path), [tmp_path / f"{bits}.safetensors" for bits in (32, 8)]
    for path, run in zip(paths, (manifest, packed), strict=True):
        begun = train_reference(run, corpus, 2)
        write_start(path, 2, begun.parameters, begun.optimizer_state, begun.history)
    for path, run in zip(paths, (packed, manifest), strict=True):
        start = StartState(path)
        found = train_reference(start.agree(dataclasses.replace(run, start=StartConfig(state=str(path)))), corpus, 6, start=start)
        expected = train_reference(run, corpus, 6)
        assert found.optimizer_state.keys() == expected.optimizer_state.keys()
        assert [entry.loss for entry in found.history] == pytest.approx([entry.loss for entry in expected.history], abs=0.02)


@pytest.mark.parametrize("num_stages", [2, 4])
def test_a_run_with_tied_embeddings_goes_on_in_any_number_of_stages(tmp_path: Path, num_stages: int) -> None:
    """Also in one stage, where a microbatch's two gradients of the weight are summed in float32, not separately."""
    manifests = [tiny_manifest(number, accumulate="float64") for number in (3, num_stages, 1)]
    manifest, other, alone = (dataclasses.replace(m, model=dataclasses.replace(m.decoder, tie_word_embeddings=True)) for m in manifests)
    corpus = corpus_of(manifest, tmp_path)
    begun = train_reference(manifest, corpus, 1)
    path = tmp_path / "start.safetensors"
    write_start(path, 1, begun.parameters, begun.optimizer_state, begun.history)
    start, expected = StartState(path), train_reference(manifest, corpus, 2)
    found, in_one = (
        train_reference(start.agree(dataclasses.replace(each, start=StartConfig(state=str(path)))), corpus, 2, start=start)
        for each in (other, alone)
    )
    assert found.parameters.keys() == in_one.parameters.keys() == expected.parameters.keys()
    assert all(torch.equal(found.parameters[name], value) for name, value in expected.parameters.items())
    assert all(torch.allclose(in_one.parameters[name], value, atol=1e-6) for name, value in expected.parameters.items())


@pytest.mark.parametrize("num_stages", [1, 2, 4, 5])
@pytest.mark.parametrize(
    "train", [{"accumulate": "float32"}, {"accumulate": "float64"}, {"optimizer": "muon"}, {"optimizer_bits": 8}], ids=str
)
def test_a_run_goes_on_in_any_number_of_stages_as_if_it_had_not_stopped(tmp_path: Path, num_stages: int, train: dict[str, Any]) -> None:
    manifest = tiny_manifest(2, **train)
    corpus = corpus_of(manifest, tmp_path)
    begun = train_reference(manifest, corpus, 2)
    path = tmp_path / "start.safetensors"
    write_start(path, 2, begun.parameters, begun.optimizer_state, begun.history)
    other = dataclasses.replace(tiny_manifest(num_stages, **train), start=StartConfig(state=str(path)))
    start = StartState(path)
    found, expected = train_reference(start.agree(other), corpus, 4, start=start), train_reference(manifest, corpus, 4)
    assert found.history == expected.history
    for ours, theirs in ((found.parameters, expected.parameters), (found.optimizer_state, expected.optimizer_state)):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_newest_step_that_the_homes_hold_whole_is_taken(homes: Homes) -> None:
    sources = [homes.save("a", 0, 1), homes.save("a", 0, 2), homes.save("b", 1, 1), homes.save("b", 1, 2), homes.save("c", 0, 3)]
    reached = gather(sorted(set(sources)))
    expected = train_reference(homes.manifest, corpus_of(homes.manifest, homes.folder / "cache"), 2)
    assert (reached.step, list(reached.history)) == (2, expected.history)
    assert reached.manifest == homes.manifest
    for ours, theirs in ((reached.parameters, expected.parameters), (reached.optimizer, expected.optimizer_state)):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_run_that_diverged_goes_on_from_before_that_step(homes: Homes, tmp_path: Path) -> None:
    sources = [[homes.save("a", 0, step), homes.save("b", 1, step)] for step in (1, 2)][-1]
    assert [gather(sources, before).step for before in (None, 3, 2)] == [2, 2, 1]
    with pytest.raises(ManifestError, match="no step of the whole model before 1"):
        gather(sources, 1)


def test_of_two_checkpoints_of_one_place_the_better_lineage_is_taken(homes: Homes) -> None:
    exact, given_up = Lineage(0, b"z"), Lineage(1, b"a")
    homes.save("b", 1, 1)
    homes.save("bad", 0, 1, given_up, shift=1.0)
    homes.save("good", 0, 1, exact)
    reached = gather([homes.folder / name for name in ("bad", "b", "good")])
    expected = train_reference(homes.manifest, corpus_of(homes.manifest, homes.folder / "cache"), 1)
    assert all(torch.equal(reached.parameters[name], value) for name, value in expected.parameters.items())
    assert reached.inexact_steps == 0


def test_a_damaged_checkpoint_is_passed_over(homes: Homes) -> None:
    for step in (1, 2):
        homes.save("a", 0, step)
        homes.save("b", 1, step)
    newest = CheckpointStore(homes.home("b").checkpoints(homes.signed.run), 2).scan()[-1].path
    newest.write_bytes(newest.read_bytes()[:-3])
    assert gather([homes.folder / "a", homes.folder / "b"]).step == 1


def test_homes_that_lack_a_stage_say_what_they_hold(homes: Homes) -> None:
    with pytest.raises(ManifestError, match="stage 0 of 2 at step 1"):
        gather([homes.save("a", 0, 1)])
    with pytest.raises(ManifestError, match="found: none"):
        gather([homes.home("empty").folder])


def test_an_export_is_read_whole(tmp_path: Path) -> None:
    manifest = tiny_manifest(2)
    trained = train_reference(manifest, corpus_of(manifest, tmp_path), 2)
    folder = tmp_path / "exported"
    folder.mkdir()
    write_export(folder, manifest, trained.parameters, trained.optimizer_state, trained.history)
    reached = gather([folder])
    assert (reached.step, list(reached.history), reached.manifest) == (2, trained.history, manifest)
    assert all(torch.equal(reached.optimizer[name], value) for name, value in trained.optimizer_state.items())
    (folder / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ManifestError, match="not an exported model"):
        gather([folder])


def test_odd_sources_are_one_clear_error(homes: Homes, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Homes(tmp_path / "other", dataclasses.replace(tiny_manifest(2), name="other"))
    with pytest.raises(UsageError, match="neither an exported run nor a peer's home"):
        gather([tmp_path / "nothing"])
    with pytest.raises(UsageError, match="last in run"):
        gather([homes.home("a").folder, other.home("b").folder])


def test_the_command_prints_one_json_object_or_one_line(homes: Homes, capsys: pytest.CaptureFixture[str]) -> None:
    sources = [str(homes.save("a", 0, 1)), str(homes.save("b", 1, 1))]
    out = homes.folder / "start.safetensors"
    assert main(["peerd.repartition", json.dumps({"sources": sources, "out": str(out)})]) == 0
    reply = json.loads(capsys.readouterr().out)
    assert (reply["step"], reply["optimizer"], reply["manifest"]["train"]["num_stages"]) == (1, True, 2)
    assert StartState(out).step == 1
    assert main(["peerd.repartition", json.dumps({"sources": sources[:1], "out": str(out)})]) == ManifestError.exit_code
    assert capsys.readouterr().err.startswith("peerd: error: the checkpoints hold no step")
    assert main(["peerd.repartition", "{}"]) == UsageError.exit_code


def test_a_narrow_model_takes_its_narrow_places_along(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With other stages the model is narrow where it was, and cut only there."""
    tiny = tiny_manifest(3)
    narrow = dataclasses.replace(tiny, model=dataclasses.replace(tiny.decoder, boundary="maxout"))
    trained = train_reference(narrow, corpus_of(narrow, tmp_path), 1)
    folder = tmp_path / "exported"
    folder.mkdir()
    write_export(folder, narrow, trained.parameters, trained.optimizer_state, trained.history)
    assert main(["peerd.repartition", json.dumps({"sources": [str(folder)], "out": str(tmp_path / "start.safetensors")})]) == 0
    document = json.loads(capsys.readouterr().out)["manifest"]
    earlier = manifest_files.parse(document, "test")
    assert earlier.model.boundary_layers == (2, 4)
    assert recut(earlier, {"steps": 9}) == {"steps": 9}
    assert recut(earlier, {"num_stages": 2}) == {"num_stages": 2, "cut": "cost"}
    assert recut(tiny, {"num_stages": 2}) == {"num_stages": 2}
    fewer = dataclasses.replace(earlier, train=dataclasses.replace(earlier.train, **recut(earlier, {"num_stages": 2})))
    assert set(initial_parameter_spec(fewer, 0)) | set(initial_parameter_spec(fewer, 1)) == set(trained.parameters)
    with pytest.raises(ValueError, match="before layers 2, 4 only, so into at most 3 stages"):
        dataclasses.replace(earlier, train=dataclasses.replace(earlier.train, **recut(earlier, {"num_stages": 4})))
