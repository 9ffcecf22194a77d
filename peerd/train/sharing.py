"""Transfers the run's token file between peers: sent at a bounded rate, fetched chunk by chunk, each chunk checked by its hash.

A peer fetches only if its volunteer asked for it. A fetch survives interruptions, and continues with another donor if one fails.
The tokenizer is transferred in the same way, for export and generation.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from typing import IO

import structlog
from blake3 import blake3

from peerd.config.atomic import commit
from peerd.config.data_config import DataConfig
from peerd.data.tokenizer import MAX_TOKENIZER_BYTES, keep_tokenizer, kept_tokenizer
from peerd.data.tokens import CHUNK_BYTES, TokenFile, chunk_hashes, hash_of_hashes, kept_tokens
from peerd.errors import BadMessageError, BusyError, DiskError, PeerGoneError, RemoteError, StageError, WrongStateError
from peerd.link.links import CHUNK_BYTES as MESSAGE_BYTES
from peerd.policy.route.admission import givers_of_data
from peerd.swarm.membership import Membership
from peerd.table.record import PeerId
from peerd.unwritten import UNWRITTEN
from peerd.wire.clients import DataClient

GIVEN_BYTES_PER_S = 8 << 20
"""Total rate for all callers, so that training keeps most of a home's upload."""
MAX_CALLERS = 2
MAX_FETCHED_BYTES = 64 << 30
RETRY_PAUSE_S = 3.0
LOG = structlog.get_logger()


class DataGiver:
    """Answers GET_DATA with the token file, once this peer has it, and with its tokenizer."""

    def __init__(self, data: DataConfig, cache: Path) -> None:
        self._data = data
        self._cache = cache
        self._callers = 0
        self._free_s = 0.0
        """Time at which the next bytes may be sent."""
        self._hashes: dict[str, asyncio.Future[list[bytes]]] = {}
        self.has_tokens = False

    async def give(self, digest: str, first_chunk: int) -> tuple[int, Sequence[bytes], AsyncGenerator[bytes]]:
        """The file's size, its chunks' hashes, and its bytes from `first_chunk` on. WrongStateError if this peer does not have it."""
        path = self._path_of(digest)
        if self._callers >= MAX_CALLERS:
            raise BusyError(f"{MAX_CALLERS} peers already fetch data from this peer")
        if digest not in self._hashes:
            self._hashes[digest] = asyncio.ensure_future(asyncio.to_thread(chunk_hashes, path))
        try:
            hashes = await asyncio.shield(self._hashes[digest])  # hashing a large file may outlast the caller's patience
            num_bytes = path.stat().st_size
        except OSError:
            self._hashes.pop(digest, None)
            raise WrongStateError("the data is not here any more") from None
        return num_bytes, hashes, self._read(path, min(first_chunk * CHUNK_BYTES, num_bytes))

    def _path_of(self, digest: str) -> Path:
        if digest and digest == self._data.tokenizer_blake3 and (path := kept_tokenizer(digest, self._cache)).is_file():
            return path
        if not digest or digest != self._data.blake3 or not self.has_tokens:
            raise WrongStateError("this peer does not have that data")
        return self._cache / f"{digest}.bin"

    async def _read(self, path: Path, start: int) -> AsyncGenerator[bytes]:
        self._callers += 1
        try:
            with path.open("rb") as stream:
                stream.seek(start)
                while message := await asyncio.to_thread(stream.read, MESSAGE_BYTES):
                    now_s = time.monotonic()
                    self._free_s = max(self._free_s, now_s) + len(message) / GIVEN_BYTES_PER_S
                    yield message
                    await asyncio.sleep(self._free_s - now_s)
        finally:
            self._callers -= 1


