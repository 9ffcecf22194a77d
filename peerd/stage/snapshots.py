"""Rule J2 (download): serve and download a stage's state, as an immutable snapshot in hashed chunks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from blake3 import blake3
from torch import Tensor

from peerd.errors import BadMessageError, BusyError, NotFiniteError, PeerGoneError, RemoteError, StageError, WrongStateError
from peerd.link.links import CHUNK_BYTES, Bytes
from peerd.policy.route.admission import donors, givers_of_start
from peerd.stage.executor import Executor, Priority
from peerd.stage.export import HistoryEntry
from peerd.stage.parameters import is_finite_state
from peerd.stage.state import StageState
from peerd.swarm.membership import Membership
from peerd.table.record import Lineage, PeerId, PeerRecord, Phase
from peerd.table.view import LiveView
from peerd.wire.chunks import chunks_of
from peerd.wire.clients import StateClient, StateRequest
from peerd.wire.messages import Snapshot
from peerd.wire.tensors import file_of, tensors_of_file

MOST_STATE_BYTES = 1 << 40
MAX_OVERHEAD_BYTES = 1 << 20
SENT_HISTORY = 10_000
MOST_COPIES = 2
"""Copies of its state that a peer keeps for those who download it: the newest, and one that another joiner has begun with."""
SHARED_STEPS = 2
"""A joiner that no copy can be made for gets one that is so many steps old; the averages since then are kept."""


class Pieces(list[Bytes]):
    """A snapshot's file in pieces. It lives while somebody sends it, and can be referred to weakly."""


Made = tuple[Snapshot, Pieces]
"""A snapshot's header, and its file."""
Key = tuple[Lineage, int, bool, bool]
"""What a snapshot is of: lineage, step, parameters only, a tied weight only."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Downloaded:
    """A copy of a stage's state: downloaded, read from disk, or taken from this peer's own."""

    step: int
    lineage: Lineage
    tensors: dict[str, Tensor]
    history: tuple[HistoryEntry, ...]


class SnapshotServer:
    """Answers GET_STATE. Joiners of one step share one snapshot, and share one copy of the state with its checkpoint and export.

    Of whole states there are at most MOST_COPIES: while so many are being sent, a joiner gets one of them or is told to ask another peer.
    """

    def __init__(self, state: StageState, executor: Executor, start: Callable[[int], Downloaded] | None = None) -> None:
        """`start` reads a stage's part of the state that the run begins from; None if this peer does not hold that state."""
        self._state = state
        self._executor = executor
        self._start = start
        self._kept: tuple[Key, Downloaded, Made] | None = None
        """The newest; it is dropped when this peer commits."""
        self._sent: list[tuple[Key, Snapshot, weakref.ReferenceType[Pieces]]] = []
        """Every snapshot that may still be on its way to somebody, oldest first."""
        self._whole: weakref.ReferenceType[Downloaded] | None = None
        """The last copy of the whole state, while it is in use. Only the executor's thread reads and writes it."""
        self._making = asyncio.Lock()

    async def snapshot(self, stage: int, wanted: bytes, parameters_only: bool, tied_only: bool = False) -> Made:
        record = self._state.record
        if record.stage != stage or record.phase is Phase.JOINING:
            if self._start is None:
                raise WrongStateError(f"this peer cannot give the state of stage {stage}")
            async with self._making:
                found = await asyncio.to_thread(self._start, stage)
                return await asyncio.to_thread(_as_snapshot, found)
        async with self._making:
            key = (record.lineage, record.step, parameters_only, tied_only)
            known = self._find(lambda old, header: identity_of(header.chunk_hashes) == wanted if wanted else old == key)
            known = known or self._find(lambda old, _: old == key)
            if known is not None:
                return known
            self._kept = None  # it goes now, unless it is on its way to somebody
            if len(self._alive()) < MOST_COPIES:
                return await self._make(parameters_only, tied_only)
            near = self._find(lambda old, _: old[2:] == key[2:] and 0 <= key[1] - old[1] <= SHARED_STEPS)
            if near is None:
                raise BusyError(f"this peer gives its state to others already, and keeps at most {MOST_COPIES} copies of it")
            return near

    def _find(self, fits: Callable[[Key, Snapshot], bool]) -> Made | None:
        """The newest snapshot that fits."""
        return next((made for key, made in reversed(self._alive()) if fits(key, made[0])), None)

    def _alive(self) -> list[tuple[Key, Made]]:
        found = [(key, header, pieces) for key, header, reference in self._sent if (pieces := reference()) is not None]
        self._sent = [(key, header, weakref.ref(pieces)) for key, header, pieces in found]
        return [(key, (header, pieces)) for key, header, pieces in found]

    async def _make(self, parameters_only: bool, tied_only: bool) -> Made:
        found = await self._own(parameters_only, tied_only)
        made = await asyncio.to_thread(_as_snapshot, found)
        key = (found.lineage, found.step, parameters_only, tied_only)
        self._kept = key, found, made
        self._sent.append((key, made[0], weakref.ref(made[1])))
        return made

    async def own(self) -> Downloaded:
        """This peer's own state, as a joiner would get it."""
        return await self._own(parameters_only=False)

    def forget(self) -> None:
        """Drop the kept snapshot. Called after a commit, so that the next joiner gets the new step."""
        self._kept = None

    async def _own(self, parameters_only: bool, tied_only: bool = False) -> Downloaded:
        def take() -> Downloaded:
            state, is_whole, whole = self._state, not parameters_only and not tied_only, self._whole() if self._whole is not None else None
            step, lineage = state.record.step, state.record.lineage
            if is_whole and whole is not None and (whole.step, whole.lineage) == (step, lineage):
                return whole
            held, record = state.holdings, state.record
            tensors = held.tied_tensors(record) if tied_only else held.tensors(record, parameters_only)
            found = Downloaded(step, lineage, tensors, tuple(state.history))
            if is_whole:
                self._whole = weakref.ref(found)
            return found

        return await self._executor.run(Priority.CONTROL, take)


