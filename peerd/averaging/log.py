"""The averaged gradients of finished steps, on disk, for mates that catch up: rule J1 (join).

A file holds the raw sum of one step. The roster, which says what was summed, stays in memory; so files of an earlier
daemon cannot be used and are removed at the start. Losing the log never costs exactness: a mate that cannot catch up
downloads the state.
"""

from __future__ import annotations

import contextlib
import shutil
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from peerd.config.atomic import DRAFT_SUFFIX
from peerd.link.links import CHUNK_BYTES, Bytes
from peerd.policy.step.certificates import Slices
from peerd.policy.step.confirming import RoundProof
from peerd.policy.step.roster import Roster
from peerd.stage.disk_room import DiskRoom
from peerd.stage.results import HeldAverage, TiedGradients
from peerd.stage.state_file import CutStored, OpenFile
from peerd.table.record import NO_AVERAGE, AverageId, Lineage
from peerd.unwritten import UNWRITTEN
from peerd.wire.chunks import CutFile
from peerd.wire.messages import Average
from peerd.wire.tensors import views_of_flat

AVERAGES = "averages for mates that catch up"
LOG = structlog.get_logger()


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class _Entry:
    """What of an average stays in memory. The file ends with the gradients of a tied weight, `num_tied` elements."""

    roster: Roster
    lineage: Lineage
    norm: float | None
    tied_sum: AverageId
    num_tied: int
    num_bytes: int
    slices: Slices
    sections: tuple[RoundProof, ...]


class AverageLog:
    """Every method runs on one thread (`KeptAverages`); any thread may read `steps`."""

    def __init__(self, folder: Path, dtype: torch.dtype, room: DiskRoom | None = None, num_kept: int = 4) -> None:
        """`num_kept`: so many averages stay, as long as the disk has room for the last one."""
        self._num_kept = num_kept
        self._folder = folder
        self._dtype = dtype
        self._room = room or DiskRoom(folder)
        self._read: weakref.WeakValueDictionary[int, NDArray[Any]] = weakref.WeakValueDictionary()
        """What was read from the files, by step, while somebody uses it: all askers share it."""
        self._kept: dict[int, _Entry] = {}
        self.steps: frozenset[int] = frozenset()
        """The steps whose averages are kept."""
        self._draft = folder / f"next{DRAFT_SUFFIX}"
        self._begun: Callable[[], Tensor | None] = _nothing
        """The sum that is in the draft."""
        self._given_up: int | None = None
        """The first step that was needed when the disk last had no room for it: the log tells it once."""
        shutil.rmtree(folder, ignore_errors=True)
        self.forget_trouble()

    def put(self, held: HeldAverage, needed_from: int | None = None, *, is_alone: bool = False) -> bool:
        """Write the average of a step and delete those that nobody needs: the last few stay, and all since `needed_from`.

        Of a member that `is_alone` only this one stays.

        Those of joiners go, the oldest first, if the disk or the owner's limit has no room. Returns False if it has none for this one.
        """
        step, least = held.roster.step, 1 if is_alone else self._num_kept
        tied_sum, tied = (held.tied.id, held.tied.values) if held.tied else (NO_AVERAGE, torch.empty(0, dtype=self._dtype))
        num_bytes = held.flat_sum.nbytes + tied.nbytes
        for old in sorted(self._kept):
            if old <= step - least and (needed_from is None or old < needed_from):
                self._forget(old)
        is_written = False
        with UNWRITTEN.trying(AVERAGES, self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._room.writing(num_bytes):
                while self._kept and (self._room.is_exceeded or (len(self._kept) >= self._num_kept and self._fills_disk(num_bytes))):
                    self._give_up(min(self._kept), step, needed_from)
                if self._room.is_exceeded:
                    return False
                self._write(held, views_of_flat(tied))
            is_written = True
        if not is_written:
            self._forget(step)
            with contextlib.suppress(OSError):
                self._draft.unlink(missing_ok=True)
            return False
        self._read.pop(step, None)
        self._kept[step] = _Entry(held.roster, held.lineage, held.norm, tied_sum, tied.numel(), num_bytes, held.slices, held.sections)
        self.steps = frozenset(self._kept)
        return True

    def begin(self, held: HeldAverage) -> None:
        """Write the sum of an average that this peer has yet to apply, if there is room: `put` then has little left to do."""
        num_bytes = held.flat_sum.nbytes
        self._begun = _nothing
        with contextlib.suppress(OSError):  # `put` tells it
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._room.writing(num_bytes):
                if not self._room.is_exceeded and not self._fills_disk(num_bytes):
                    with self._draft.open("wb") as file:
                        file.writelines(views_of_flat(held.flat_sum))
                    self._begun = weakref.ref(held.flat_sum)

    def _write(self, held: HeldAverage, tied: Sequence[Bytes]) -> None:
        """Write what is not written yet. Raises OSError."""
        is_begun, self._begun = self._begun() is held.flat_sum, _nothing
        with self._draft.open("ab" if is_begun else "wb") as file:
            file.writelines(tied if is_begun else (*views_of_flat(held.flat_sum), *tied))
        self._draft.replace(self._path(held.roster.step))

    def forget_trouble(self) -> None:
        """Nothing has to be written just now; from any thread."""
        UNWRITTEN.forget(AVERAGES)

    def get(self, step: int) -> HeldAverage | None:
        kept = self._kept.get(step)
        if kept is None:
            return None
        try:
            array = self._read.get(step)
            if array is None:
                array = self._read[step] = np.fromfile(self._path(step), dtype=torch.empty(0, dtype=self._dtype).numpy().dtype)
            whole = torch.from_numpy(array)
        except OSError:
            self._forget(step)
            return None
        length = whole.numel() - kept.num_tied
        tied = TiedGradients(kept.tied_sum, whole[length:]) if kept.tied_sum else None
        return HeldAverage(kept.roster, kept.lineage, whole[:length], tied, kept.norm, slices=kept.slices, sections=kept.sections)

    def stored(self, step: int) -> tuple[Average, CutFile] | None:
        """A kept average as it travels, but for the hashes. It is read chunk by chunk, so it takes no memory while a mate downloads it."""
        kept = self._kept.get(step)
        if kept is None:
            return None
        try:
            file = CutStored(OpenFile.at(self._path(step)), chunk_bytes=CHUNK_BYTES, is_fresh=True)
        except OSError:
            self._forget(step)
            return None
        bare = Average(kept.roster, kept.lineage, kept.num_bytes, kept.tied_sum, kept.norm)
        return replace(bare, slices=kept.slices, sections=kept.sections), file

    def _fills_disk(self, num_bytes: int) -> bool:
        """Whether the averages, with one more of this size, would take more of the disk than they leave free."""
        taken = num_bytes + sum(entry.num_bytes for entry in self._kept.values())
        return taken > shutil.disk_usage(self._folder).free - num_bytes

    def _give_up(self, old: int, step: int, needed_from: int | None) -> None:
        if needed_from is not None and needed_from <= old <= step - self._num_kept and self._given_up != needed_from:
            self._given_up = needed_from
            remedy = "allow more with `peerd limits --disk`, or free some disk space"
            LOG.warning("no room for the averages that a joiner needs: it will download the state again", step=old, remedy=remedy)
        self._forget(old)

    def _forget(self, step: int) -> None:
        self._kept.pop(step, None)
        self._read.pop(step, None)
        self.steps = frozenset(self._kept)
        with contextlib.suppress(OSError):  # a failing disk may refuse this, too
            self._path(step).unlink(missing_ok=True)

    def _path(self, step: int) -> Path:
        return self._folder / f"{step}.sum"
