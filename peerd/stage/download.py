"""Rule J2 (download), the joiner's side: download a stage's state from its peers, as one snapshot in hashed chunks."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from blake3 import blake3

from peerd.errors import BadMessageError, BusyError, PeerGoneError, RemoteError, StageError
from peerd.link.links import CHUNK_BYTES
from peerd.policy.route.admission import donors, givers_of_start
from peerd.stage.history import history_from
from peerd.stage.snapshots import Downloaded, identity_of
from peerd.swarm.clock import clock_s
from peerd.swarm.membership import Membership
from peerd.table.record import PeerId, PeerRecord
from peerd.table.view import LiveView
from peerd.wire.clients import StateClient, StateRequest
from peerd.wire.messages import Snapshot
from peerd.wire.tensors import tensors_of_file

LEAST_WAIT_S = 1.0
"""The shortest pause before a donor that is busy is asked again."""
Candidates = Callable[[LiveView, frozenset[PeerId]], list[PeerRecord]]
MostBytes = Callable[[int, bool], int]
"""How large the state of a stage can be; with True, that of its copy of a tied weight alone (`most_state_bytes`)."""


class Downloader:
    """Downloads a stage's state from its peers. If a donor fails, another one continues where it stopped."""

    def __init__(self, client: StateClient, membership: Membership, most_bytes: MostBytes, patience_s: float) -> None:
        self._client = client
        self._membership = membership
        self._most_bytes = most_bytes
        self._patience_s = patience_s
        self._unfinished: _Partial | None = None
        """What came of the last download, if that failed just now: the line may be back soon, and the donor keeps the copy for as long."""
        self.bytes_done = 0
        self.bytes_total = 0

    async def download(self, stage: int, prefer: PeerId | None = None, tied_only: bool = False) -> Downloaded:
        """Download the state of a stage from its peers, from `prefer` first. Raises StageError if no donor can give it."""
        partial = await self._begun(stage, tied_only)
        if self._unfinished is not None and (self._unfinished.stage, self._unfinished.tied_only) == (stage, tied_only):
            partial = self._unfinished
        self._unfinished = None
        try:
            return await self._download(partial, lambda live, tried: donors(live, stage, tried), prefer)
        except StageError:
            self._keep(partial)
            raise

    def _keep(self, partial: _Partial) -> None:
        """Let a download that begins soon go on with this one."""
        self._unfinished = partial
        asyncio.get_running_loop().call_later(self._patience_s, self._forget, partial)

    def _forget(self, partial: _Partial) -> None:
        if self._unfinished is partial:
            self._unfinished = None

    async def find_donor(
        self, stage: int, prefer: PeerId, is_of_use: Callable[[Snapshot], bool], claims: Callable[[PeerRecord], bool]
    ) -> PeerId:
        """Return a peer that shows the header of a state of use, or is busy with other downloads.

        If there is none, those whose records claim one do not count for a while (hole 32). Raises StageError.
        """
        others = [record.peer for record in donors(self._membership.live(), stage, frozenset())]
        for donor in dict.fromkeys((prefer, *others)):
            if self._membership.live().find(donor) is None:
                continue  # it has ceased to count meanwhile
            try:
                header = await self._client.get_header(donor, StateRequest(stage=stage), self._patience_s)
            except BusyError:
                return donor
            except RemoteError:
                continue
            if is_of_use(header):
                partial = await self._begun(stage)
                partial.header = header
                self._keep(partial)
                return donor
        for record in self._membership.live().serving(stage):
            if claims(record):
                self._membership.doubt(record.peer)
        raise StageError(f"no peer of stage {stage} gives a newer state", "it is asked for again while peers claim to have one")

    async def download_start(self, stage: int) -> Downloaded:
        """Download the stage's part of the state that the run begins from. Raises StageError if nobody can give it."""
        return await self._download(await self._begun(stage), givers_of_start, None)

    async def _begun(self, stage: int, tied_only: bool = False) -> _Partial:
        return _Partial(stage, await asyncio.to_thread(self._most_bytes, stage, tied_only), tied_only)

    async def _download(self, partial: _Partial, candidates: Candidates, prefer: PeerId | None) -> Downloaded:
        """Ask one donor after another, and one whose connection broke again, as long as it sends more each time.

        A donor that is busy says for how long. While all others fail, this peer waits for it, and then asks all of them again.
        """
        stage = partial.stage
        tried: set[PeerId] = set()
        busy_until_s: dict[PeerId, float] = {}
        last_error = "nobody serves it"
        while True:
            able = [r.peer for r in candidates(self._membership.live(), frozenset(tried)) if r.peer not in tried]
            ready = [peer for peer in able if busy_until_s.get(peer, 0.0) <= clock_s()]
            if not able:
                raise StageError(
                    f"the state of stage {stage} cannot be downloaded: {last_error}", "wait for another of its peers and join again"
                )
            if not ready:
                await self._membership.changed(min(busy_until_s[peer] for peer in able) - clock_s())
                continue
            donor = prefer if prefer in ready else ready[0]
            if busy_until_s.pop(donor, None) is not None:
                tried.clear()
            tried.add(donor)
            num_before = partial.num_chunks
            try:
                header = await self._download_from(donor, partial)
                return await asyncio.to_thread(_deserialise, header, partial.data)
            except RemoteError as error:
                last_error = f"{donor}: {error.message}"
                if isinstance(error, BusyError) and error.retry_after_s:
                    busy_until_s[donor] = clock_s() + max(error.retry_after_s, LEAST_WAIT_S)
                    tried.discard(donor)
                if partial.is_complete:  # and unreadable
                    partial.start_over()
                elif isinstance(error, PeerGoneError) and partial.num_chunks > num_before:  # the connection broke
                    tried.discard(donor)

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
                fits = len(chunk) == min(CHUNK_BYTES, header.num_bytes - number * CHUNK_BYTES)
                if not fits or await asyncio.to_thread(_digest, chunk) != header.chunk_hashes[number]:
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


def _digest(chunk: bytes) -> bytes:
    return blake3(chunk).digest()


def _deserialise(header: Snapshot, data: bytearray) -> Downloaded:
    """The state in a complete snapshot. Raises BadMessageError if it is invalid. safetensors holds data only: nothing is executed."""
    try:
        tensors = tensors_of_file(data)
        history = history_from(header.metadata)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, OverflowError, RecursionError) as error:
        raise BadMessageError(f"the state is not readable: {error}") from None
    if not all(math.isfinite(entry.loss) for entry in history):
        raise BadMessageError("the state's history has a loss that is not finite")
    return Downloaded(header.step, header.lineage, tensors, history)
