"""Rule J2 (download): the chunks of one file come from several donors at once, of each as many as its line carries.

The file is a snapshot of a stage's state, or an average.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable
from contextlib import AbstractAsyncContextManager
from typing import Generic, Protocol, TypeVar

from peerd.background import start
from peerd.errors import BadMessageError, RemoteError, StageError, WrongStateError
from peerd.policy.route.chunk_shares import AskingPace, ChunkShares
from peerd.table.record import PeerId
from peerd.wire.chunk_streams import Offer

GRACE_S, CLOSING_S = 0.5, 0.25
"""How much longer than the first offer others may take until one is chosen; how long it may take to tell donors of the end."""


Header = TypeVar("Header")


class Gathered(Protocol[Header]):
    """The chunks of one file that have come so far. Shares of it are numbers of chunks, from the first one on that is wanted."""

    @property
    def header(self) -> Header | None:
        """The header of the file that is downloaded; None while the donors' offers are compared."""

    @property
    def shares(self) -> ChunkShares: ...

    @property
    def is_complete(self) -> bool: ...

    def check(self, header: Header) -> None:
        """Raise RemoteError if this cannot be the header of such a file. It is called off the event loop."""

    def begin(self, header: Header) -> None:
        """Download this file, whose header was checked."""

    def claim_of(self, header: Header) -> Hashable:
        """What donors of one file say alike of it."""

    def newness_of(self, header: Header) -> int:
        """A number by which the newest is taken of files that as many donors offer."""

    def number_of(self, share: int) -> int:
        """The number in the file of a chunk of the shares."""

    def size_of(self, number: int) -> int:
        """Bytes of a chunk, by its number in the file."""

    async def write(self, number: int, chunk: bytes) -> bool:
        """Check a chunk and write it. Returns whether it was sound. Raises OSError."""

    def came(self, number: int, chunk: bytes) -> None:
        """A sound chunk is written. One that came before is ignored."""


class OtherFileError(WrongStateError):
    """This donor gives another file than the one that is downloaded."""


