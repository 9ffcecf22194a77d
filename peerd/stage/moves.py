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
from peerd.table.record import Lineage, PeerId, PeerRecord
from peerd.unwritten import UNWRITTEN

VersionId = bytes
BEGUN: VersionId = b""
"""The version that a step begins with."""
VERSION_BYTES = 16
WHAT = "the moves of local steps"


class MoveLog:
    """The moves of one peer in one stage. Where there is no file they are only counted into the chain."""

    def __init__(self, record: PeerRecord, folder: Path | None = None) -> None:
        """`folder`: where the file with the moves lies; each start of a daemon begins another file."""
        self._chain = digest("moves", record.peer, record.incarnation, record.stage)
        self._begun: tuple[int, Lineage] | None = None
        self._path = folder / f"{record.peer}-{record.incarnation}-{record.stage}.jsonl" if folder is not None else None
        if folder is not None:
            with UNWRITTEN.trying(WHAT, folder):
                folder.mkdir(parents=True, exist_ok=True)
        self._note({"move": "serve", "peer": record.peer, "stage": record.stage})

    def restart(self, *, anew: bool) -> None:
        """The parameters are those of a step's beginning, which is noted with the next move; `anew`: and the moments are zero."""
        if anew:
            self._note({"move": "forget"})
        self._begun = None

    def add(self, mine: PeerRecord, index: int, batch: PeerId, versions: Sequence[VersionId]) -> None:
        """A gradient is added to an open batch; `versions`: of all stages, in order, with which it was computed."""
        self._begin(mine)
        self._note({"move": "add", "index": index, "batch": batch, "versions": [version.hex() for version in versions]})

    def seal(self, mine: PeerRecord, batch: PeerId) -> VersionId:
        self._begin(mine)
        return self._note({"move": "seal", "batch": batch})

    def drop(self, batches: Sequence[str]) -> None:
        self._note({"move": "drop", "batches": [*batches]})

    def take_back(self) -> None:
        """The sealed sum is dropped, with its updates; open batches stay."""
        self._note({"move": "take back"})

    def give(self, mine: PeerRecord) -> None:
        """The present change of the parameters goes into a round, for the whole ledger."""
        self._begin(mine)
        self._note({"move": "give", "done": hex(mine.done)})

    def apply(self, mine: PeerRecord, after: Lineage, computed: Mapping[PeerId, int]) -> None:
        """An average was applied, which made the parameters `after`; by peer, the microbatches behind its changes in it."""
        given = {peer: hex(bits) for peer, bits in sorted(computed.items()) if bits}
        self._note({"move": "apply", "step": mine.step, "lineage": _name(mine.lineage), "after": _name(after), "computed": given})

    def _begin(self, mine: PeerRecord) -> None:
        if self._begun != (mine.step, mine.lineage):
            self._begun = mine.step, mine.lineage
            self._note({"move": "begin", "step": mine.step, "lineage": _name(mine.lineage)})

    def _note(self, move: dict[str, Any]) -> VersionId:
        self._chain = digest("move", self._chain, json.dumps(move, sort_keys=True), size=VERSION_BYTES)
        if self._path is not None:
            with UNWRITTEN.trying(WHAT, self._path), self._path.open("a") as file:
                file.write(json.dumps(move | {"id": self._chain.hex()}) + "\n")
        return self._chain


def _name(lineage: Lineage) -> str:
    return f"{lineage.inexact}/{lineage.chain.hex()}"
