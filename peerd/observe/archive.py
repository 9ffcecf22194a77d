"""The event loop's interface to the history: it notes rows without waiting, and a separate thread writes them.

A history that cannot be written (full or broken disk) never stops the run: the log says so once, and the next rows are tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import structlog

from peerd.observe.entries import Event, FinishedStep, Sample
from peerd.observe.store import HistoryStore
from peerd.policy.step.roster import Roster
from peerd.table.record import Evaluation

PRUNE_PERIOD_S = 600.0
LOG = structlog.get_logger()
Found = TypeVar("Found")


class Archive:
    """The history of one run. Contract: only the event loop calls `note_*`; no method raises; `read` sees everything noted before."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="history")
        self._store: HistoryStore | None = None
        self._complained = False
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

        def work() -> Found | None:
            try:
                store = self._store = self._store or HistoryStore(self._path)
                if noted:
                    store.add(**noted)
                self._prune(store)
                found = query(store)
            except Exception as error:  # outermost frame of the thread: the run continues without the history
                self._complain(error)
                return None
            self._complained = False
            return found

        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def _prune(self, store: HistoryStore) -> None:
        now_s = time.time()
        if now_s - self._pruned_s > PRUNE_PERIOD_S:
            self._pruned_s = now_s
            store.prune(now_s)

    def _complain(self, error: Exception) -> None:
        if not self._complained:
            LOG.warning("the history cannot be written", file=str(self._path), error=str(error))
        self._complained = True
        self._close()  # the next write opens it again, which sets a damaged file aside

    def _close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            with contextlib.suppress(sqlite3.Error):
                store.close()
