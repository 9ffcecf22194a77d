"""The flags that export a daemon's data: the settings of the daemon, and the error if a library is missing."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from peerd.config.settings import Settings
from tests.cli.conftest import Command


@pytest.fixture
def became(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The settings of the daemon that the command would start, with every library present."""
    found: list[Settings] = []

    def become(_path: str, command: list[str]) -> None:
        found.append(Settings.from_json(command[-1]))
        raise SystemExit(0)  # execv does not come back

    monkeypatch.setattr(os, "execv", become)
    monkeypatch.setenv("PEERD_READY", "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())
    return found


def test_none_of_them_is_on_unless_asked_for(peerd: Command, became: list[Settings]) -> None:
    with pytest.raises(SystemExit):
        peerd("join", "address")
    (settings,) = became
    assert (settings.otel, settings.tensorboard, settings.wandb) == (False, "", "")


def test_they_reach_the_daemon_and_the_folder_is_made(peerd: Command, became: list[Settings], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        peerd("join", "address", "--otel", "--tensorboard", tmp_path / "a" / "b", "--wandb", "project")
    (settings,) = became
    assert (settings.otel, settings.tensorboard, settings.wandb) == (True, str(tmp_path / "a" / "b"), "project")
    assert (tmp_path / "a" / "b").is_dir()


@pytest.mark.parametrize(
    ("flag", "value", "extra"), [("--otel", (), "otel"), ("--tensorboard", ("d",), "tensorboard"), ("--wandb", ("p",), "wandb")]
)
def test_a_library_that_is_missing_is_named_with_what_to_install(
    peerd: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flag: str, value: tuple[Any, ...], extra: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    done = peerd("join", "address", flag, *value)
    assert done.code == 2
    assert f"pip install 'peerd[{extra}]'" in done.err
    assert done.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_said_before_the_daemon_starts(peerd: Command, became: list[Settings], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = peerd("join", "address", "--tensorboard", tmp_path / "file" / "board")
    assert done.code == 2
    assert became == []
