"""The last few steps of this peer's stage on disk, so that a swarm that was switched off entirely resumes.

A file is a safetensors file whose name tells stage, step and the BLAKE3 hash of its content. A file that does not match
its name is damaged and passed over. The newest `KEPT` are kept.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import structlog
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from peerd.config.atomic import commit, draft
from peerd.errors import DiskError
from peerd.stage.export import HistoryEntry
from peerd.stage.snapshots import Downloaded
from peerd.table.record import Lineage

KEPT = 4
HASH_CHARS = 32
LOG = structlog.get_logger()


@dataclass(frozen=True, slots=True, order=True)
class Checkpoint:
    """A file found on disk."""

    step: int
    stage: int
    path: Path


class CheckpointStore:
    """One run's checkpoints in one home. Blocking: called off the event loop."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def scan(self) -> list[Checkpoint]:
        """Sound checkpoints, oldest first; damaged ones are named in the log and left alone."""
        found = []
        for path in sorted(self._folder.glob("*.safetensors")):
            stage, _, rest = path.stem.partition("-")
            step, _, digest = rest.partition("-")
            if not (stage.isdigit() and step.isdigit()):
                continue
            if _digest(path) == digest:
                found.append(Checkpoint(int(step), int(stage), path))
            else:
                LOG.warning("checkpoint is damaged and passed over", file=str(path))
        return sorted(found)

    def save(self, stage: int, state: Downloaded) -> None:
        """Write one step and forget the oldest. A full disk costs the checkpoint, not the run."""
        metadata = {
            "inexact": str(state.lineage.inexact),
            "lineage": state.lineage.chain.hex(),
            "history": json.dumps([[entry.step, entry.loss, entry.tokens] for entry in state.history]),
        }
        try:
            with draft(self._folder) as path:
                save_file({name: tensor.contiguous() for name, tensor in state.tensors.items()}, path, metadata)
                commit(path, self._folder / f"{stage}-{state.step}-{_digest(path)}.safetensors")
        except (DiskError, SafetensorError) as error:
            LOG.warning("no checkpoint could be written", step=state.step, error=str(error))
            return
        mine = [checkpoint for checkpoint in self._names() if checkpoint.stage == stage]
        for old in [c for c in self._names() if c.stage != stage] + mine[:-KEPT]:
            old.path.unlink(missing_ok=True)

    def load(self, stage: int, step: int) -> Downloaded | None:
        """A step that `scan` found; None when it cannot be read any more."""
        for checkpoint in self._names():
            if (checkpoint.stage, checkpoint.step) == (stage, step):
                try:
                    return _read(checkpoint)
                except (OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
                    LOG.warning("checkpoint could not be read", file=str(checkpoint.path), error=str(error))
        return None

    def _names(self) -> list[Checkpoint]:
        parts = [(path, path.stem.split("-")) for path in self._folder.glob("*.safetensors")]
        return sorted(Checkpoint(int(words[1]), int(words[0]), path) for path, words in parts if len(words) == 3 and words[1].isdigit())


def _digest(path: Path) -> str:
    hasher = blake3()
    hasher.update_mmap(path)
    return hasher.hexdigest()[:HASH_CHARS]


def _read(checkpoint: Checkpoint) -> Downloaded:
    with safe_open(checkpoint.path, framework="pt") as file:
        metadata = file.metadata() or {}
        tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    history = tuple(HistoryEntry(step=int(s), loss=float(loss), tokens=int(n)) for s, loss, n in json.loads(metadata["history"]))
    lineage = Lineage(int(metadata["inexact"]), bytes.fromhex(metadata["lineage"]))
    return Downloaded(checkpoint.step, lineage, tensors, history)
