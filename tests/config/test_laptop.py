"""A battery is looked for where the system tells of one, and its absence or a failure means none."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import psutil
import pytest

from peerd.config import laptop


def _fails() -> object:
    raise OSError("no such device")


@pytest.mark.parametrize(("told", "found"), [(lambda: None, False), (lambda: (80, 3600, True), True), (_fails, False)])
def test_a_battery_counts_plugged_in_or_not(told: Callable[[], object], found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    has_battery = importlib.reload(laptop).has_battery  # the real one, which every test's fixture replaces
    monkeypatch.setattr(psutil, "sensors_battery", told, raising=False)
    assert has_battery() is found


def test_a_system_that_knows_no_batteries_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    has_battery = importlib.reload(laptop).has_battery
    monkeypatch.delattr(psutil, "sensors_battery", raising=False)
    assert has_battery() is False
