"""The accounts that a daemon keeps on disk: those that count, thinned with their age, each with its own row; and the rows of a few."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass

import msgpack

from peerd.config.receipt_file import pack_account, pack_row, unpack_account, unpack_row
from peerd.policy.step.account_book import Kept
from peerd.policy.step.accounts import EVERY, NOBODY, SignedAccount, WorkDone, Works, place_of, thinned
from peerd.policy.step.work_receipts import ProvenRow
from peerd.table.record import PeerId, RunId

DAY_S = 86_400
DAYS_WITH_ROWS = 8
"""Of so many days the rows of one account are kept, to tell what was done in the last week."""
THINNED_EACH = 64
"""Accounts are thinned whenever so many have come."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS accounts
    (stage INTEGER, step INTEGER, time_s INTEGER NOT NULL, signed BLOB NOT NULL, own BLOB, rows BLOB, PRIMARY KEY (stage, step))
    WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class StoredAccount:
    """An account, and the row of the daemon's own peer in it, if it has one."""

    signed: SignedAccount
    own: ProvenRow | None


class AccountStore:
    """The table of accounts in a run's history. Every method runs on the history's thread."""

    def __init__(self, db: sqlite3.Connection, run: RunId, me: PeerId, organiser: PeerId = NOBODY) -> None:
        """The database has the table of `SCHEMA`. `organiser`: the name of the run's organiser as a signer."""
        self._db, self._run, self._me, self._organiser = db, run, me, organiser

    def keep(self, kept: Kept) -> None:
        """Keep an account that counts; again where it has more signatures now."""
        signed, works = kept.signed, kept.works
        account = signed.account
        own = None
        if self._me in works:
            place, path = place_of(works, self._me)
            own = pack_row(ProvenRow(works[self._me], place, len(works), path))
        with self._db:
            self._db.execute(
                "INSERT OR REPLACE INTO accounts VALUES (?, ?, ?, ?, ?, ?)",
                (account.stage, account.step, signed.time_s, pack_account(signed), own, _pack_rows(works)),
            )
            self._drop_rows(account.stage)
            (number,) = self._db.execute("SELECT count(*) FROM accounts WHERE stage = ?", (account.stage,)).fetchone()
            if number % THINNED_EACH == 0:
                self._thin(account.stage)

    def _drop_rows(self, stage: int) -> None:
        """Leave the rows of the newest account, and of one of each of the last days."""
        with_rows = self._db.execute(
            "SELECT step, time_s FROM accounts WHERE stage = ? AND rows IS NOT NULL ORDER BY step DESC", (stage,)
        ).fetchall()
        kept_days, newest = set[int](), with_rows[0][1] // DAY_S
        for number, (step, time_s) in enumerate(reversed(with_rows)):
            day = time_s // DAY_S
            is_first = day not in kept_days and newest - day < DAYS_WITH_ROWS
            kept_days.add(day)
            if not is_first and number < len(with_rows) - 1:
                self._db.execute("UPDATE accounts SET rows = NULL WHERE stage = ? AND step = ?", (stage, step))

    def _thin(self, stage: int) -> None:
        found = [stored.signed for stored in self.of_stage(stage)]
        wanted = {signed.account.step for signed in thinned(found, self._organiser)}
        gone = [(stage, signed.account.step) for signed in found if signed.account.step not in wanted]
        self._db.executemany("DELETE FROM accounts WHERE stage = ? AND step = ? AND rows IS NULL", gone)

    def stages(self) -> list[int]:
        return [stage for (stage,) in self._db.execute("SELECT DISTINCT stage FROM accounts ORDER BY stage")]

    def newest(self) -> list[SignedAccount]:
        """The newest account of each stage."""
        return [account[0] for stage in self.stages() if (account := self.with_rows(stage)) is not None]

    def of_stage(self, stage: int, since: int = 0) -> list[StoredAccount]:
        """The accounts of a stage from this step on, in order."""
        rows = self._db.execute("SELECT signed, own FROM accounts WHERE stage = ? AND step >= ? ORDER BY step", (stage, since)).fetchall()
        return [StoredAccount(unpack_account(signed, self._run, stage), unpack_row(own) if own else None) for signed, own in rows]

    def with_rows(self, stage: int, step: int | None = None, before_s: int = 0) -> tuple[SignedAccount, Works] | None:
        """An account with its rows, if they are kept: that of a step, or the newest, or the newest that was signed before a time.

        Where none is so old, the oldest, unless the count begins with it: then None, since all of the count is younger.
        """
        rows = self._db.execute(
            "SELECT step, time_s FROM accounts WHERE stage = ? AND rows IS NOT NULL ORDER BY step DESC", (stage,)
        ).fetchall()
        steps = [each for each, time_s in rows if (step is None or each == step) and (not before_s or time_s < before_s)]
        wanted = steps[0] if steps else rows[-1][0] if rows and before_s else None
        if wanted is None:
            return None
        signed, packed = self._db.execute("SELECT signed, rows FROM accounts WHERE stage = ? AND step = ?", (stage, wanted)).fetchone()
        found = unpack_account(signed, self._run, stage)
        is_first = bool(before_s) and not steps and found.account.step - found.account.first_step <= EVERY
        return None if is_first else (found, _unpack_rows(packed))


def _pack_rows(works: Mapping[PeerId, WorkDone]) -> bytes:
    return bytes(msgpack.packb([[peer, row.steps, row.microbatches, row.tokens] for peer, row in works.items()]))


def _unpack_rows(raw: bytes) -> Works:
    return {PeerId(peer): WorkDone(*counts) for peer, *counts in msgpack.unpackb(raw)}
