"""The verb limits where no daemon runs, and what a daemon from the command line keeps to until its owner speaks."""

from __future__ import annotations

import json

import pytest

from peerd.config import laptop
from tests.cli.conftest import Command
from tests.cli.test_dashboard_verb import settings_from


def told(peerd: Command) -> tuple[bool, bool]:
    limits = json.loads(peerd("limits", "--json").out)["limits"]
    return limits["on_battery"], limits["while_used"]


def test_a_laptops_limits_are_told_before_a_daemon_runs_and_can_be_switched_off(peerd: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(peerd) == (True, True)
    monkeypatch.setattr(laptop, "has_battery", lambda: True)
    assert told(peerd) == (False, False)
    assert peerd("limits", "--upload", "20Mbit").code == 0
    assert told(peerd) == (False, False)
    assert peerd("limits", "--on-battery", "run").code == 0
    assert told(peerd) == (True, False)


def test_a_daemon_from_the_command_line_spares_a_laptop() -> None:
    assert settings_from().spares_laptop


def test_the_priority_is_told_before_a_daemon_runs(peerd: Command) -> None:
    assert "priority         nice 10, so that other programs go first, once it is started" in peerd("limits").out


def test_the_share_for_those_who_ask_is_shown_and_may_be_none(peerd: Command) -> None:
    assert "training waits up to 2% of the time for those who ask" in peerd("limits").out
    assert "answers nobody" in peerd("limits", "--inference", "0%").out
    assert json.loads(peerd("limits", "--inference", "none", "--json").out)["limits"]["inference"] == 1.0
    wrong = peerd("limits", "--inference", "101%")
    assert wrong.code == 2
    assert "inference must be between 0% and 100%" in wrong.err
