"""What a peer has done to its own parameters, move by move, so that its local steps can be computed again (`peerd reference --replay`).

The moves are a chain: each has a hash of itself and of the one before. The hash of a seal names the version that it has made; the version
that a step begins with has no name, because all peers of a stage begin with the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peerd.policy.hashing import digest
from peerd.table.record import PeerId, PeerRecord
from peerd.unwritten import UNWRITTEN

VersionId = bytes
BEGUN: VersionId = b""
"""The version that a step begins with."""
VERSION_BYTES = 16


class MoveLog:
    """The moves of one peer in one stage. Where there is no file they are only counted into the chain."""

    def __init__(self, record: PeerRecord, folder: Path | None = None) -> None:
        """`folder`: where the file with the moves lies; each start of a daemon begins another file."""
        self._chain = digest("moves", record.peer, record.incarnation, record.stage)
        self._step: int | None = None
        self._path = folder / f"{record.peer}-{record.incarnation}-{record.stage}.jsonl" if folder is not None else None
        self._note({"move": "serve", "peer": record.peer, "stage": record.stage})

    def restart(self, *, anew: bool) -> None:
        """The parameters are those of a step's beginning, which is noted with the next move; `anew`: and the moments are zero."""
        if anew:
            self._note({"move": "forget"})
        self._step = None

    def add(self, step: int, index: int, batch: PeerId, versions: Sequence[VersionId]) -> None:
        """A gradient is added to an open batch; `versions`: of all stages, in order, with which it was computed."""
        self._begin(step)
        self._note({"move": "add", "index": index, "batch": batch, "versions": [version.hex() for version in versions]})

    def seal(self, step: int, batch: PeerId) -> VersionId:
        self._begin(step)
        return self._note({"move": "seal", "batch": batch})

    def drop(self, batches: Sequence[str]) -> None:
        self._note({"move": "drop", "batches": [*batches]})

    def take_back(self) -> None:
        """The sealed sum is dropped, with its updates; open batches stay."""
        self._note({"move": "take back"})

    def give(self, step: int, done: int) -> None:
        """The present change of the parameters goes into a round, for these microbatches."""
        self._begin(step)
        self._note({"move": "give", "done": hex(done)})

    def apply(self, step: int, computed: Mapping[PeerId, int]) -> None:
        """An average was applied; by peer, the microbatches behind its changes in it."""
        self._note({"move": "apply", "step": step, "computed": {peer: hex(bits) for peer, bits in sorted(computed.items()) if bits}})

    def _begin(self, step: int) -> None:
        if self._step != step:
            self._step = step
            self._note({"move": "begin", "step": step})

    def _note(self, move: dict[str, Any]) -> VersionId:
        self._chain = digest("move", self._chain, json.dumps(move, sort_keys=True), size=VERSION_BYTES)
        if self._path is not None:
            with UNWRITTEN.trying("the moves of local steps", self._path), self._path.open("a") as file:
                file.write(json.dumps(move | {"id": self._chain.hex()}) + "\n")
        return self._chain
