"""Checkpoints: the last few steps of this peer's stage on disk, from which a swarm that was switched off entirely resumes.

A checkpoint is a safetensors file. Its name gives stage, number of stages, step and the BLAKE3 hash of its content; a file
that does not match its hash is damaged and ignored. The newest `KEPT` are kept, fewer if the owner's quota has no room.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog
from torch import Tensor

from peerd.config.atomic import commit, draft
from peerd.errors import FULL, DiskError, NotFiniteError
from peerd.stage.disk_room import DiskRoom
from peerd.stage.history import history_from, history_json
from peerd.stage.idle_disk import idle_disk
from peerd.stage.parameters import is_finite_state
from peerd.stage.snapshots import Downloaded
from peerd.stage.state_file import FileTensors, OpenFile, free_cache, hash_of, write_hashed
from peerd.table.record import Lineage
from peerd.unwritten import UNWRITTEN
from peerd.wire.tensors import bodies_of, header_of

KEPT = 4
HASH_CHARS = 32
_NAME = re.compile(r"(\d{1,18})of(\d{1,18})-(\d{1,18})-[0-9a-f]+", re.ASCII)
LOG = structlog.get_logger()


@dataclass(frozen=True, slots=True, order=True)
class Checkpoint:
    """A file found on disk."""

    step: int
    stage: int
    num_stages: int
    path: Path


class CheckpointStore:
    """One run's checkpoints in one home. Methods block: call them off the event loop."""

    def __init__(self, folder: Path, num_stages: int, room: DiskRoom | None = None) -> None:
        self._folder = folder
        self._num_stages = num_stages
        self.room = room or DiskRoom(folder)
        """What the owner lets files take. The newest checkpoint and the one being written stay within no limit that is less than both."""

    def scan(self) -> list[Checkpoint]:
        """The undamaged checkpoints of this number of stages, oldest first. Damaged ones are logged and left on disk."""
        return [found for found in scan_folder(self._folder) if found.num_stages == self._num_stages]

    def steps(self, stage: int) -> tuple[int, ...]:
        """The steps of a stage on this disk, ascending, by the names of the files."""
        return tuple(found.step for found in _names(self._folder) if (found.stage, found.num_stages) == (stage, self._num_stages))

    def save(self, stage: int, state: Downloaded, when_read: Callable[[], None] = lambda: None) -> None:
        """Write one step. Delete later steps, which the run has given up, and the oldest ones beyond `KEPT` and the quota.

        The tensors are written from where they are; `when_read` is called once they are not needed any more. Raises NotFiniteError
        if one is not finite. If the disk is full, the oldest go first. If that does not help, this checkpoint is left out: training
        goes on, the daemon's health tells of it, and the next one is tried.
        """
        others = _names(self._folder)
        mine = [found for found in others if (found.stage, found.num_stages) == (stage, self._num_stages) and found.step < state.step]
        others = [found for found in others if found not in mine] + mine
        with UNWRITTEN.trying("checkpoints", self._folder):
            written = self._write(stage, state, others, when_read)
            others = [found for found in others if found.path != written and found.path.exists()]
            stays = [found for found in others if found in mine][1 - KEPT :]
            for old in others:
                if old not in stays:
                    old.path.unlink(missing_ok=True)
            self._make_room(stays, keep=0)

    def _write(self, stage: int, state: Downloaded, others: list[Checkpoint], when_read: Callable[[], None]) -> Path:
        """Write a file whose name ends with its hash. If the disk is full, remove `others` from the beginning, but for the last."""
        metadata = {
            "inexact": str(state.lineage.inexact),
            "lineage": state.lineage.chain.hex(),
            "history": history_json(state.history),
        }
        header = header_of(state.tensors, metadata)
        num_bytes = len(header) + sum(value.nbytes for value in state.tensors.values())
        while True:
            try:
                with draft(self._folder) as path, self.room.writing(num_bytes):
                    others = self._make_room(others, keep=1)
                    digest = write_hashed(path, itertools.chain([header], bodies_of(state.tensors, _check_finite)))
                    when_read()
                    written = self._folder / f"{stage}of{self._num_stages}-{state.step}-{digest[:HASH_CHARS]}.safetensors"
                    with idle_disk():
                        commit(path, written)
                    free_cache(written)
                    return written
            except DiskError as error:
                if len(others) < 2 or not isinstance(error.__cause__, OSError) or error.__cause__.errno not in FULL:
                    raise
                oldest, *others = others
                oldest.path.unlink(missing_ok=True)

    def _make_room(self, found: list[Checkpoint], keep: int) -> list[Checkpoint]:
        """Remove checkpoints from the beginning of the list until the limit holds. Returns those that are left, at least `keep`."""
        left = list(found)
        while len(left) > keep and self.room.is_exceeded:
            left.pop(0).path.unlink(missing_ok=True)
        return left

    def load(self, stage: int, step: int) -> Downloaded | None:
        """Read a step that `scan` found; None if it cannot be read any more."""
        for checkpoint in _names(self._folder):
            if (checkpoint.stage, checkpoint.num_stages, checkpoint.step) == (stage, self._num_stages, step):
                found = read_checkpoint(checkpoint)
                if found is not None:
                    return found
        return None


def scan_folder(folder: Path) -> list[Checkpoint]:
    """The undamaged checkpoints in a folder, of any number of stages, oldest first. Damaged ones are logged."""
    damaged = damaged_in(folder)
    for path in damaged:
        LOG.warning("checkpoint is damaged and ignored", file=str(path))
    return [checkpoint for checkpoint in _names(folder) if checkpoint.path not in damaged]


def damaged_in(folder: Path) -> list[Path]:
    """The checkpoints whose content does not match the hash in their names."""
    return [checkpoint.path for checkpoint in _names(folder) if _digest(checkpoint.path) != checkpoint.path.stem.rpartition("-")[2]]


def read_checkpoint(checkpoint: Checkpoint) -> Downloaded | None:
    """The content of a checkpoint, whose tensors are read when asked for. If it cannot be read, this is logged and the result is None."""
    try:
        return _read(checkpoint)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        LOG.warning("checkpoint could not be read", file=str(checkpoint.path), error=str(error))
        return None


def _names(folder: Path) -> list[Checkpoint]:
    parts = [(path, _NAME.fullmatch(path.stem)) for path in folder.glob("*.safetensors")]
    return sorted(Checkpoint(int(name[3]), int(name[1]), int(name[2]), path) for path, name in parts if name)


def _digest(path: Path) -> str:
    return hash_of(path)[:HASH_CHARS]


def _check_finite(name: str, tensor: Tensor) -> None:
    """Raise NotFiniteError if a state with it cannot be trained on: it would take the place of an earlier checkpoint."""
    if not is_finite_state({name: tensor}):
        raise NotFiniteError("the parameters are not finite, and would take the place of an earlier checkpoint")


def _read(checkpoint: Checkpoint) -> Downloaded:
    tensors = FileTensors(OpenFile.at(checkpoint.path))
    lineage = Lineage(int(tensors.metadata["inexact"]), bytes.fromhex(tensors.metadata["lineage"]))
    return Downloaded(checkpoint.step, lineage, tensors, history_from(tensors.metadata["history"]))