class DataFetcher:
    """Fetches the token file into the cache, from any peer that has it."""

    def __init__(self, client: DataClient, membership: Membership, data: DataConfig, cache: Path, patience_s: float) -> None:
        self._client = client
        self._membership = membership
        self._data = data
        self._cache = cache
        self._patience_s = patience_s
        self.bytes_done = 0
        self.bytes_total = data.num_tokens * data.token_bytes

    async def fetch(self) -> TokenFile:
        """Returns once the file is complete, however long that takes, on a full disk too. StageError if that is impossible."""
        whole = False
        while (kept := await asyncio.to_thread(kept_tokens, self._data, self._cache)) is None:
            if whole:
                raise StageError("the run's manifest names its data by two hashes that do not agree", "tell its organiser")
            try:
                with UNWRITTEN.trying("the run's data", self._cache):
                    part_file = self._cache / f"{self._data.blake3}.part"
                    self._check_room(part_file)
                    with _owned(part_file) as part:
                        whole = part is not None and await self._fetch_into(part)
            except RemoteError as error:
                LOG.info("the data could not be fetched yet", reason=error.message)
            if not whole:
                await asyncio.sleep(RETRY_PAUSE_S)
        await self.fetch_tokenizer()
        return kept

    async def fetch_tokenizer(self) -> None:
        """Fetch the run's tokenizer into the cache, if the run has one and the cache does not. Training does not need it."""
        digest = self._data.tokenizer_blake3
        if not digest or kept_tokenizer(digest, self._cache).is_file():
            return
        for donor in givers_of_data(self._membership.live()):
            content = b""
            try:
                header, messages = await self._client.get_data(donor.peer, bytes.fromhex(digest), 0, self._patience_s)
                if header.num_bytes > MAX_TOKENIZER_BYTES:
                    raise BadMessageError(f"a tokenizer of {header.num_bytes} bytes")
                async for message in messages:
                    content += message
                    if len(content) > header.num_bytes:
                        raise BadMessageError("more bytes than the header says")
                if blake3(content).hexdigest() == digest:
                    await asyncio.to_thread(keep_tokenizer, content, self._cache)
                    return
            except RemoteError as error:
                LOG.info("the tokenizer could not be fetched", donor=donor.peer, reason=error.message)

    def _check_room(self, part_file: Path) -> None:
        self._cache.mkdir(parents=True, exist_ok=True)
        if self.bytes_total > MAX_FETCHED_BYTES:
            raise StageError(
                f"the data is {self.bytes_total / 1e9:.0f} GB, more than a peer fetches from others",
                "get it elsewhere and name it with --data",
            )
        free = shutil.disk_usage(self._cache).free
        needed = self.bytes_total - (part_file.stat().st_size if part_file.exists() else 0)
        if needed > free:
            raise DiskError(f"the data needs {needed / 1e9:.1f} GB in {self._cache} and {free / 1e9:.1f} GB is free", "free some space")

    async def _fetch_into(self, part: IO[bytes]) -> bool:
        """Fetch the missing part from one donor after another, then give the file its name. RemoteError if no donor gave the rest."""
        last_error = RemoteError("no live peer has the data")
        for donor in givers_of_data(self._membership.live()):
            try:
                await self._fetch_from(donor.peer, part)
            except RemoteError as error:
                last_error = error
                continue
            part.flush()
            await asyncio.to_thread(commit, self._cache / f"{self._data.blake3}.part", self._cache / f"{self._data.blake3}.bin")
            LOG.info("the data has been fetched", bytes=self.bytes_done, donor=donor.peer)
            return True
        raise last_error

    async def _fetch_from(self, donor: PeerId, part: IO[bytes]) -> None:
        first = os.fstat(part.fileno()).st_size // CHUNK_BYTES
        header, messages = await self._client.get_data(donor, bytes.fromhex(self._data.blake3), first, self._patience_s)
        hashes = header.chunk_hashes
        if header.num_bytes != self.bytes_total or hash_of_hashes(hashes) != self._data.chunks_blake3:
            raise BadMessageError("the peer offers other data than the run's")
        sound = await asyncio.to_thread(_sound_chunks, Path(part.name), hashes[:first])
        part.truncate(sound * CHUNK_BYTES)
        if sound < first:  # the disk has lost data: fetch again from the last sound chunk
            raise BadMessageError("the part of the data that was fetched before is damaged")
        self.bytes_done = sound * CHUNK_BYTES
        pending = bytearray()
        async with contextlib.aclosing(messages):
            async for message in messages:
                pending += message
                number = self.bytes_done // CHUNK_BYTES
                due = min(CHUNK_BYTES, self.bytes_total - self.bytes_done)
                if len(pending) > due or number >= len(hashes):
                    raise BadMessageError("more bytes than a chunk has")
                if len(pending) == due:
                    await asyncio.to_thread(_append, part, bytes(pending), hashes[number], number)
                    self.bytes_done += due
                    pending.clear()
        if self.bytes_done != self.bytes_total:
            raise PeerGoneError("the data ended early")


def _append(part: IO[bytes], chunk: bytes, digest: bytes, number: int) -> None:
    if blake3(chunk).digest() != digest:
        raise BadMessageError(f"chunk {number} of the data does not match its hash")
    part.write(chunk)
    part.flush()


def _sound_chunks(path: Path, hashes: Sequence[bytes]) -> int:
    """The number of chunks at the beginning of a file whose hashes are right."""
    with path.open("rb") as stream:
        for number, digest in enumerate(hashes):
            if blake3(stream.read(CHUNK_BYTES)).digest() != digest:
                return number
    return len(hashes)


@contextlib.contextmanager
def _owned(path: Path) -> Iterator[IO[bytes] | None]:
    """The unfinished file, locked; None while another daemon of this user fetches the same file."""
    with path.open("ab") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        yield stream
