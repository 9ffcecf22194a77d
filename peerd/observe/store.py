"""The history of one run on disk: an SQLite file in the home, bounded in size and intact after SIGKILL.

Every method runs on the history's thread (archive.py). The caller handles sqlite3.Error. A file that cannot be read when it is opened
is set aside, and a new one is created.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path

import structlog

from peerd.observe.account_store import SCHEMA as ACCOUNTS
from peerd.observe.account_store import AccountStore
from peerd.observe.entries import Event, FinishedStep, Sample
from peerd.observe.thinning import TIERS, thinned
from peerd.policy.step.accounts import NOBODY
from peerd.policy.step.contributions import StageTally, Tally
from peerd.policy.step.roster import Roster
from peerd.table.record import Evaluation, PeerId, RunId

VERSION = 1
MAX_STEPS = 50_000
MAX_EVENTS = 10_000
MAX_TALLIES = 20_000
DAMAGED = ".damaged"
LOG = structlog.get_logger()
_SCHEMA = """
CREATE TABLE IF NOT EXISTS steps (step INTEGER PRIMARY KEY, loss REAL, tokens INTEGER NOT NULL, time_s REAL);
CREATE TABLE IF NOT EXISTS evaluations (step INTEGER PRIMARY KEY, loss REAL NOT NULL);
CREATE TABLE IF NOT EXISTS samples (time_s REAL PRIMARY KEY, span_s REAL NOT NULL, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS events
    (number INTEGER PRIMARY KEY AUTOINCREMENT, time_s REAL NOT NULL, kind TEXT NOT NULL, peer TEXT NOT NULL, stage INTEGER,
    text TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS tallies
    (stage INTEGER, peer TEXT, steps INTEGER NOT NULL, microbatches INTEGER NOT NULL, tokens INTEGER, PRIMARY KEY (stage, peer))
    WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS unlisted (peer TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counted
    (stage INTEGER PRIMARY KEY, first_step INTEGER NOT NULL, last_step INTEGER NOT NULL, steps INTEGER NOT NULL);
"""


class HistoryStore:
    """Contract: a step is counted once per stage, however often it is reported; a later report fills in unknown values."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            self._db = self._open()
        except sqlite3.OperationalError:  # no disk or no permission: a new file would fail, too
            raise
        except sqlite3.DatabaseError as error:
            self._set_aside(str(error))
            self._db = self._open()

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._path, check_same_thread=False, timeout=5.0)
        try:
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=NORMAL")
            (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if verdict != "ok" or version not in (0, VERSION):
                raise sqlite3.DatabaseError(f"{verdict}; of version {version}")
            with db:
                db.executescript(_SCHEMA + ACCOUNTS)
                if not any(name == "tokens" for _, name, *_ in db.execute("PRAGMA table_info(tallies)")):
                    db.execute("ALTER TABLE tallies ADD COLUMN tokens INTEGER")  # old rows keep NULL: their tokens were not counted
                db.execute(f"PRAGMA user_version={VERSION}")
        except BaseException:
            db.close()
            raise
        return db

    def _set_aside(self, reason: str) -> None:
        aside = self._path.with_name(self._path.name + DAMAGED)
        self._path.replace(aside)
        for suffix in ("-wal", "-shm"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
        LOG.warning("the history was damaged and is set aside", file=str(aside), reason=reason)

    def close(self) -> None:
        self._db.close()

    def accounts(self, run: RunId, me: PeerId, organiser: PeerId = NOBODY) -> AccountStore:
        """The accounts of this run that this file keeps for a peer."""
        return AccountStore(self._db, run, me, organiser)

    # Writing

    def add(
        self,
        steps: Iterable[FinishedStep] = (),
        samples: Iterable[Sample] = (),
        events: Iterable[Event] = (),
        averages: Iterable[tuple[Roster, int]] = (),
        evaluations: Iterable[Evaluation] = (),
        listed: Iterable[tuple[PeerId, bool]] = (),
    ) -> None:
        """Add rows. A later evaluation of a step replaces the earlier one; each average comes with its tokens per microbatch.

        `listed`: peers with whether they may be named.
        """
        with self._db:
            self._db.executemany(
                "INSERT INTO steps VALUES (?, ?, ?, ?) ON CONFLICT (step) DO UPDATE SET"
                " loss = coalesce(excluded.loss, loss), time_s = coalesce(excluded.time_s, time_s)",
                [(s.step, s.loss, s.tokens, s.time_s) for s in steps],
            )
            self._db.executemany("INSERT OR REPLACE INTO samples VALUES (?, ?, ?)", [_row_of(sample) for sample in samples])
            self._db.executemany(
                "INSERT INTO events (time_s, kind, peer, stage, text) VALUES (?, ?, ?, ?, ?)",
                [(e.time_s, e.kind, e.peer, e.stage, e.text) for e in events],
            )
            self._db.executemany("INSERT OR REPLACE INTO evaluations VALUES (?, ?)", [(each.step, each.loss) for each in evaluations])
            for roster, tokens in averages:
                self._count(roster, tokens)
            for peer, is_listed in listed:
                self._db.execute(
                    "DELETE FROM unlisted WHERE peer = ?" if is_listed else "INSERT OR IGNORE INTO unlisted VALUES (?)", (peer,)
                )

    def _count(self, roster: Roster, tokens: int) -> None:
        """Credit the members of an applied average with their microbatches."""
        known = self._db.execute("SELECT last_step FROM counted WHERE stage = ?", (roster.stage,)).fetchone()
        if known is not None and roster.step <= known[0]:
            return
        self._db.execute(
            "INSERT INTO counted VALUES (?, ?, ?, 1) ON CONFLICT (stage) DO UPDATE SET last_step = excluded.last_step, steps = steps + 1",
            (roster.stage, roster.step, roster.step),
        )
        self._db.executemany(
            "INSERT INTO tallies (stage, peer, steps, microbatches, tokens) VALUES (?, ?, 1, ?, ?) ON CONFLICT (stage, peer)"
            " DO UPDATE SET steps = steps + 1, microbatches = microbatches + excluded.microbatches, tokens = tokens + excluded.tokens",
            [(roster.stage, peer, done.bit_count(), done.bit_count() * tokens) for peer, done in roster.computed.items() if done],
        )

    def prune(self, now_s: float) -> None:
        """Merge old samples, and delete rows beyond the bounds: every second one of the older steps, the oldest events."""
        with self._db:
            for age_s, span_s in TIERS:
                self._thin(now_s - age_s, span_s)
            (steps, newest) = self._db.execute("SELECT count(*), max(step) FROM steps").fetchone()
            if steps > MAX_STEPS:
                self._db.execute("DELETE FROM steps WHERE step % 2 = 1 AND step < ?", (newest - MAX_STEPS // 4,))
                self._db.execute("DELETE FROM steps WHERE step NOT IN (SELECT step FROM steps ORDER BY step DESC LIMIT ?)", (MAX_STEPS,))
            self._db.execute(
                "DELETE FROM evaluations WHERE step NOT IN (SELECT step FROM evaluations ORDER BY step DESC LIMIT ?)", (MAX_STEPS,)
            )
            self._db.execute("DELETE FROM events WHERE number <= (SELECT max(number) FROM events) - ?", (MAX_EVENTS,))
            self._db.execute(
                "DELETE FROM tallies WHERE (stage, peer) NOT IN (SELECT stage, peer FROM tallies ORDER BY microbatches DESC LIMIT ?)",
                (MAX_TALLIES,),
            )

    def _thin(self, before_s: float, span_s: float) -> None:
        limit_s = before_s // span_s * span_s  # whole spans only
        rows = self._db.execute(
            "SELECT time_s, span_s, body FROM samples WHERE time_s < ? AND span_s < ? ORDER BY time_s", (limit_s, span_s / 2)
        ).fetchall()
        if len(rows) > 1:
            self._db.executemany("DELETE FROM samples WHERE time_s = ?", [(row[0],) for row in rows])
            kept = thinned([_sample_of(row) for row in rows], span_s)
            self._db.executemany("INSERT OR REPLACE INTO samples VALUES (?, ?, ?)", [_row_of(sample) for sample in kept])

    # Reading

    def steps(self, since: int = 0, most: int = MAX_STEPS) -> list[FinishedStep]:
        """The newest `most` steps numbered `since` and later, in order."""
        rows = self._db.execute("SELECT * FROM steps WHERE step >= ? ORDER BY step DESC LIMIT ?", (since, most)).fetchall()
        return [FinishedStep(step=step, loss=loss, tokens=tokens, time_s=time_s) for step, loss, tokens, time_s in reversed(rows)]

    def evaluations(self, since: int = 0, most: int = MAX_STEPS) -> list[Evaluation]:
        """The newest `most` evaluations of step `since` and later, in order."""
        rows = self._db.execute("SELECT step, loss FROM evaluations WHERE step >= ? ORDER BY step DESC LIMIT ?", (since, most)).fetchall()
        return [Evaluation(step, loss) for step, loss in reversed(rows)]

    def samples(self, since_s: float = 0.0) -> list[Sample]:
        rows = self._db.execute("SELECT time_s, span_s, body FROM samples WHERE time_s > ? ORDER BY time_s", (since_s,))
        return [_sample_of(row) for row in rows]

    def events(self, after: int = 0, most: int = MAX_EVENTS) -> list[Event]:
        """The newest `most` events numbered above `after`, in order."""
        rows = self._db.execute(
            "SELECT number, time_s, kind, peer, stage, text FROM events WHERE number > ? ORDER BY number DESC LIMIT ?", (after, most)
        ).fetchall()
        return [Event(number=n, time_s=t, kind=kind, peer=peer, stage=stage, text=text) for n, t, kind, peer, stage, text in reversed(rows)]

    def churn(self, since_s: float, span_s: float) -> list[tuple[float, str, int]]:
        """Number of events about peers by time span and kind, in order: middle of the span, kind, number."""
        rows = self._db.execute(
            "SELECT CAST(time_s / ? AS INTEGER) AS span, kind, count(*) FROM events WHERE time_s > ? AND peer != ''"
            " GROUP BY span, kind ORDER BY span, kind",
            (span_s, since_s),
        )
        return [((span + 0.5) * span_s, kind, count) for span, kind, count in rows]

    def unlisted(self) -> set[PeerId]:
        """The peers that are to be named nowhere, as their last records say, also of those that have left."""
        return {PeerId(peer) for (peer,) in self._db.execute("SELECT peer FROM unlisted")}

    def tallies(self) -> list[StageTally]:
        found = []
        for stage, first, last, steps in self._db.execute("SELECT * FROM counted ORDER BY stage").fetchall():
            rows = self._db.execute(
                "SELECT peer, steps, microbatches, coalesce(tokens, 0) FROM tallies WHERE stage = ? ORDER BY microbatches DESC, peer",
                (stage,),
            )
            tallies = tuple(
                Tally(peer=peer, steps=took_part, microbatches=brought, tokens=tokens) for peer, took_part, brought, tokens in rows
            )
            found.append(StageTally(stage=stage, first_step=first, last_step=last, steps=steps, tallies=tallies))
        return found


def _row_of(sample: Sample) -> tuple[float, float, str]:
    body = [sample.step, sample.tokens_per_second, sample.peers, sample.queue, sample.suspects, dict(sample.counters)]
    return sample.time_s, sample.span_s, json.dumps(body, separators=(",", ":"))


def _sample_of(row: Sequence[object]) -> Sample:
    time_s, span_s, body = row
    step, rate, peers, queue, suspects, counters = json.loads(str(body))
    return Sample(
        time_s=float(str(time_s)),
        span_s=float(str(span_s)),
        step=step,
        tokens_per_second=rate,
        peers=tuple(peers),
        queue=tuple(queue),
        suspects=suspects,
        counters=counters,
    )
