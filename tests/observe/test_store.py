"""The history on disk: it is durable, stays small, counts once, and a damaged file stops no daemon."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from peerd.observe import store as store_module
from peerd.observe.archive import HISTORY, Archive
from peerd.observe.entries import Event, FinishedStep, Sample
from peerd.observe.store import HistoryStore
from peerd.observe.thinning import DAY_S, at_most, merged, thinned
from peerd.policy.step.roster import Roster, RosterEntry
from peerd.table.record import Evaluation, PeerId
from peerd.unwritten import UNWRITTEN
from tests.small_disk import fill, needs_root, small_disk

SAMPLES = st.lists(
    st.builds(
        Sample,
        time_s=st.floats(0, 1e6),
        span_s=st.floats(0.5, 4),
        step=st.integers(0, 100),
        tokens_per_second=st.floats(0, 1e6),
        peers=st.tuples(st.integers(0, 9), st.integers(0, 9)),
        queue=st.tuples(st.integers(0, 99), st.integers(0, 99)),
        suspects=st.integers(0, 9),
        counters=st.dictionaries(st.sampled_from(["bytes_sent", "reloads"]), st.integers(1, 10**9)),
    ),
    min_size=1,
    max_size=30,
)


def finished(step: int, loss: float | None = 1.0, time_s: float | None = None) -> FinishedStep:
    return FinishedStep(step=step, loss=loss, tokens=10, time_s=time_s)


def sample(time_s: float, **changes: object) -> Sample:
    fields: dict[str, object] = {"span_s": 2.0, "step": 1, "tokens_per_second": 5.0, "peers": (1, 2), "queue": (3, 4), "suspects": 0}
    return Sample(time_s=time_s, **{**fields, **changes})  # type: ignore[arg-type]


def roster(step: int, stage: int = 0, **ledgers: int) -> Roster:
    entries = tuple(RosterEntry(PeerId(peer), 1, 1, done) for peer, done in sorted(ledgers.items()))
    return Roster(stage, step, 1, entries[0].peer, entries)


def test_what_is_written_is_read_by_the_next_daemon(tmp_path: Path) -> None:
    first = HistoryStore(tmp_path / "run.sqlite")
    first.add([finished(0, 2.5, 100.0)], [sample(7.0, counters={"bytes_sent": 9})], [Event(time_s=1.0, kind="joined", peer="a", stage=1)])
    first.close()
    second = HistoryStore(tmp_path / "run.sqlite")
    assert second.steps() == [finished(0, 2.5, 100.0)]
    assert second.samples() == [sample(7.0, counters={"bytes_sent": 9})]
    assert second.events() == [Event(number=1, time_s=1.0, kind="joined", peer="a", stage=1)]
    second.close()


def test_comings_and_goings_are_counted_by_kind_and_span_of_time(tmp_path: Path) -> None:
    store = HistoryStore(tmp_path / "run.sqlite")
    happened = [(1.0, "joined"), (2.0, "joined"), (12.0, "joined"), (13.0, "gone"), (14.0, "gone"), (25.0, "moved")]
    store.add(events=[Event(time_s=t, kind=kind, peer="a", stage=1) for t, kind in happened])
    store.add(events=[Event(time_s=13.0, kind="raised", text="stage-empty: nobody serves stage 1")])
    assert store.churn(0.0, 10.0) == [(5.0, "joined", 2), (15.0, "gone", 2), (15.0, "joined", 1), (25.0, "moved", 1)]
    assert store.churn(12.5, 10.0) == [(15.0, "gone", 2), (25.0, "moved", 1)]
    store.close()


def test_what_was_written_survives_sigkill(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    program = (
        "import os, signal, sys; from pathlib import Path; from peerd.observe.store import HistoryStore;"
        "from peerd.observe.entries import FinishedStep; store = HistoryStore(Path(sys.argv[1]));"
        "store.add([FinishedStep(step=n, loss=1.0, tokens=10, time_s=None) for n in range(500)]); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program, path], check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == -signal.SIGKILL
    store = HistoryStore(path)
    assert len(store.steps()) == 500
    store.close()


def test_a_damaged_file_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    first = HistoryStore(path)
    first.add([finished(n) for n in range(5000)])
    first.close()
    damage = bytearray(path.read_bytes())
    damage[4096:40960] = os.urandom(36864)
    path.write_bytes(damage)
    second = HistoryStore(path)
    assert second.steps() == []
    assert path.with_name("run.sqlite.damaged").read_bytes() == damage
    second.close()


def test_a_file_that_is_no_database_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    path.write_text("these are no rows\n" * 100)
    store = HistoryStore(path)
    assert store.steps() == []
    store.close()


async def test_a_folder_that_cannot_be_written_costs_the_history_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    archive = Archive(tmp_path / "file" / "run.sqlite")
    archive.note_step(finished(0))
    assert await archive.read(lambda store: store.steps()) is None
    await archive.close()


@needs_root
async def test_rows_that_a_full_disk_refuses_wait_for_room_and_are_counted_once(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", kilobytes=256) as disk:
        archive = Archive(disk / "run.sqlite")
        archive.note_step(finished(0))
        await archive.write()
        ballast = fill(disk)
        for step in range(1, 1500):
            archive.note_step(finished(step))
            archive.note_average(roster(step, a=1), 8)
        await archive.write()
        assert "the disk is full" in UNWRITTEN.errors()[HISTORY].message
        archive.note_average(roster(1500, a=1), 8)
        await archive.write()
        ballast.unlink()
        assert await archive.read(lambda store: len(store.steps())) == 1500
        assert await archive.read(lambda store: store.tallies()[0].tallies[0].microbatches) == 1500
        assert HISTORY not in UNWRITTEN
        await archive.close()


async def test_a_query_sees_what_was_noted_before_it(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "run.sqlite")
    archive.note_step(finished(3))
    archive.note_average(roster(3, a=1), 8)
    assert await archive.read(lambda store: store.steps()[0].step) == 3
    assert await archive.read(lambda store: len(store.tallies())) == 1
    await archive.close()


def test_a_later_report_fills_in_what_was_unknown(tmp_path: Path) -> None:
    store = HistoryStore(tmp_path / "run.sqlite")
    store.add([finished(4, None, 50.0)])
    store.add([finished(4, 3.0, None)])
    assert store.steps() == [finished(4, 3.0, 50.0)]
    store.close()


def test_each_average_is_counted_once_however_often_it_is_reported(tmp_path: Path) -> None:
    store = HistoryStore(tmp_path / "run.sqlite")
    store.add(averages=[(roster(0, a=0b0111, b=0b1000), 8), (roster(1, a=0b1111, b=0), 16)])
    store.add(averages=[(roster(1, a=0b1111), 16), (roster(0, stage=1, c=0b1111), 8)])
    own, other = store.tallies()
    assert (own.stage, own.first_step, own.last_step, own.steps) == (0, 0, 1, 2)
    assert [(t.peer, t.steps, t.microbatches, t.tokens) for t in own.tallies] == [("a", 2, 7, 3 * 8 + 4 * 16), ("b", 1, 1, 8)]
    assert [(t.peer, t.microbatches) for t in other.tallies] == [("c", 4)]
    store.close()


def test_what_was_counted_before_tokens_were_stays_uncounted_and_the_rest_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    HistoryStore(path).close()
    with contextlib.closing(sqlite3.connect(path)) as old, old:
        old.execute("ALTER TABLE tallies DROP COLUMN tokens")
        old.execute("INSERT INTO tallies VALUES (0, 'a', 5, 20)")
        old.execute("INSERT INTO counted VALUES (0, 0, 4, 5)")
    for _ in range(2):
        store = HistoryStore(path)
        store.add(averages=[(roster(5, a=0b11, b=0b1100), 8)])
        (stage,) = store.tallies()
        assert [(t.peer, t.microbatches, t.tokens) for t in stage.tallies] == [("a", 22, 0), ("b", 2, 16)]
        store.close()


def test_a_long_run_stays_small(tmp_path: Path) -> None:
    store = HistoryStore(tmp_path / "run.sqlite")
    now_s = 40 * DAY_S
    store.add(
        [finished(n) for n in range(store_module.MAX_STEPS + 5000)],
        [sample(float(s)) for s in range(0, int(now_s), 120)],
        [Event(time_s=float(n), kind="joined", peer="a") for n in range(store_module.MAX_EVENTS + 500)],
    )
    store.prune(now_s)
    steps = [entry.step for entry in store.steps()]
    assert len(steps) <= store_module.MAX_STEPS
    assert steps[-1000:] == list(range(store_module.MAX_STEPS + 4000, store_module.MAX_STEPS + 5000))
    assert len(store.events()) == store_module.MAX_EVENTS
    samples = store.samples()
    assert len(samples) < 12_000
    assert abs(sum(s.span_s for s in samples) - now_s / 120 * 2) < 1e-3
    store.prune(now_s)
    assert store.samples() == samples
    store.close()


@given(SAMPLES)
def test_merging_keeps_counts_and_means(samples: list[Sample]) -> None:
    one = merged(samples)
    assert one.counters.get("bytes_sent", 0) == sum(s.counters.get("bytes_sent", 0) for s in samples)
    rates = [s.tokens_per_second for s in samples]
    assert min(rates) * (1 - 1e-9) <= one.tokens_per_second <= max(rates) * (1 + 1e-9) + 1e-9
    assert one.time_s == samples[-1].time_s


@given(SAMPLES, st.integers(1, 20))
def test_a_picture_gets_no_more_points_than_it_can_show(samples: list[Sample], most: int) -> None:
    ordered = sorted(samples, key=lambda s: s.time_s)
    assert len(at_most(ordered, most)) <= most
    assert len(thinned(ordered, 1e9)) == 1


def test_evaluations_are_kept_by_step_and_a_later_one_of_a_step_replaces_it(tmp_path: Path) -> None:
    store = HistoryStore(tmp_path / "run.sqlite")
    store.add(evaluations=[Evaluation(0, 5.5), Evaluation(4, 5.0)])
    store.add(evaluations=[Evaluation(8, 4.0), Evaluation(4, 4.5)])
    store.prune(0.0)
    store.close()
    again = HistoryStore(tmp_path / "run.sqlite")
    assert again.evaluations() == [Evaluation(0, 5.5), Evaluation(4, 4.5), Evaluation(8, 4.0)]
    assert again.evaluations(since=4, most=1) == [Evaluation(8, 4.0)]
    again.close()