class Downloader:
    """Downloads a stage's state from its peers. If a donor fails, another one continues where it stopped."""

    def __init__(self, client: StateClient, membership: Membership, patience_s: float) -> None:
        self._client = client
        self._membership = membership
        self._patience_s = patience_s
        self.bytes_done = 0
        self.bytes_total = 0

    async def download(
        self, stage: int, most_bytes: int, prefer: PeerId | None = None, parameters_only: bool = False, tied_only: bool = False
    ) -> Downloaded:
        """Download the state of a stage from its peers, from `prefer` first. Raises StageError if no donor can give it."""
        partial = _Partial(stage, most_bytes + MAX_OVERHEAD_BYTES, parameters_only, tied_only)
        return await self._download(partial, lambda live, tried: donors(live, stage, tried), prefer)

    async def download_start(self, stage: int, most_bytes: int) -> Downloaded:
        """Download the stage's part of the state that the run begins from. Raises StageError if nobody can give it."""
        partial = _Partial(stage, most_bytes + MAX_OVERHEAD_BYTES, parameters_only=False)
        return await self._download(partial, givers_of_start, None)

    async def _download(
        self, partial: _Partial, candidates: Callable[[LiveView, frozenset[PeerId]], list[PeerRecord]], prefer: PeerId | None
    ) -> Downloaded:
        stage = partial.stage
        tried: set[PeerId] = set()
        last_error = "nobody serves it"
        while True:
            able = [r.peer for r in candidates(self._membership.live(), frozenset(tried)) if r.peer not in tried]
            if not able:
                raise StageError(
                    f"the state of stage {stage} cannot be downloaded: {last_error}", "wait for another of its peers and join again"
                )
            donor = prefer if prefer in able else able[0]
            tried.add(donor)
            try:
                header = await self._download_from(donor, partial)
                return await asyncio.to_thread(_deserialise, header, partial.data)
            except RemoteError as error:
                last_error = f"{donor}: {error.message}"
                if partial.is_complete:  # and unreadable
                    partial.start_over()

    async def _download_from(self, donor: PeerId, partial: _Partial) -> Snapshot:
        """Download the rest of the snapshot that another donor began, or a different snapshot from its first chunk."""
        header, stream = await self._client.get_state(donor, partial.request, self._patience_s)
        if partial.header is not None and header.chunk_hashes != partial.header.chunk_hashes:
            begins_later = partial.num_chunks > 0
            partial.start_over()
            if begins_later:
                return await self._download_from(donor, partial)
        if header.num_bytes > partial.most_bytes or len(header.chunk_hashes) != -(-header.num_bytes // CHUNK_BYTES):
            raise BadMessageError(
                f"a state of {header.num_bytes} bytes in {len(header.chunk_hashes)} chunks; at most {partial.most_bytes} bytes are allowed"
            )
        partial.header = header
        self.bytes_total = header.num_bytes
        async with contextlib.aclosing(stream):
            async for chunk in stream:
                number = partial.num_chunks
                if number >= len(header.chunk_hashes) or await asyncio.to_thread(_digest, chunk) != header.chunk_hashes[number]:
                    raise BadMessageError(f"chunk {number} of the state does not match its hash")
                partial.add(chunk)
                self.bytes_done = len(partial.data)
        if not partial.is_complete:
            raise PeerGoneError("the state ended early")
        return header


@dataclass(slots=True)
class _Partial:
    """The chunks downloaded so far and the snapshot that they belong to: chunks of two snapshots are never mixed (hole 10)."""

    stage: int
    most_bytes: int
    parameters_only: bool
    tied_only: bool = False
    header: Snapshot | None = None
    data: bytearray = field(default_factory=bytearray)
    """The chunks so far. The tensors will be views of it: a state is in memory once while it is downloaded."""
    num_chunks: int = 0

    @property
    def request(self) -> StateRequest:
        return StateRequest(
            stage=self.stage,
            first_chunk=self.num_chunks,
            snapshot=identity_of(self.header.chunk_hashes) if self.header else b"",
            parameters_only=self.parameters_only,
            tied_only=self.tied_only,
        )

    @property
    def is_complete(self) -> bool:
        return self.header is not None and self.num_chunks == len(self.header.chunk_hashes)

    def add(self, chunk: bytes) -> None:
        self.data += chunk
        self.num_chunks += 1

    def start_over(self) -> None:
        self.header = None
        self.data = bytearray()
        self.num_chunks = 0


def identity_of(chunk_hashes: Sequence[bytes]) -> bytes:
    """The hash that identifies a snapshot."""
    return blake3(b"".join(chunk_hashes)).digest()


def _digest(chunk: bytes) -> bytes:
    return blake3(chunk).digest()


def _as_snapshot(state: Downloaded) -> Made:
    if not is_finite_state(state.tensors):
        raise NotFiniteError("the run has diverged: this peer's parameters are not finite")
    pieces = Pieces(file_of(state.tensors))
    hashes = tuple(_digest(chunk) for chunk in chunks_of(pieces))
    num_bytes = sum(map(len, pieces))
    metadata = json.dumps([[entry.step, entry.loss, entry.tokens] for entry in state.history[-SENT_HISTORY:]])
    return Snapshot(step=state.step, lineage=state.lineage, num_bytes=num_bytes, chunk_hashes=hashes, metadata=metadata), pieces


def _deserialise(header: Snapshot, data: bytearray) -> Downloaded:
    """The state in a complete snapshot. Raises BadMessageError if it is invalid. safetensors holds data only: nothing is executed."""
    try:
        tensors = tensors_of_file(data)
        history = tuple(HistoryEntry(step=int(s), loss=float(loss), tokens=int(n)) for s, loss, n in json.loads(header.metadata))
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, OverflowError, RecursionError) as error:
        raise BadMessageError(f"the state is not readable: {error}") from None
    if not all(math.isfinite(entry.loss) for entry in history):
        raise BadMessageError("the state's history has a loss that is not finite")
    return Downloaded(header.step, header.lineage, tensors, history)
