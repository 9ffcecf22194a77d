"""Copies of mates' moves follow their authors' logs move by move, or stop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.daemon.move_copies import MOST_ASKED, MoveCopies
from peerd.errors import BadMessageError, PeerGoneError
from peerd.stage import moves
from peerd.stage.moves import MoveCopy, MoveLog, beginning_of
from peerd.table.record import Aside, PeerId, PeerRecord
from peerd.wire.messages import ToldMoves

ME, MATE = PeerId("me"), PeerId("mate")
PART_BYTES = 300
"""A few moves."""


def log_of(num_moves: int, incarnation: int = 1, folder: Path | None = None) -> MoveLog:
    """A log with this many moves."""
    log = MoveLog(PeerRecord(peer=MATE, incarnation=incarnation, stage=1), folder)
    for number in range(num_moves - 1):
        log.drop([str(number)])
    return log


@dataclass
class Mate:
    log: MoveLog
    asked: list[tuple[int, int]] = field(default_factory=list)
    forges: Callable[[bytes], bytes] = lambda lines: lines

    async def ask(self, peer: PeerId, incarnation: int, first: int) -> ToldMoves:
        if peer != MATE:
            raise PeerGoneError("it is gone")
        self.asked.append((incarnation, first))
        number, lines = self.log.since(first if incarnation == self.log.incarnation else 0, PART_BYTES)
        return ToldMoves(self.log.incarnation, number, self.forges(lines))


async def copied(folder: Path, mate: Mate, copies: MoveCopies | None = None) -> MoveCopies:
    """The copies after one more average."""
    copies = copies or MoveCopies(folder, ME, 1, mate.ask)
    copies.fetch([ME, MATE, PeerId("gone")])
    assert copies._fetching is not None
    await copies._fetching
    return copies


def text_of(folder: Path) -> str:
    (path,) = folder.glob("*.kept-by-me.jsonl")
    return path.read_text()


async def test_a_copy_grows_with_its_authors_log_and_goes_on_after_a_restart(tmp_path: Path) -> None:
    mate = Mate(log_of(7, folder=tmp_path / "theirs"))
    copies = await copied(tmp_path, mate)
    theirs = next((tmp_path / "theirs").iterdir())
    assert text_of(tmp_path) == theirs.read_text()
    mate.log.take_back()
    await copied(tmp_path, mate, copies)
    assert text_of(tmp_path) == theirs.read_text()
    mate.log.drop(["x"])
    num_asked = len(mate.asked)
    await copied(tmp_path, mate)
    assert text_of(tmp_path) == theirs.read_text()
    assert mate.asked[num_asked] == (0, 0)
    assert mate.asked[num_asked + 1] == (1, 8), "what its file holds is not asked for again"


async def test_an_update_that_a_mates_record_shows_is_copied_before_an_average(tmp_path: Path) -> None:
    """Those who use the new parameters meanwhile make the run depend on it: a disk may be lost before the next average."""
    mate, changes, seen = Mate(log_of(3)), asyncio.Queue[PeerRecord](), list[PeerRecord]()
    copies = MoveCopies(tmp_path, ME, 1, mate.ask)

    async def changed() -> None:
        if seen:
            changes.task_done()
        seen[:] = [await changes.get()]

    async def shows(**fields: Any) -> int:
        """How often the mate is asked once its record shows this."""
        before = len(mate.asked)
        changes.put_nowait(PeerRecord(peer=MATE, stage=1, incarnation=1, **fields))
        await changes.join()
        return len(mate.asked) - before

    copies.follow(changed, lambda: seen)
    assert await shows() > 0
    batch = Aside(PeerId("batch-0"), 0b11)
    assert await shows(done=0b11, asides=(batch,)) == 0, "an open batch is no update"
    mate.log.drop(["an update"])
    assert await shows(done=0b11) > 0
    assert "an update" in text_of(tmp_path)
    await copies.close()


async def test_a_mate_that_starts_again_has_another_log(tmp_path: Path) -> None:
    mate = Mate(log_of(3))
    copies = await copied(tmp_path, mate)
    mate.log = log_of(2, incarnation=5)
    await copied(tmp_path, mate, copies)
    await copied(tmp_path, mate, copies)
    assert {path.name.split(".")[0]: len(path.read_text().splitlines()) for path in tmp_path.iterdir()} == {"mate-1-1": 3, "mate-5-1": 2}


async def test_what_does_not_follow_is_not_written(tmp_path: Path) -> None:
    mate = Mate(log_of(4), forges=lambda lines: lines.replace(b'"1"', b'"7"'))
    await copied(tmp_path, mate)
    assert not list(tmp_path.iterdir()) or not text_of(tmp_path)


async def test_a_mate_is_asked_a_few_times_after_an_average_and_its_far_past_never(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mate = Mate(log_of(100))
    copies = await copied(tmp_path, mate)
    assert len(mate.asked) == MOST_ASKED
    num_copied = len(text_of(tmp_path).splitlines())
    assert 0 < num_copied < 100
    monkeypatch.setattr(moves, "MOST_KEPT_BYTES", PART_BYTES)
    mate.log.drop(["more"])
    await copied(tmp_path, mate, copies)
    assert len(text_of(tmp_path).splitlines()) == num_copied, "a copy has no gap"


def test_a_file_that_was_cut_off_is_gone_on_with_from_its_last_whole_move(tmp_path: Path) -> None:
    log = log_of(5)
    _, lines = log.since(0, 1 << 20)
    path = tmp_path / "copy"
    path.write_bytes(lines[:-7])
    copy = MoveCopy(path, beginning_of(MATE, 1, 1))
    assert copy.num_moves == 4
    copy.add(*log.since(4, 1 << 20))
    assert path.read_bytes() == lines
    path.write_bytes(lines.replace(b'"2"', b'"9"'))
    assert MoveCopy(path, beginning_of(MATE, 1, 1)).num_moves == 3
    assert len(path.read_bytes().splitlines()) == 3


VALUES = st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["id", "move", "x"]), inner, max_size=3),
    max_leaves=5,
)


@given(st.binary(max_size=200) | VALUES.map(lambda value: json.dumps(value).encode() + b"\n"))
def test_nothing_that_a_mate_may_tell_is_more_than_refused(tmp_path_factory: pytest.TempPathFactory, lines: bytes) -> None:
    copy = MoveCopy(tmp_path_factory.mktemp("copies") / "copy", beginning_of(MATE, 1, 1))
    with pytest.raises(BadMessageError):
        copy.add(0, lines)
    assert copy.num_moves == 0
