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
from torch import Tensor

from peerd.policy.roster import Roster
from peerd.policy.stepping import KEPT_AVERAGES
from peerd.stage.tensors import encode_flat

LOG = structlog.get_logger()


class AverageLog:
    """Every method runs on the executor's thread."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._folder = folder
        self._dtype = dtype
        self._rosters: dict[int, Roster] = {}
        shutil.rmtree(folder, ignore_errors=True)

    def put(self, roster: Roster, flat_sum: Tensor) -> None:
        """Keep the average of a step, and forget the oldest. A full disk costs the log, not the run."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._path(roster.step).open("wb") as file:
                file.writelines(encode_flat(flat_sum))
        except OSError as error:
            LOG.warning("the average could not be kept for others", step=roster.step, error=error.strerror)
            self._forget(roster.step)
            return
        self._rosters[roster.step] = roster
        for step in sorted(self._rosters)[:-KEPT_AVERAGES]:
            self._forget(step)

    def get(self, step: int) -> tuple[Roster, Tensor] | None:
        roster = self._rosters.get(step)
        if roster is None:
            return None
        try:
            return roster, torch.frombuffer(bytearray(self._path(step).read_bytes()), dtype=self._dtype)
        except OSError:
            self._forget(step)
            return None

    def _forget(self, step: int) -> None:
        self._rosters.pop(step, None)
        self._path(step).unlink(missing_ok=True)

    def _path(self, step: int) -> Path:
        return self._folder / f"{step}.sum"
