"""Atomic files: whole or absent, in spite of a kill, of other writers and of a power cut."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from peerd.config.atomic import commit, draft, remove_drafts

WRITES = """
import sys
from pathlib import Path
from peerd.config.atomic import commit, draft
folder = Path(sys.argv[1])
with draft(folder) as path:
    path.write_bytes(b"half")
    print("begun", flush=True)
    sys.stdin.readline()
    commit(path, folder / "whole")
"""


def writer(folder: Path, *before: str) -> subprocess.Popen[str]:
    """A process that has begun a draft and waits for a line before it commits."""
    command = [*before, sys.executable, "-c", WRITES, str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    return process


def write(folder: Path, name: str, content: bytes) -> None:
    with draft(folder) as path:
        path.write_bytes(content)
        commit(path, folder / name)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_next_draft_removes_what_a_killed_writer_left(tmp_path: Path) -> None:
    killed = writer(tmp_path)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert len(names_in(tmp_path)) == 1
    write(tmp_path, "mine", b"whole")
    assert names_in(tmp_path) == ["mine"]


def test_drafts_of_live_writers_stay_and_each_writes_its_own(tmp_path: Path) -> None:
    other = writer(tmp_path)
    with draft(tmp_path) as mine:
        mine.write_bytes(b"half")
        write(tmp_path, "third", b"whole")
        assert len(names_in(tmp_path)) == 3
        remove_drafts(tmp_path)
        assert names_in(tmp_path) == [mine.name, "third"]
    assert other.communicate("now\n")[0] == ""
    assert other.returncode != 0, "its draft was removed by who alone writes to the folder"


def test_of_many_writers_to_one_file_each_succeeds_and_a_reader_sees_a_whole_one(tmp_path: Path) -> None:
    contents = [bytes([number]) * 5000 for number in range(8)]

    def hammer(content: bytes) -> None:
        for _ in range(25):
            write(tmp_path, "one", content)
            assert (tmp_path / "one").read_bytes() in contents

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(hammer, contents))
    assert names_in(tmp_path) == ["one"]


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_the_content_is_on_disk_before_it_gets_its_name_and_the_name_before_it_is_told(tmp_path: Path) -> None:
    traced = tmp_path / "calls"
    folder = tmp_path / "folder"
    folder.mkdir()
    process = writer(folder, "strace", "-f", "-y", "-o", str(traced), "-e", "trace=fsync,rename,renameat,renameat2")
    process.communicate("now\n")
    assert process.returncode == 0
    calls = re.findall(r"(fsync|rename)[a-z0-9]*\((.*)", traced.read_text())
    assert [call for call, _ in calls] == ["fsync", "rename", "fsync"]
    assert ".part" in calls[0][1]
    assert f"{folder}>" in calls[2][1]
