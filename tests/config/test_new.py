"""What `peerd new` writes is a run that starts."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from peerd.cli.main import run
from peerd.config import manifest
from peerd.config.organiser import load_key, public_bytes


def test_new_writes_the_run_its_flags_describe_and_prints_its_id(tmp_path: Path) -> None:
    folder = tmp_path / "my run!"
    assert run(["new", str(folder), "--stages", "3", "--d-model", "64", "--steps", "7", "--accumulate", "float64"]) == 0
    made = manifest.load(folder / "run.toml")
    assert made.name == "myrun"
    assert (made.train.num_stages, made.model.num_layers, made.model.d_model, made.model.d_ff) == (3, 4, 64, 256)
    assert (made.train.steps, made.train.accumulate) == (7, "float64")
    assert stat.S_IMODE((folder / "organiser.key").stat().st_mode) == 0o600


def test_force_overwrites_the_run_and_keeps_the_key(tmp_path: Path) -> None:
    assert run(["new", str(tmp_path), "--name", "a"]) == 0
    key = public_bytes(load_key(tmp_path / "organiser.key"))
    assert run(["new", str(tmp_path), "--name", "b"]) == 2
    assert run(["new", str(tmp_path), "--name", "b", "--force"]) == 0
    assert manifest.load(tmp_path / "run.toml").name == "b"
    assert public_bytes(load_key(tmp_path / "organiser.key")) == key


def test_every_line_of_a_new_run_file_fits_a_terminal(tmp_path: Path) -> None:
    assert run(["new", str(tmp_path), "--name", "a"]) == 0
    text = (tmp_path / "run.toml").read_text()
    assert max(map(len, text.splitlines())) <= 130
    assert json.loads(manifest.load(tmp_path / "run.toml").canonical_bytes())["name"] == "a"


def test_new_says_what_each_stage_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["new", str(tmp_path / "a"), "--stages", "4", "--layers", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["stage", "layers", "parameters", "memory", "tokens/s", "upload", "averaging"]
    assert [line.split()[:2] for line in lines[2:5]] == [["0", "0-1"], ["1-2", "2-5"], ["3", "6-7"]]
    assert max(map(len, lines[1:6])) <= 80
    assert run(["new", str(tmp_path / "b"), "--json"]) == 0
    stages = json.loads(capsys.readouterr().out)["stages"]
    assert [(stage["first_layer"], stage["num_layers"]) for stage in stages] == [(0, 2), (2, 2)]
    assert all(stage["memory_bytes"] > stage["parameter_bytes"] + stage["optimizer_bytes"] for stage in stages)


def test_a_small_device_gets_small_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["new", str(tmp_path / "a"), "--layers", "8", "--device-memory", "30MB"]) == 0
    made = manifest.load(tmp_path / "a" / "run.toml")
    assert made.train.num_stages > 2
    assert run(["new", str(tmp_path / "b"), "--layers", "8", "--device-memory", "1GB"]) == 0
    assert manifest.load(tmp_path / "b" / "run.toml").train.num_stages == 1
    capsys.readouterr()
    assert run(["new", str(tmp_path / "c"), "--layers", "8", "--stages", "2", "--device-memory", "10MB"]) == 3
    assert "no cut of the model fits devices of 0.01 GB" in capsys.readouterr().err
    assert run(["new", str(tmp_path / "d"), "--device-memory", "lots"]) == 2
