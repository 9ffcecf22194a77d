"""The last few averaged gradients, on disk, for mates that catch up (K in PROTOCOL).

A file holds the raw sum of one step; what it is a sum of stands in the roster, which stays in memory. Files of an
earlier daemon are of no use to this one and are removed at its start. Losing the log never costs exactness: a mate
that cannot catch up downloads the state.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import structlog
import torch

from peerd.policy.roster import Roster
from peerd.policy.stepping import KEPT_AVERAGES
from peerd.stage.state import HeldAverage
from peerd.stage.tensors import encode_flat
from peerd.table.record import Lineage

LOG = structlog.get_logger()


class AverageLog:
    """Every method runs on one thread, that of the rounds' sums."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._folder = folder
        self._dtype = dtype
        self._kept: dict[int, tuple[Roster, Lineage]] = {}
        shutil.rmtree(folder, ignore_errors=True)

    def put(self, held: HeldAverage) -> None:
        """Keep the average of a step, and forget the oldest. A full disk costs the log, not the run."""
        step = held.roster.step
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._path(step).open("wb") as file:
                file.writelines(encode_flat(held.flat_sum))
        except OSError as error:
            LOG.warning("the average could not be kept for others", step=step, error=error.strerror)
            self._forget(step)
            return
        self._kept[step] = (held.roster, held.lineage)
        for old in sorted(self._kept)[:-KEPT_AVERAGES]:
            self._forget(old)

    def get(self, step: int) -> HeldAverage | None:
        kept = self._kept.get(step)
        if kept is None:
            return None
        try:
            return HeldAverage(*kept, torch.frombuffer(bytearray(self._path(step).read_bytes()), dtype=self._dtype))
        except OSError:
            self._forget(step)
            return None

    def _forget(self, step: int) -> None:
        self._kept.pop(step, None)
        self._path(step).unlink(missing_ok=True)

    def _path(self, step: int) -> Path:
        return self._folder / f"{step}.sum"
