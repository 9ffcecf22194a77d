"""Kept averages take no more of the disk than the owner's limit leaves beside the checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch

from peerd.averaging.log import AverageLog
from peerd.policy.step.roster import Roster
from peerd.policy.step.stepping import KEPT_AVERAGES
from peerd.stage.disk_room import DiskRoom
from peerd.stage.results import HeldAverage
from peerd.table.record import Lineage, PeerId

LENGTH = 100
ONE_BYTES = 8 * LENGTH


def average(step: int) -> HeldAverage:
    return HeldAverage(Roster(0, step, 0, PeerId("a"), ()), Lineage(), torch.full((LENGTH,), float(step), dtype=torch.float64))


def kept(log: AverageLog) -> list[int]:
    return [step for step in range(20) if log.get(step) is not None]


def test_all_who_ask_for_a_kept_average_share_one_copy_which_outlives_its_file(tmp_path: Path) -> None:
    log = AverageLog(tmp_path / "averages", torch.float64)
    for step in range(KEPT_AVERAGES):
        assert log.put(average(step))
    first, second = log.get(0), log.get(0)
    assert first is not None
    assert second is not None
    assert first.flat_sum.data_ptr() == second.flat_sum.data_ptr()
    assert log.put(average(KEPT_AVERAGES))
    assert log.get(0) is None
    assert torch.equal(second.flat_sum, average(0).flat_sum)


def test_as_many_averages_are_kept_as_fit_beside_the_checkpoints(tmp_path: Path) -> None:
    checkpoints, folder = tmp_path / "checkpoints", tmp_path / "averages"
    checkpoints.mkdir()
    room = DiskRoom(checkpoints, folder)
    log = AverageLog(folder, torch.float64, room)
    assert [log.put(average(step)) for step in range(6)] == [True] * 6
    assert kept(log) == [2, 3, 4, 5]
    assert len(kept(log)) == KEPT_AVERAGES
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
