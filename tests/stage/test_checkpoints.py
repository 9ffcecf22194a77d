"""Checkpoints on disk: whole or absent, few, and never believed when damaged."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from peerd.stage.checkpoints import KEPT, CheckpointStore, scan_folder
from peerd.stage.disk_room import DiskRoom
from peerd.stage.history import HistoryEntry
from peerd.stage.snapshots import Downloaded
from peerd.stage.state_file import free_cache
from peerd.table.record import Lineage
from peerd.unwritten import UNWRITTEN
from tests.small_disk import fill, needs_root, set_read_only, small_disk


def state(step: int) -> Downloaded:
    tensors = {"parameters/a": torch.full((3, 2), float(step)), "optimizer/a.step": torch.tensor(float(step))}
    return Downloaded(step, Lineage(0, bytes([step]) * 16), tensors, (HistoryEntry(step=step - 1, loss=2.5, tokens=8),))


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    CheckpointStore(tmp_path, 2).save(1, state(5))
    store = CheckpointStore(tmp_path, 2)
    assert [(found.step, found.stage) for found in store.scan()] == [(5, 1)]
    loaded = store.load(1, 5)
    assert loaded is not None
    assert (loaded.step, loaded.lineage, loaded.history) == (5, state(5).lineage, state(5).history)
    assert {name: value.tolist() for name, value in loaded.tensors.items()} == {
        name: value.tolist() for name, value in state(5).tensors.items()
    }


def cached_bytes(path: Path) -> int:
    """How much of a file the system holds in memory."""
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages) == 0
        return mmap.PAGESIZE * sum(each & 1 for each in pages)


def test_a_checkpoint_that_was_written_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tmp_path / "plain"
    plain.write_bytes(bytes(8 << 20))
    sync(plain)
    plain_bytes = cached_bytes(plain)
    free_cache(plain)
    if plain_bytes == 0 or cached_bytes(plain) > 0:
        pytest.skip("this file system does not say what it holds in memory")
    monkeypatch.setattr("peerd.stage.state_file.BEHIND_BYTES", 1 << 20)
    store = CheckpointStore(tmp_path / "run", 2)
    large = {"parameters/a": torch.arange(1 << 21, dtype=torch.float32)}
    store.save(1, replace(state(5), tensors=large))
    [written] = (tmp_path / "run").glob("*.safetensors")
    free = cached_bytes(written)
    loaded = store.load(1, 5)
    assert loaded is not None
    assert torch.equal(loaded.tensors["parameters/a"], large["parameters/a"])
    assert free == 0


def sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def test_only_the_newest_are_kept_and_those_of_another_stage_go(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 2)
    store.save(0, state(1))
    for step in range(2, 9):
        store.save(1, state(step))
    assert [(found.stage, found.step) for found in store.scan()] == [(1, step) for step in range(9 - KEPT, 9)]


def test_where_the_owner_has_room_for_two_the_oldest_go_and_the_newest_stays_whatever_it_takes(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 2)
    for step in range(1, 5):
        store.save(1, state(step))
    one = store.scan()[0].path.stat().st_size
    for quota, left in ((2 * one, [4, 5]), (2 * one - 1, [6]), (1, [7]), (0, [7, 8])):
        store.room.quota_bytes = quota
        store.save(1, state(left[-1]))
        assert [found.step for found in store.scan()] == left


def test_a_step_that_was_gone_back_to_stays_beside_later_ones_that_may_be_damaged(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 2)
    for step in range(10, 10 + KEPT):
        store.save(1, state(step))
    store.scan()[-1].path.write_bytes(b"cut")
    store.room.quota_bytes = 1
    store.save(1, state(5))
    assert [found.step for found in store.scan()] == [5]


def test_the_limit_holds_while_one_is_written_and_counts_the_averages_and_the_draft(tmp_path: Path) -> None:
    folder, averages = tmp_path / "checkpoints", tmp_path / "averages"
    store = CheckpointStore(folder, 2, DiskRoom(folder, averages))
    store.save(1, state(1))
    one = store.scan()[0].path.stat().st_size
    averages.mkdir()
    (averages / "0.sum").write_bytes(bytes(one))
    store.room.quota_bytes = 4 * one
    for step in range(2, 7):
        largest = largest_while(lambda step=step: store.save(1, state(step)), folder, averages)  # type: ignore[misc]
        assert largest <= 4 * one
    assert [found.step for found in store.scan()] == [4, 5, 6]


def test_a_draft_that_a_killed_daemon_left_goes_with_the_next_checkpoint(tmp_path: Path) -> None:
    code = "import os, signal, sys; from pathlib import Path; from peerd.config.atomic import draft\n"
    code += "with draft(Path(sys.argv[1])) as path: path.write_bytes(bytes(5000)); os.kill(os.getpid(), signal.SIGKILL)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == 5000
    store = CheckpointStore(tmp_path, 2)
    store.save(1, state(1))
    assert list(tmp_path.iterdir()) == [store.scan()[0].path]


def largest_while(work: Callable[[], None], *folders: Path) -> int:
    """The most bytes that the files in the folders took at any write of `work`."""
    largest = 0

    def look(event: str, _arguments: object) -> None:
        nonlocal largest
        if is_looking and event in ("open", "os.rename", "os.remove"):
            largest = max(largest, sum(path.stat().st_size for folder in folders for path in folder.iterdir()))

    is_looking = True
    sys.addaudithook(look)
    try:
        work()
    finally:
        is_looking = False
    return largest


def test_a_damaged_or_cut_file_is_passed_over(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 2)
    for step in (5, 10, 15):
        store.save(0, state(step))
    flipped, cut, sound = (found.path for found in store.scan())
    raw = bytearray(flipped.read_bytes())
    raw[-1] ^= 1
    flipped.write_bytes(raw)
    cut.write_bytes(cut.read_bytes()[:-4])
    assert [found.path for found in store.scan()] == [sound]


def test_those_of_another_number_of_stages_are_not_this_runs(tmp_path: Path) -> None:
    CheckpointStore(tmp_path, 2).save(1, state(5))
    assert CheckpointStore(tmp_path, 4).scan() == []
    assert CheckpointStore(tmp_path, 4).load(1, 5) is None
    assert [(found.stage, found.num_stages) for found in scan_folder(tmp_path)] == [(1, 2)]


def test_foreign_files_and_an_absent_folder_are_no_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "notes.safetensors").write_bytes(b"x")
    (tmp_path / "1-two-three.safetensors").write_bytes(b"x")
    assert CheckpointStore(tmp_path, 2).scan() == []
    assert CheckpointStore(tmp_path / "absent", 2).scan() == []
    assert CheckpointStore(tmp_path / "absent", 2).load(0, 1) is None


def test_where_nothing_can_be_written_a_run_goes_on_without(tmp_path: Path) -> None:
    (tmp_path / "in the way").touch()
    CheckpointStore(tmp_path / "in the way", 2).save(0, state(5))
    assert CheckpointStore(tmp_path / "in the way", 2).scan() == []


@needs_root
def test_on_a_full_disk_the_oldest_make_room_and_the_newest_stays(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", kilobytes=64) as disk:
        store = CheckpointStore(disk / "run", 2)
        for step in (1, 2, 3):
            store.save(1, state(step))
        assert [found.step for found in store.scan()] == [1, 2, 3]
        ballast = fill(disk)
        store.save(1, state(4))
        assert [found.step for found in store.scan()] == [2, 3, 4]
        assert "checkpoints" not in UNWRITTEN
        large = replace(state(5), tensors={"parameters/a": torch.zeros(10_000)})
        store.save(1, large)
        assert [found.step for found in store.scan()] == [4]
        assert "the disk is full" in UNWRITTEN.errors()["checkpoints"].message
        ballast.unlink()
        store.save(1, large)
        assert [found.step for found in store.scan()] == [4, 5]
        assert "checkpoints" not in UNWRITTEN
        set_read_only(disk, yes=True)
        store.save(1, state(6))
        assert "the disk is read-only" in UNWRITTEN.errors()["checkpoints"].message
        set_read_only(disk, yes=False)
        store.save(1, state(6))
        assert "checkpoints" not in UNWRITTEN
