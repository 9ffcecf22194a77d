"""Hints can be pasted: they have the name under which the program was called."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from peerd.cli.calling import NAMED_BY, called_as, pasteable
from tests.cli.conftest import Command

HINT = "watch with `peerd status`, end with peerd leave; peerd does not run on X; /opt/peerd status"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with scripts/peerd in it, which is the present one; no `peerd` on the PATH."""
    script = tmp_path / "scripts" / "peerd"
    script.parent.mkdir()
    script.write_text("")
    script.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return script


def test_a_script_is_named_by_its_path(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAMED_BY, "scripts/peerd")
    assert pasteable(HINT) == "watch with `scripts/peerd status`, end with scripts/peerd leave; peerd does not run on X; /opt/peerd status"
    checkout.unlink()
    assert called_as() == "peerd", "what is not there any more is not named"


def test_a_path_with_a_blank_is_quoted(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = checkout.parent / "a b"
    place.mkdir()
    (place / "peerd").touch()
    monkeypatch.setenv(NAMED_BY, str(place / "peerd"))
    assert pasteable("peerd --home DIR status") == f"'{place}/peerd' --home DIR status"


def test_on_the_path_it_is_called_peerd(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    linked = Path(os.environ["PATH"]) / "peerd"
    linked.parent.mkdir()
    linked.symlink_to(checkout)
    monkeypatch.setenv(NAMED_BY, str(linked))
    assert pasteable(HINT) == HINT


def test_errors_have_it(checkout: Path, monkeypatch: pytest.MonkeyPatch, peerd: Command) -> None:
    monkeypatch.setenv(NAMED_BY, "scripts/peerd")
    assert "`scripts/peerd status --help`" in peerd("status", "--jsn").err
    assert "`scripts/peerd start RUN.toml` or `scripts/peerd join ADDRESS`" in peerd("status").err
