"""What a peer has done to its own parameters, move by move, so that its local steps can be computed again (`peerd reference --replay`).

The moves are a chain: each has a hash of itself and of the one before. The hash of a seal names the version that it has made; the version
that a step begins with has no name, because all peers of a stage begin with the same.
"""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peerd.errors import BadMessageError
from peerd.policy.hashing import digest
from peerd.table.record import Lineage, PeerId, PeerRecord
from peerd.unwritten import UNWRITTEN

VersionId = bytes
BEGUN: VersionId = b""
"""The version that a step begins with."""
VERSION_BYTES = 16
MOST_KEPT_BYTES = 4 << 20
"""Bytes of its latest moves that a peer keeps in memory, for mates that copy them."""
WHAT = "the moves of local steps"


class MoveLog:
    """The moves of one peer in one stage, in a file where there is one. Every method is a job for the executor's thread."""

    def __init__(self, record: PeerRecord, folder: Path | None = None) -> None:
        """`folder`: where the file with the moves lies; each start of a daemon begins another file."""
        self.incarnation = record.incarnation
        self._chain = beginning_of(record.peer, record.incarnation, record.stage)
        self._kept: deque[bytes] = deque()
        self._first = self._num_bytes = 0
        """The number of the first move that is kept in memory, and the bytes of all that are."""
        self._begun: tuple[int, Lineage] | None = None
        self._path = folder / f"{name_of(record.peer, record.incarnation, record.stage)}.jsonl" if folder is not None else None
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

    def since(self, first: int, most_bytes: int) -> tuple[int, bytes]:
        """Return the moves from number `first` on, or from the first that is still kept: its number, and whole lines of so many bytes."""
        first, found, num_bytes = max(first, self._first), list[bytes](), 0
        for line in itertools.islice(self._kept, first - self._first, None):
            num_bytes += len(line)
            if num_bytes > most_bytes:
                break
            found.append(line)
        return first, b"".join(found)

    def _begin(self, mine: PeerRecord) -> None:
        if self._begun != (mine.step, mine.lineage):
            self._begun = mine.step, mine.lineage
            self._note({"move": "begin", "step": mine.step, "lineage": _name(mine.lineage)})

    def _note(self, move: dict[str, Any]) -> VersionId:
        self._chain = after(self._chain, move)
        line = json.dumps(move | {"id": self._chain.hex()}).encode() + b"\n"
        self._kept.append(line)
        self._num_bytes += len(line)
        while self._num_bytes > MOST_KEPT_BYTES:
            self._num_bytes -= len(self._kept.popleft())
            self._first += 1
        if self._path is not None:
            with UNWRITTEN.trying(WHAT, self._path), self._path.open("ab") as file:
                file.write(line)
        return self._chain


def beginning_of(peer: PeerId, incarnation: int, stage: int) -> VersionId:
    """The hash before a log's first move."""
    return digest("moves", peer, incarnation, stage)


def name_of(peer: PeerId, incarnation: int, stage: int) -> str:
    """The name of a log's file, without its end."""
    return f"{peer}-{incarnation}-{stage}"


def after(chain: VersionId, move: Mapping[str, Any]) -> VersionId:
    """The hash of a move and of all before it."""
    return digest("move", chain, json.dumps(move, sort_keys=True), size=VERSION_BYTES)


class MoveCopy:
    """A copy of a mate's log in a file of this peer's. Methods block: call them off the event loop."""

    def __init__(self, path: Path, beginning: VersionId) -> None:
        """A file that is there already is gone on with, as far as it holds."""
        self._path = path
        self._chain = beginning
        self.num_moves = 0
        if path.exists():
            kept = path.read_bytes()
            whole = self._checked(kept[: kept.rfind(b"\n") + 1], until_odd=True)
            if len(whole) < len(kept):
                path.write_bytes(whole)

    def add(self, first: int, lines: bytes) -> None:
        """Write moves, of which `first` is the number of the first. Raises BadMessageError if they do not follow from those before."""
        if first != self.num_moves or not lines.endswith(b"\n"):
            raise BadMessageError("moves that do not follow from those before")
        whole = self._checked(lines)
        with UNWRITTEN.trying(WHAT, self._path), self._path.open("ab") as file:
            file.write(whole)

    def _checked(self, lines: bytes, *, until_odd: bool = False) -> bytes:
        """Return the lines, which follow each from the one before; if `until_odd`, those before the first that does not."""
        chain, taken = self._chain, list[bytes]()
        for line in lines.splitlines(keepends=True):
            found = _next(chain, line)
            if found is None and not until_odd:
                raise BadMessageError("moves that do not follow from those before")
            if found is None:
                break
            chain = found
            taken.append(line)
        self._chain, self.num_moves = chain, self.num_moves + len(taken)
        return b"".join(taken)


def _next(chain: VersionId, line: bytes) -> VersionId | None:
    """The hash after the move in this line; None if it is no move, or follows from another one."""
    try:
        move = dict(json.loads(line))
        told = bytes.fromhex(move.pop("id"))
        return told if told == after(chain, move) else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _name(lineage: Lineage) -> str:
    return f"{lineage.inexact}/{lineage.chain.hex()}"
