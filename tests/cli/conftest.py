"""Fixtures for tests of the command line: a home with a short path, a runner of command lines, and paper daemons."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from peerd.cli import demo_daemons, launch, supervise
from peerd.cli.main import run

ROOT = Path(__file__).resolve().parents[2]
PAPER_DAEMON = Path(__file__).with_name("paper_daemon.py")


@dataclass(frozen=True, slots=True)
class Outcome:
    code: int
    out: str
    err: str


Command = Callable[..., Outcome]


@pytest.fixture
def short_home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home whose path is short enough for sockets, isolated from the daemon of the user who runs the tests."""
    folder = Path(tempfile.mkdtemp(prefix="peerd-t-"))
    monkeypatch.setenv("PEERD_HOME", str(folder))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def peerd(short_home: Path, capfd: pytest.CaptureFixture[str]) -> Command:
    """Run one command line as `peerd` would, in this process."""

    def command(*arguments: object) -> Outcome:
        capfd.readouterr()
        code = run([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return Outcome(code, out, err)

    return command


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Replace real daemons with paper ones. Call it with their mood."""

    real = launch.module_command

    def command(module: str, *arguments: str) -> list[str]:
        return [sys.executable, str(PAPER_DAEMON), *arguments] if module == "peerd.daemon" else real(module, *arguments)

    monkeypatch.setattr(launch, "module_command", command)
    for module in (demo_daemons, supervise):
        monkeypatch.setattr(module, "module_command", command)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return lambda mood: monkeypatch.setenv("PAPER_DAEMON", mood)
