"""The reference trains on one machine: it learns, and neither split nor repetition changes the result."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from peerd.child import main
from peerd.config import manifest as manifest_files
from peerd.config.manifest import Manifest
from peerd.errors import ExitCode
from peerd.reference import ReferenceResult, train_reference
from tests.tiny_run import corpus_of, real_text, replace_train, tiny_manifest


def train(manifest: Manifest, cache: Path, steps: int) -> ReferenceResult:
    return train_reference(manifest, corpus_of(manifest, cache), steps)


def assert_same_bits(left: ReferenceResult, right: ReferenceResult) -> None:
    assert left.history == right.history
    for ours, theirs in ((left.parameters, right.parameters), (left.optimizer_state, right.optimizer_state)):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def write_run(folder: Path, manifest: Manifest, source: str) -> Path:
    data = dataclasses.replace(manifest.data, source=source)
    path = folder / "run.toml"
    path.write_text(manifest_files.dump(dataclasses.replace(manifest, data=data)))
    return path


def request(run_file: Path, out: Path, /, **changes: Any) -> str:
    return json.dumps({"run_file": str(run_file), "steps": 2, "out": str(out)} | changes)


def test_the_loss_falls_on_real_text(tmp_path: Path) -> None:
    manifest = tiny_manifest(2, microbatches_per_step=4, microbatch_size=4, sequence_length=32, learning_rate=0.01)
    history = train(manifest, tmp_path, 20).history
    assert [entry.step for entry in history] == list(range(20))
    assert {entry.tokens for entry in history} == {4 * 4 * 32}
    assert history[-1].loss < 0.75 * history[0].loss


def test_evaluations_are_of_exact_steps_whatever_the_split_and_change_nothing(tmp_path: Path) -> None:
    whole, split = (train(tiny_manifest(stages, 0.1, evaluate_every_steps=2, steps=3), tmp_path, 3) for stages in (1, 2))
    assert [each.step for each in whole.evaluations] == [0, 2, 3]
    assert whole.evaluations == split.evaluations
    assert whole.evaluations[-1].loss < whole.evaluations[0].loss
    unwatched = train(tiny_manifest(2, 0.1), tmp_path, 3)
    assert unwatched.evaluations == []
    assert_same_bits(unwatched, split)


@pytest.mark.parametrize("accumulate", ["float32", "float64"])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_the_split_changes_no_bit_of_a_run(tmp_path: Path, num_stages: int, accumulate: str) -> None:
    whole = train(tiny_manifest(1, accumulate=accumulate), tmp_path, 3)
    assert_same_bits(train(tiny_manifest(num_stages, accumulate=accumulate), tmp_path, 3), whole)
    assert set(whole.optimizer_state) == {f"{name}.{part}" for name in whole.parameters for part in ("exp_avg", "exp_avg_sq", "step")}


def test_a_run_repeated_is_the_same_run(tmp_path: Path) -> None:
    assert_same_bits(train(tiny_manifest(2), tmp_path, 2), train(tiny_manifest(2), tmp_path, 2))


def test_a_longer_run_begins_with_the_shorter_one(tmp_path: Path) -> None:
    assert train(tiny_manifest(2), tmp_path, 3).history[:2] == train(tiny_manifest(2), tmp_path, 2).history


def test_both_precisions_of_accumulation_agree_closely(tmp_path: Path) -> None:
    """Losses agree within 1e-4, the tolerance for a swarm that accumulates in float32, but not to the bit: float64 has an effect."""
    single, double = (train(tiny_manifest(2, accumulate=precision), tmp_path, 4) for precision in ("float32", "float64"))
    for left, right in zip(single.history, double.history, strict=True):
        assert left.loss == pytest.approx(right.loss, abs=1e-4)
    moments = [name for name in single.optimizer_state if name.endswith("exp_avg")]
    assert any(not torch.equal(single.optimizer_state[name], double.optimizer_state[name]) for name in moments)


def test_the_command_writes_an_export_and_one_line_of_json(tmp_path: Path) -> None:
    run_file = write_run(tmp_path, tiny_manifest(2), "text.txt")
    (tmp_path / "text.txt").write_bytes(real_text().read_bytes())
    done = subprocess.run(
        [sys.executable, "-m", "peerd.child", "peerd.reference", request(run_file, tmp_path / "out")],
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    summary = json.loads(done.stdout)
    assert summary.keys() == {"schema", "steps", "loss_first", "loss_last", "tokens_per_second"}
    assert (summary["schema"], summary["steps"]) == (1, 2)
    assert [line.split()[:2] for line in done.stderr.splitlines()] == [["step", "1"], ["step", "2"]]
    written = manifest_files.load(tmp_path / "out" / "run.toml")
    expected = train(written, tmp_path / "cache", 2)
    assert summary["loss_last"] == expected.history[-1].loss
    read = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(read[name], expected.parameters[name]) for name in expected.parameters)
    assert len(list((tmp_path / "out").iterdir())) == 4


def test_an_export_can_be_trained_again_from_its_own_run_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_bytes(real_text().read_bytes())
    run_file = write_run(tmp_path, tiny_manifest(2), "text.txt")
    assert main(["peerd.reference", request(run_file, tmp_path / "a")]) == ExitCode.OK
    assert main(["peerd.reference", request(tmp_path / "a" / "run.toml", tmp_path / "b")]) == ExitCode.OK
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first["loss_last"] == second["loss_last"]
    (tmp_path / "other.txt").write_text("quite another text " * 10)
    wrong_data = request(tmp_path / "a" / "run.toml", tmp_path / "c", data=str(tmp_path / "other.txt"))
    assert main(["peerd.reference", wrong_data]) == ExitCode.MANIFEST
    assert capsys.readouterr().err.startswith("peerd: error: this machine's data has blake3 ")


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        ({"steps": 0}, ExitCode.USAGE, "--steps is 0; ask for at least 1"),
        ({"steps": -3}, ExitCode.USAGE, "--steps is -3"),
        ({"steps": "many"}, ExitCode.USAGE, "not a request: steps"),
        ({"run_file": "/nonexistent/run.toml"}, ExitCode.MANIFEST, "no such file"),
        ({"data": "/nonexistent/text"}, ExitCode.MANIFEST, "no such file or folder"),
        ({"out": "/dev/null/out"}, ExitCode.DISK, "check the folder"),
    ],
)
def test_what_cannot_work_is_one_line_and_an_exit_code(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    code: ExitCode,
    says: str,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run_file = write_run(tmp_path, replace_train(tiny_manifest(), sequence_length=64), str(real_text()))
    assert main(["peerd.reference", request(run_file, tmp_path / "out", **changes)]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("peerd: error: ")
    assert err.count("\n") == 1
    assert says in err


def test_an_argument_that_is_no_json_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["peerd.reference", "{"]) == ExitCode.USAGE
    assert main(["peerd.reference"]) == ExitCode.USAGE
    assert capsys.readouterr().err.count("peerd: error: ") == 2
