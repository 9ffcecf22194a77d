"""The event loop's interface to the history: it notes rows without waiting, and a separate thread writes them.

A history that cannot be written (full or broken disk) never stops the run: the log and `health` say so, and the rows wait for the next
attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from peerd.background import INTERNAL_ERRORS
from peerd.errors import DiskError, PeerdError, disk_error
from peerd.observe.entries import Event, FinishedStep, Sample
from peerd.observe.store import HistoryStore
from peerd.policy.step.roster import Roster
from peerd.table.record import Evaluation, PeerId
from peerd.unwritten import UNWRITTEN

PRUNE_PERIOD_S = 600.0
MOST_WAITING = 10_000
"""Of each kind of row, while they cannot be written."""
HISTORY = "history"
Found = TypeVar("Found")


class Archive:
    """The history of one run. Contract: only the event loop calls `note_*`; no method raises; `read` sees everything noted before."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="history")
        self._store: HistoryStore | None = None
        self._pruned_s = 0.0
        self._noted: dict[str, list[Any]] = {}
        """Rows that are not written yet, by the parameter of `HistoryStore.add` that takes them."""
        self.num_noted = 0
        """Number of rows noted. While it is unchanged, a query for the newest rows returns the same as before."""

    def note_step(self, step: FinishedStep) -> None:
        self._note("steps", step)

    def note_sample(self, sample: Sample) -> None:
        self._note("samples", sample)

    def note_event(self, event: Event) -> None:
        self._note("events", event)

    def note_average(self, roster: Roster, tokens: int) -> None:
        """Note an applied average and the number of tokens of one of its microbatches."""
        self._note("averages", (roster, tokens))

    def note_listed(self, peer: PeerId, is_listed: bool) -> None:
        """Note whether a peer may be named in tables of who computed how much."""
        self._note("listed", (peer, is_listed))

    def note_evaluation(self, evaluation: Evaluation) -> None:
        self._note("evaluations", evaluation)

    def _note(self, kind: str, row: object) -> None:
        self._noted.setdefault(kind, []).append(row)
        self.num_noted += 1

    @property
    def has_news(self) -> bool:
        """True if anything other than samples is noted and not yet written."""
        return bool(self._noted.keys() - {"samples"})

    async def write(self) -> None:
        """Write everything noted to disk. Returns when that is done or has failed."""
        await self._run(lambda _store: None)

    async def read(self, query: Callable[[HistoryStore], Found]) -> Found | None:
        """The result of a query, or None if the history cannot be read."""
        return await self._run(query)

    async def close(self) -> None:
        await self.write()
        await asyncio.get_running_loop().run_in_executor(self._pool, self._close)
        self._pool.shutdown(wait=False)

    async def _run(self, query: Callable[[HistoryStore], Found]) -> Found | None:
        noted, self._noted = self._noted, {}
        waiting: dict[str, list[Any]] = {}

        def work() -> Found | None:
            nonlocal waiting
            try:
                waiting = noted
                store = self._store = self._store or HistoryStore(self._path)
                if noted:
                    store.add(**noted)
                waiting = {}
                self._prune(store)
                found = query(store)
            except (sqlite3.Error, OSError) as error:
                UNWRITTEN.note(HISTORY, _told(self._path, error))
                self._close()  # the next write opens it again, which sets a damaged file aside
                return None
            except Exception as error:  # a bug: the run continues without these rows
                INTERNAL_ERRORS.report(HISTORY, error)
                waiting = {}
                return None
            UNWRITTEN.forget(HISTORY)
            return found

        found = await asyncio.get_running_loop().run_in_executor(self._pool, work)
        for kind, rows in waiting.items():
            self._noted[kind] = (rows + self._noted.get(kind, []))[-MOST_WAITING:]
        return found

    def _prune(self, store: HistoryStore) -> None:
        now_s = time.time()
        if now_s - self._pruned_s > PRUNE_PERIOD_S:
            self._pruned_s = now_s
            store.prune(now_s)

    def _close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            with contextlib.suppress(sqlite3.Error):
                store.close()


def _told(path: Path, error: sqlite3.Error | OSError) -> PeerdError:
    """The error with what to do. SQLite's own numbers stand for the system's."""
    if isinstance(error, OSError):
        return disk_error(path, error)
    meant = {sqlite3.SQLITE_FULL: errno.ENOSPC, sqlite3.SQLITE_READONLY: errno.EROFS, sqlite3.SQLITE_IOERR: errno.EIO}
    number = meant.get(getattr(error, "sqlite_errorcode", 0) & 0xFF)
    if number is None:
        return DiskError(f"{path}: {error}", "check the file and its folder")
    return disk_error(path, OSError(number, str(error)))
