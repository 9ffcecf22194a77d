"""What `peerd new` writes is a run that starts."""

from __future__ import annotations

import json
import stat
from pathlib import Path

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
