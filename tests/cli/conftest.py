"""Fixtures of the command line's tests: a short home, a way to run one command line, and daemons of paper."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from peerd.cli import demo_daemons, launch
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
    """A home whose socket's path is short enough; what the daemon of this test's user does is out of reach."""
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
    """Daemons of paper in place of real ones; call it with the mood they shall be in."""

    real = launch.module_command

    def command(module: str, *arguments: str) -> list[str]:
        return [sys.executable, str(PAPER_DAEMON), *arguments] if module == "peerd.daemon" else real(module, *arguments)

    monkeypatch.setattr(launch, "module_command", command)
    monkeypatch.setattr(demo_daemons, "module_command", command)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return lambda mood: monkeypatch.setenv("PAPER_DAEMON", mood)
