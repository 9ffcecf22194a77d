"""Churn traces: the shape of the generated one, and the rules for a user's file."""

from __future__ import annotations

from pathlib import Path

import pytest

from peerd.errors import UsageError
from peerd.sim.trace import Change, ChangeFile, generate, read_changes


@pytest.mark.parametrize("seed", range(3))
def test_four_hundred_peers_shrink_to_about_half_in_bursts_over_32_hours(seed: int) -> None:
    trace = generate(400, seed)
    assert trace.num_peers == 400
    assert trace.duration_s == 32 * 3600
    assert 150 <= 400 + sum(change.peers for change in trace.changes) <= 230
    assert [c.time_s for c in trace.changes] == sorted(c.time_s for c in trace.changes)
    lost_by_quarter_hour = [0] * 128
    for change in trace.changes:
        lost_by_quarter_hour[int(change.time_s // 900)] -= min(change.peers, 0)
    assert max(lost_by_quarter_hour) >= 20
    assert sum(lost_by_quarter_hour[:4]) <= 40


def test_a_trace_is_a_function_of_its_seed() -> None:
    assert generate(40, 1) == generate(40, 1) != generate(40, 2)


@pytest.mark.parametrize("num_peers", [1, 2, 5])
def test_a_small_swarm_never_loses_everybody(num_peers: int) -> None:
    present = num_peers
    for change in generate(num_peers, 0).changes:
        present += change.peers
        assert present >= 1


def written(folder: Path, text: str) -> Path:
    path = folder / "churn.csv"
    path.write_text(text)
    return path


@pytest.mark.parametrize("heading", ["", "time_s,change\n", "\ufefftime_s, change\n"])
def test_a_file_is_lines_of_time_and_change_under_a_heading_or_none(tmp_path: Path, heading: str) -> None:
    found = read_changes(written(tmp_path, heading + "0,40\n\n600, -3\n600.5,+2\n7200,0\n"))
    assert found.changes == (Change(0, 40), Change(600, -3), Change(600.5, 2), Change(7200, 0))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "nothing happens"),
        ("time_s,change\n", "nothing happens"),
        ("0,40\n", "nothing happens"),
        ("0,40\n60\n", "line 2"),
        ("0,40\n60,1,2\n", "line 2"),
        ("0,40\n60,2.5\n", "line 2"),
        ("0,40\nsoon,1\n", "line 2"),
        ("0,40\nnan,1\n", "line 2"),
        ("0,40\ninf,1\n", "line 2"),
        ("-1,40\n", "line 1"),
        ("0,40\n60,1\n30,1\n", "line 3"),
        ("0,40\n60,-99999999999\n", "line 2"),
        ("0,40\n60," + "9" * 10_000 + "\n", "line 2"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as raised:
        read_changes(written(tmp_path, text))
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400


def test_a_file_that_is_no_text_or_not_there_is_told(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"\xff\xfe\0")
    for path, words in ((tmp_path / "b", "not a text file"), (tmp_path / "none", "No such file"), (tmp_path, "directory")):
        with pytest.raises(UsageError, match=words):
            read_changes(path)


def file_of(*changes: tuple[float, int]) -> ChangeFile:
    return ChangeFile("churn.csv", tuple(Change(*change) for change in changes))


@pytest.mark.parametrize(
    ("changes", "num_peers", "start"),
    [
        ([(0.0, 40), (60.0, -3)], None, 40),
        ([(60.0, -3)], None, 400),
        ([(60.0, -3)], 50, 50),
        ([(0.0, 40), (60.0, -3)], 10, 50),
    ],
)
def test_who_is_there_at_the_start(changes: list[tuple[float, int]], num_peers: int | None, start: int) -> None:
    trace = file_of(*changes).trace(num_peers, 400)
    assert trace.num_peers == start
    assert trace.changes == (Change(60.0, -3),)
    assert trace.duration_s == 60


def test_taking_away_more_than_there_are_is_told() -> None:
    with pytest.raises(UsageError, match="--peers"):
        file_of((60.0, -3)).trace(2, 400)
    with pytest.raises(UsageError, match="more than"):
        file_of((60.0, 10**6)).trace(2, 400)
