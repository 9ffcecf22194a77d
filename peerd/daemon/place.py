"""What a node is made from: where it stands in its run, its row in the table, and its stage."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from peerd.config.manifest import Manifest
from peerd.daemon.row import Row
from peerd.stage.checkpoints import CheckpointStore
from peerd.stage.executor import Executor
from peerd.stage.start import StartState
from peerd.stage.state import StageState
from peerd.swarm.identity import LocalState
from peerd.swarm.membership import Membership
from peerd.swarm.signed import SignedManifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where this peer stands in its run."""

    signed: SignedManifest
    stage: int
    device: torch.device
    memory_bytes: int
    data_source: str
    """What this machine reads the run's text from; empty without the data."""

    @property
    def manifest(self) -> Manifest:
        return self.signed.manifest


@dataclass(frozen=True, slots=True)
class Swarm:
    """What keeps this peer's place in the table."""

    membership: Membership
    local: LocalState
    row: Row


@dataclass(frozen=True, slots=True)
class Stage:
    """The stage's tensors and the thread they belong to."""

    executor: Executor
    state: StageState
    store: CheckpointStore
    start: StartState | None
    """What the run begins from, where it lies on this machine."""
