"""An export is four files that other tools can read, and nothing else."""

from __future__ import annotations

import errno
import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from peerd.config import manifest as manifest_files
from peerd.errors import DiskError, disk_error
from peerd.stage.export import write_export
from peerd.stage.history import HistoryEntry
from tests.tiny_run import tiny_manifest

PARAMETERS = {"head.weight": torch.arange(6.0).view(2, 3), "final_norm.bias": torch.ones(3)}
STATE = {"head.weight.exp_avg": torch.full((2, 3), 0.5), "head.weight.step": torch.tensor(2.0)}
HISTORY = [HistoryEntry(step=0, loss=5.5, tokens=96), HistoryEntry(step=1, loss=5.25, tokens=96)]
FILES = ["history.jsonl", "model.safetensors", "optimizer.safetensors", "run.toml"]


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Make writes past `num_bytes` fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_was_written_can_be_read_back(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "out"
    write_export(folder, tiny_manifest(2), PARAMETERS, STATE, HISTORY)
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert manifest_files.load(folder / "run.toml") == tiny_manifest(2)
    for name, written in (("model", PARAMETERS), ("optimizer", STATE)):
        read = load_file(folder / f"{name}.safetensors")
        assert read.keys() == written.keys()
        assert all(torch.equal(read[key], written[key]) for key in written)
    lines = (folder / "history.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 0, "loss": 5.5, "tokens": 96},
        {"step": 1, "loss": 5.25, "tokens": 96},
    ]


def test_the_tensors_carry_the_number_of_updates(tmp_path: Path) -> None:
    write_export(tmp_path, tiny_manifest(), PARAMETERS, STATE, HISTORY)
    for name in ("model", "optimizer"):
        with safe_open(tmp_path / f"{name}.safetensors", "pt") as opened:
            assert opened.metadata() == {"format": "pt", "step": "2"}


def test_transposed_and_differentiable_tensors_are_written_as_they_look(tmp_path: Path) -> None:
    weight = torch.arange(6.0).view(2, 3).t().requires_grad_()
    write_export(tmp_path, tiny_manifest(), {"weight": weight}, {}, [])
    assert load_file(tmp_path / "model.safetensors")["weight"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


def test_an_export_replaces_an_earlier_one_and_everyone_may_read_it(tmp_path: Path) -> None:
    write_export(tmp_path, tiny_manifest(), {}, {}, [])
    write_export(tmp_path, tiny_manifest(), PARAMETERS, STATE, HISTORY)
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES
    assert load_file(tmp_path / "model.safetensors").keys() == PARAMETERS.keys()
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1


def test_a_disk_that_fills_up_leaves_the_earlier_file_whole_and_nothing_half_written(tmp_path: Path) -> None:
    write_export(tmp_path, tiny_manifest(), PARAMETERS, STATE, HISTORY)
    with largest_file(4096), pytest.raises(DiskError, match="file grew past the size limit"):
        write_export(tmp_path, tiny_manifest(), {"weight": torch.zeros(10_000)}, STATE, HISTORY)
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES
    assert load_file(tmp_path / "model.safetensors").keys() == PARAMETERS.keys()


def test_a_folder_that_cannot_be_made_is_a_disk_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DiskError, match="check the folder"):
        write_export(tmp_path / "file" / "out", tiny_manifest(), PARAMETERS, STATE, HISTORY)


def test_a_full_disk_says_so(tmp_path: Path) -> None:
    assert "the disk is full; free some space" in str(disk_error(tmp_path, OSError(errno.ENOSPC, "No space left on device")))