class Gathering(Generic[Header]):
    """The donors that are asked for chunks of one file at this moment, each by a task."""

    def __init__(self, open_at: Callable[[PeerId], AbstractAsyncContextManager[Offer[Header]]], partial: Gathered[Header]) -> None:
        """`open_at` opens a donor's file."""
        self._open_at = open_at
        self._partial = partial
        self._tasks: dict[PeerId, asyncio.Task[None]] = {}
        self._offers: dict[PeerId, Header] = {}
        """What donors offer while none of it is chosen."""
        self._began_s = time.monotonic()
        self._choose_at_s: float | None = None
        self._chosen = asyncio.Event()
        self._news = asyncio.Event()
        self._changed = asyncio.Event()
        """Set, and replaced by a new one, when chunks that were asked for may have to be asked of others, or all are here."""
        self._silent: set[PeerId] = set()
        self.agreeing: set[PeerId] = set()
        """Those that have offered the very file that is downloaded."""
        self._given: Counter[PeerId] = Counter()
        """Chunks that each donor has given since it was last asked."""
        if partial.header is not None:
            self._chosen.set()

    @property
    def donors(self) -> Collection[PeerId]:
        return self._tasks.keys()

    @property
    def has_chosen(self) -> bool:
        """Whether the file to download is chosen."""
        return self._chosen.is_set()

    def ask(self, donor: PeerId) -> None:
        """Ask one more donor."""
        self._given[donor] = 0
        self._silent.add(donor)
        self._tasks[donor] = start(self._from(donor), expects=(RemoteError,))
        self._tasks[donor].add_done_callback(lambda _task: self._news.set())

    async def ended(self, timeout_s: float) -> dict[PeerId, RemoteError | None]:
        """Wait for donors that end, and at most so long. Returns them with their errors."""
        waits_s = timeout_s if self._choose_at_s is None else max(0.0, min(timeout_s, self._choose_at_s - time.monotonic()))
        try:
            async with asyncio.timeout(waits_s):
                await self._news.wait()
        except TimeoutError:
            pass
        self._news.clear()
        over = {donor: task for donor, task in self._tasks.items() if task.done()}
        self._tasks = {donor: task for donor, task in self._tasks.items() if donor not in over}
        self._choose()
        return {donor: _error_of(task) for donor, task in over.items()}

    @property
    def silent(self) -> set[PeerId]:
        """Those that are asked and have offered nothing yet."""
        return self._silent & self._tasks.keys()

    @property
    def givers(self) -> set[PeerId]:
        """Those that have given a chunk since they were last asked."""
        return {donor for donor, number in self._given.items() if number}

    async def close(self) -> None:
        """End all streams. A donor that has nothing more to send is told so, and need not keep its copy."""
        tasks = [*self._tasks.values()]
        if tasks and self._partial.is_complete:
            await asyncio.wait(tasks, timeout=CLOSING_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()

    def _choose(self) -> None:
        """Choose among the offers once all donors have answered, or have had time to: the one of most donors, of these the newest."""
        if self._chosen.is_set() or not self._offers:
            return
        if len(self._offers) < len(self._tasks) and (self._choose_at_s is None or time.monotonic() < self._choose_at_s):
            return
        partial = self._partial
        votes = Counter(map(partial.claim_of, self._offers.values()))
        best = max(self._offers.values(), key=lambda header: (votes[partial.claim_of(header)], partial.newness_of(header)))
        partial.begin(best)
        self._choose_at_s = None
        self._chosen.set()

    async def _from(self, donor: PeerId) -> None:
        async with self._open_at(donor) as opened:
            header = opened.header
            self._silent.discard(donor)
            await asyncio.to_thread(self._partial.check, header)
            if not self._chosen.is_set():
                self._offers[donor] = header
                if self._choose_at_s is None:
                    now_s = time.monotonic()
                    self._choose_at_s = now_s + max(GRACE_S, now_s - self._began_s)
                self._news.set()
                try:
                    await self._chosen.wait()
                finally:
                    del self._offers[donor]
            chosen = self._partial.header
            if chosen is None or self._partial.claim_of(header) != self._partial.claim_of(chosen):
                raise OtherFileError("it gives another one than others do")
            self.agreeing.add(donor)
            await self._take_chunks(donor, opened)

    async def _take_chunks(self, donor: PeerId, opened: Offer[Header]) -> None:
        partial, pace, asked = self._partial, AskingPace(), deque[int]()
        shares = partial.shares
        try:
            while shares.num_left:
                while pace.num_asked < pace.most and (share := shares.next_for(donor)) is not None:
                    opened.ask(partial.number_of(share))
                    pace.asked(time.monotonic())
                    asked.append(share)
                if not asked:  # others have yet to send what they were asked for, and may fail to
                    await self._changed.wait()
                    continue
                share = asked.popleft()
                number = partial.number_of(share)
                chunk = await opened.take(partial.size_of(number))
                pace.came(time.monotonic())
                self._given[donor] += 1
                if shares.is_due(share):
                    if not await _written(partial, number, chunk):
                        raise BadMessageError(f"chunk {number} does not match its hash")
                    partial.came(number, chunk)
            self._tell_change()
            if not asked:
                await opened.end()
        finally:
            shares.gone(donor)
            self._tell_change()

    def _tell_change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


async def _written(partial: Gathered[Header], number: int, chunk: bytes) -> bool:
    """Whether a chunk was sound, and is written. Raises StageError if the disk fails."""
    try:
        return await partial.write(number, chunk)
    except OSError as error:
        raise StageError(f"the state cannot be written to the disk: {error}", "free some disk space, or try another disk") from None


def _error_of(task: asyncio.Task[None]) -> RemoteError | None:
    error = task.exception()
    if error is not None and not isinstance(error, RemoteError):
        raise error
    return error
