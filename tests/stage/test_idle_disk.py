"""A checkpoint's flush gives way to other programs, and only that."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from peerd.stage import idle_disk as module
from peerd.stage.idle_disk import idle_disk, priority

IDLE_CLASS = 3


@pytest.mark.skipif(priority() is None, reason="this system knows no I/O priorities of threads")
def test_only_the_thread_that_flushes_gives_way_and_only_while_it_does() -> None:
    before, entered, looked, seen = priority(), threading.Event(), threading.Event(), []

    def looks() -> None:
        entered.wait(10)
        seen.append(priority())
        looked.set()

    other = threading.Thread(target=looks)
    other.start()
    with idle_disk():
        found = priority()
        entered.set()
        looked.wait(10)
    other.join(10)
    assert (found or 0) >> 13 == IDLE_CLASS
    assert (priority(), seen) == (before, [before])


def test_a_system_without_priorities_does_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SET", {})
    with idle_disk():
        (tmp_path / "file").write_text("x")
    assert priority() is None
    assert (tmp_path / "file").read_text() == "x"
