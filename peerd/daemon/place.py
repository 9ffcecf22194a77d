"""The parts that a peer is made from: its run as this machine has it, and its place in the swarm."""

from __future__ import annotations

from dataclasses import dataclass

from peerd.config.manifest import Manifest
from peerd.daemon.row import Row
from peerd.stage.start import StartState
from peerd.swarm.directory import Directory
from peerd.swarm.identity import LocalState
from peerd.swarm.membership import Membership
from peerd.swarm.signed import SignedManifest
from peerd.train.samples import Microbatches


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A run as this machine has it, whichever stage the peer serves."""

    signed: SignedManifest
    data_source: str
    """What this machine reads the run's text from; empty without the data."""
    corpus: Microbatches | None
    """The run's data, if it is on this machine."""
    start: StartState | None
    """The state that the run begins from, if it is on this machine."""

    @property
    def manifest(self) -> Manifest:
        return self.signed.manifest

    @property
    def start_path(self) -> str:
        return str(self.start.path) if self.start else ""


@dataclass(frozen=True, slots=True)
class Entry:
    """The parts that keep this peer's place in the swarm."""

    membership: Membership
    row: Row
    local: LocalState
    directory: Directory
