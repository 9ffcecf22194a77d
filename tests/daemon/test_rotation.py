"""A daemon's log in the background never outgrows its bound, and whatever happens its lines are written somewhere."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from peerd.config.paths import Home
from peerd.daemon.rotation import LOG_LINES, RotatingStream
from peerd.unwritten import UNWRITTEN

LINE = "x" * 99 + "\n"
WRITES_AND_BREAKS = """
import os, sys
from pathlib import Path
from peerd.config.paths import Home
from peerd.daemon.rotation import RotatingStream
stream = RotatingStream(sys.stderr, Home(Path(sys.argv[1])), max_bytes=1000)
for number in range(45):
    stream.write(f"{number:02} " + "x" * 96 + "\\n")
raise RuntimeError("the last words")
"""


def sizes(home: Home) -> list[int]:
    return [path.stat().st_size for path in (home.log, *home.full_logs)]


def test_three_files_at_most_and_the_newest_lines_are_kept(tmp_path: Path) -> None:
    home = Home(tmp_path)
    with home.log.open("a") as log:
        stream = RotatingStream(log, home, max_bytes=1000)
        for number in range(95):
            stream.write(f"{number:02}{LINE[2:]}")
    assert sizes(home) == [500, 1000, 1000]
    assert {path.name for path in tmp_path.iterdir()} == {"daemon.log", "daemon.log.1", "daemon.log.2"}
    newest = "".join(path.read_text() for path in (*reversed(home.full_logs), home.log))
    assert [int(line[:2]) for line in newest.splitlines()] == list(range(70, 95))


def test_what_others_write_to_standard_error_goes_into_the_new_file(tmp_path: Path) -> None:
    home = Home(tmp_path)
    with home.log.open("ab") as log:
        done = subprocess.run([sys.executable, "-c", WRITES_AND_BREAKS, str(tmp_path)], stderr=log, check=False)
    assert done.returncode == 1
    assert home.log.read_text().endswith("RuntimeError: the last words\n")
    assert home.log.read_text().startswith("40 ")
    assert home.full_logs[0].read_text().startswith("30 ")


def test_a_log_that_is_not_the_homes_is_never_moved(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.folder.mkdir()
    with (tmp_path / "journal").open("a") as journal:
        stream = RotatingStream(journal, home, max_bytes=1000)
        for _ in range(50):
            stream.write(LINE)
    assert (tmp_path / "journal").stat().st_size == 5000
    assert list(home.folder.iterdir()) == []


def test_where_no_new_file_can_be_made_the_log_goes_on_as_it_is(tmp_path: Path) -> None:
    home = Home(tmp_path)
    (tmp_path / "daemon.log.new").mkdir()
    with home.log.open("a") as log:
        stream = RotatingStream(log, home, max_bytes=1000)
        for _ in range(50):
            stream.write(LINE)
    assert home.log.stat().st_size == 5000
    assert not home.full_logs[0].exists()


def test_threads_that_write_at_once_lose_no_line(tmp_path: Path) -> None:
    home = Home(tmp_path)
    with home.log.open("a") as log:
        stream = RotatingStream(log, home, max_bytes=25_000)

        def write(name: int) -> None:
            for number in range(100):
                stream.write(f"{name} {number} {LINE[10:]}")

        threads = [threading.Thread(target=write, args=(name,)) for name in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    files = (home.log, *home.full_logs)
    lines = [line for path in files if path.exists() for line in path.read_text().splitlines()]
    assert len(lines) == 500
    assert {tuple(line.split()[:2]) for line in lines} == {(str(name), str(number)) for name in range(5) for number in range(100)}


def test_a_line_that_the_disk_does_not_take_stops_nobody_and_is_told(tmp_path: Path) -> None:
    home = Home(tmp_path)
    with home.log.open("a") as log:
        stream, real = RotatingStream(log, home), os.dup(log.fileno())
        with Path("/dev/full").open("ab", buffering=0) as full:
            os.dup2(full.fileno(), log.fileno())
        stream.write(LINE)
        assert "the disk is full" in UNWRITTEN.errors()[LOG_LINES].message
        os.dup2(real, log.fileno())
        os.close(real)
        stream.write(LINE)
    assert LOG_LINES not in UNWRITTEN
    assert home.log.read_text().endswith(LINE)
