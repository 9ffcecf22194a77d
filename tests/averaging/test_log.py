"""Kept averages take no more of the disk than the owner's limit leaves beside the checkpoints."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from structlog.testing import capture_logs

from peerd.averaging.handover import packed
from peerd.averaging.log import AverageLog
from peerd.policy.step.roster import Roster
from peerd.stage.disk_room import DiskRoom
from peerd.stage.results import HeldAverage, TiedGradients
from peerd.table.record import AverageId, Lineage, PeerId

LENGTH = 100
NUM_KEPT = 4
ONE_BYTES = 8 * LENGTH


def average(step: int) -> HeldAverage:
    return HeldAverage(Roster(0, step, 0, PeerId("a"), ()), Lineage(), torch.full((LENGTH,), float(step), dtype=torch.float64))


def kept(log: AverageLog) -> list[int]:
    return [step for step in range(20) if log.get(step) is not None]


def test_all_who_ask_for_a_kept_average_share_one_copy_which_outlives_its_file(tmp_path: Path) -> None:
    log = AverageLog(tmp_path / "averages", torch.float64)
    for step in range(NUM_KEPT):
        assert log.put(average(step))
    first, second = log.get(0), log.get(0)
    assert first is not None
    assert second is not None
    assert first.flat_sum.data_ptr() == second.flat_sum.data_ptr()
    assert log.put(average(NUM_KEPT))
    assert log.get(0) is None
    assert torch.equal(second.flat_sum, average(0).flat_sum)


def test_a_kept_average_travels_from_its_file_which_may_go_meanwhile(tmp_path: Path) -> None:
    log = AverageLog(tmp_path / "averages", torch.float64)
    large = replace(average(0), flat_sum=torch.arange(300_000, dtype=torch.float64))
    assert log.put(replace(large, norm=0.5, tied=TiedGradients(AverageId(b"t" * 32), torch.ones(3, dtype=torch.float64))))
    in_memory, stored = log.get(0), log.stored(0)
    assert in_memory is not None
    assert stored is not None
    shutil.rmtree(tmp_path / "averages")
    expected, file = packed(in_memory)
    assert stored[0] == expected
    assert len(file) > 1
    assert stored[1].hashes() == file.hashes()
    assert all(stored[1].chunk(number) == file.chunk(number) for number in range(len(file)))
    assert log.stored(0) is None
    assert log.steps == frozenset()


def test_as_many_averages_are_kept_as_fit_beside_the_checkpoints(tmp_path: Path) -> None:
    checkpoints, folder = tmp_path / "checkpoints", tmp_path / "averages"
    checkpoints.mkdir()
    room = DiskRoom(checkpoints, folder)
    log = AverageLog(folder, torch.float64, room)
    assert [log.put(average(step)) for step in range(6)] == [True] * 6
    assert kept(log) == [2, 3, 4, 5]
    assert len(kept(log)) == NUM_KEPT
    (checkpoints / "one").write_bytes(bytes(10 * ONE_BYTES))
    room.quota_bytes = 12 * ONE_BYTES
    assert log.put(average(6))
    assert kept(log) == [5, 6]
    with room.writing(ONE_BYTES):
        assert log.put(average(7))
        assert kept(log) == [7]
    with room.writing(2 * ONE_BYTES):
        assert not log.put(average(8))
    assert (kept(log), list(folder.iterdir())) == ([], [])


def test_all_averages_that_a_joiner_needs_are_kept_and_go_once_it_needs_them_no_more(tmp_path: Path) -> None:
    log = AverageLog(tmp_path / "averages", torch.float64)
    for step in range(12):
        assert log.put(average(step), needed_from=2)
    assert kept(log) == [*range(2, 12)]
    assert log.steps == frozenset(range(2, 12))
    assert log.put(average(12))
    assert kept(log) == [9, 10, 11, 12]
    assert log.put(average(13), is_alone=True)
    assert (kept(log), len(list((tmp_path / "averages").iterdir()))) == ([13], 1)


def test_a_sum_that_was_written_before_its_step_was_committed_is_not_written_again(tmp_path: Path) -> None:
    folder = tmp_path / "averages"
    log, first, tied = AverageLog(folder, torch.float64), average(0), torch.ones(3, dtype=torch.float64)
    log.begin(first)
    (draft,) = folder.iterdir()
    draft.write_bytes(torch.full((LENGTH,), 5.0, dtype=torch.float64).numpy().tobytes())  # so that it can be told what is in the log
    assert log.put(replace(first, tied=TiedGradients(AverageId(b"t" * 32), tied)))
    found = log.get(0)
    assert found is not None
    assert found.tied is not None
    assert torch.equal(found.flat_sum, torch.full((LENGTH,), 5.0, dtype=torch.float64))
    assert torch.equal(found.tied.values, tied)


def test_a_sum_that_another_one_replaces_before_the_commit_is_not_kept(tmp_path: Path) -> None:
    log = AverageLog(tmp_path / "averages", torch.float64)
    log.begin(average(0))
    assert log.put(average(0))
    log.begin(average(1))
    log.begin(last := replace(average(1), flat_sum=torch.full((LENGTH,), 7.0, dtype=torch.float64)))
    assert log.put(last)
    for step, value in ((0, 0.0), (1, 7.0)):
        found = log.get(step)
        assert found is not None
        assert torch.equal(found.flat_sum, torch.full((LENGTH,), value, dtype=torch.float64))
    assert len(list((tmp_path / "averages").iterdir())) == 2


def test_as_many_averages_are_kept_as_the_run_needs(tmp_path: Path) -> None:
    log = AverageLog(tmp_path / "averages", torch.float64, num_kept=2)
    for step in range(6):
        assert log.put(average(step), needed_from=1 if step < 5 else None)
    assert kept(log) == [4, 5]


def test_a_limit_that_ends_it_is_told_once_and_the_newest_averages_stay(tmp_path: Path) -> None:
    folder = tmp_path / "averages"
    room = DiskRoom(folder)
    room.quota_bytes = 7 * ONE_BYTES
    log = AverageLog(folder, torch.float64, room)
    with capture_logs() as logs:
        for step in range(12):
            assert log.put(average(step), needed_from=1)
    assert kept(log) == [*range(5, 12)]
    assert [(line["log_level"], line["step"]) for line in logs] == [("warning", 1)]
    assert "--disk" in logs[0]["remedy"]


def test_without_a_limit_averages_for_joiners_leave_as_much_of_the_disk_free_as_they_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = AverageLog(tmp_path / "averages", torch.float64)

    def free(_folder: Path) -> SimpleNamespace:
        return SimpleNamespace(free=20 * ONE_BYTES - sum(path.stat().st_size for path in (tmp_path / "averages").iterdir()))

    monkeypatch.setattr(shutil, "disk_usage", free)
    for step in range(16):
        assert log.put(average(step), needed_from=0)
    assert kept(log) == [*range(6, 16)]


def test_what_a_step_was_finished_with_is_kept_with_its_average(tmp_path: Path) -> None:
    log = AverageLog(tmp_path / "averages", torch.float64)
    tied = TiedGradients(AverageId(b"both"), torch.ones(3, dtype=torch.float64))
    assert log.put(replace(average(0), norm=0.5, tied=tied))
    found = log.get(0)
    assert found is not None
    assert found.tied is not None
    assert (found.norm, found.tied.id, found.tied.values.tolist(), len(found.flat_sum)) == (0.5, b"both", [1.0] * 3, LENGTH)
