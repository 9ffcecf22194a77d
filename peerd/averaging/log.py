"""The averaged gradients of the last few steps, on disk, for mates that catch up: rule J1 (join).

A file holds the raw sum of one step. The roster, which says what was summed, stays in memory; so files of an earlier
daemon cannot be used and are removed at the start. Losing the log never costs exactness: a mate that cannot catch up
downloads the state.
"""

from __future__ import annotations

import contextlib
import shutil
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from peerd.policy.step.roster import Roster
from peerd.policy.step.stepping import KEPT_AVERAGES
from peerd.stage.disk_room import DiskRoom
from peerd.stage.results import HeldAverage, TiedGradients
from peerd.table.record import NO_AVERAGE, AverageId, Lineage
from peerd.unwritten import UNWRITTEN
from peerd.wire.tensors import views_of_flat

AVERAGES = "averages for mates that catch up"


class AverageLog:
    """Every method runs on one thread, the one that computes the sums of rounds."""

    def __init__(self, folder: Path, dtype: torch.dtype, room: DiskRoom | None = None) -> None:
        self._folder = folder
        self._dtype = dtype
        self._room = room or DiskRoom(folder)
        self._read: weakref.WeakValueDictionary[int, NDArray[Any]] = weakref.WeakValueDictionary()
        """What was read from the files, by step, while somebody uses it: all askers share it."""
        self._kept: dict[int, tuple[Roster, Lineage, AverageId, int]] = {}
        """By step: the roster, the lineage, the id of the tied sum at the end of the file, and the number of its elements."""
        shutil.rmtree(folder, ignore_errors=True)
        self.forget_trouble()

    def put(self, held: HeldAverage) -> bool:
        """Write the average of a step and delete the oldest. Returns False if the disk or the owner's limit has no room for it."""
        step = held.roster.step
        tied_sum, tied = (held.tied.id, held.tied.values) if held.tied else (NO_AVERAGE, torch.empty(0, dtype=self._dtype))
        is_written = False
        with UNWRITTEN.trying(AVERAGES, self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._room.writing(held.flat_sum.nbytes + tied.nbytes):
                while self._kept and self._room.is_exceeded:
                    self._forget(min(self._kept))
                if self._room.is_exceeded:
                    return False
                with self._path(step).open("wb") as file:
                    file.writelines((*views_of_flat(held.flat_sum), *views_of_flat(tied)))
            is_written = True
        if not is_written:
            self._forget(step)
            return False
        self._read.pop(step, None)
        self._kept[step] = (held.roster, held.lineage, tied_sum, tied.numel())
        for old in sorted(self._kept)[:-KEPT_AVERAGES]:
            self._forget(old)
        return True

    def forget_trouble(self) -> None:
        """Nothing has to be written just now; from any thread."""
        UNWRITTEN.forget(AVERAGES)

    def get(self, step: int) -> HeldAverage | None:
        kept = self._kept.get(step)
        if kept is None:
            return None
        roster, lineage, tied_sum, num_tied = kept
        try:
            array = self._read.get(step)
            if array is None:
                array = self._read[step] = np.fromfile(self._path(step), dtype=torch.empty(0, dtype=self._dtype).numpy().dtype)
            whole = torch.from_numpy(array)
        except OSError:
            self._forget(step)
            return None
        length = whole.numel() - num_tied
        return HeldAverage(roster, lineage, whole[:length], TiedGradients(tied_sum, whole[length:]) if tied_sum else None)

    def _forget(self, step: int) -> None:
        self._kept.pop(step, None)
        self._read.pop(step, None)
        with contextlib.suppress(OSError):  # a failing disk may refuse this, too
            self._path(step).unlink(missing_ok=True)

    def _path(self, step: int) -> Path:
        return self._folder / f"{step}.sum"
