"""The sensors' thrift: what no limit asks for is not read, and other processes are looked through only now and then."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import psutil
import pytest
import torch

from peerd.owner.sensors import Sensors, taken_by_all
from peerd.policy.owner.governor import Limits, why_pause


@pytest.mark.parametrize(
    "limits", [{"while_used": False}, {"on_battery": False}, {"on_metered": False}, {"max_temperature": 80.0}, {"power": 9.0}]
)
def test_only_limits_on_the_machine_itself_have_it_looked_at(limits: dict[str, Any]) -> None:
    assert not Sensors.has_to_look(Limits(upload=1e6, daily=10**9))
    assert Sensors.has_to_look(Limits(**limits))


@pytest.mark.parametrize(
    ("samples", "percent"), [([], 0), ([(7, 4)], 4), ([(7, 90), (7, 0), (7, 0)], 30), ([(7, 4), (8, 6), (7, 8), (8, 8)], 13)]
)
def test_a_gpu_is_taken_by_all_that_use_it_and_not_by_their_shortest_bursts(samples: list[tuple[int, float]], percent: float) -> None:
    assert taken_by_all(samples) == pytest.approx(percent)


def test_children_are_looked_for_where_none_is_known_and_where_one_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    looked, children = 0, psutil.Process.children

    def look(process: psutil.Process, recursive: bool = False) -> list[psutil.Process]:
        nonlocal looked
        looked += 1
        return children(process, recursive=recursive)

    monkeypatch.setattr(psutil.Process, "children", look)
    sensors = Sensors(torch.device("cpu"))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        for _ in range(3):
            assert sum(sensors._own_cpu_s().values()) > 0
        assert looked == 1
        assert [each.pid for each in sensors._children] == [child.pid]
        child.kill()
    sensors._own_cpu_s()
    assert looked == 2


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads have no priority of their own")
def test_threads_that_give_way_are_counted_apart_as_the_machine_counts_them() -> None:
    """A service has a niceness of 10, and threads that compute more than the rest of a daemon."""
    burn = (
        "import os, sys, time\nos.nice(int(sys.argv[1]))\nwhile time.process_time() < 0.5: sum(range(200_000))\nprint(flush=True); input()"
    )
    spent = {}
    for niceness in (0, 10):
        command = [sys.executable, "-c", burn, str(niceness)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            child.stdout.readline()
            spent[niceness] = Sensors(torch.device("cpu"))._own_cpu_s()[child.pid]
            child.kill()
    assert spent[0] >= 0.45
    assert spent[10] < 0.2


def test_a_sensor_that_fails_tells_nothing_and_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine whose kernel shows a battery without its files."""

    def broken() -> None:
        raise FileNotFoundError("/sys/class/power_supply/BAT0/uevent")

    monkeypatch.setattr(psutil, "sensors_battery", broken, raising=False)
    monkeypatch.setattr(psutil, "sensors_temperatures", broken, raising=False)
    limits = Limits(on_battery=False, max_temperature=80.0, while_used=False, daily=10**9)
    sensors = Sensors(torch.device("cpu"))
    sensors.read(limits, 10**9, 0)
    sensors._shares = (0.0, 0.0, {})  # the last look was long ago
    readings = sensors.read(limits, 10**9, 0)
    assert (readings.on_battery, readings.temperature, readings.today) == (None, None, 10**9)
    assert readings.others_share is not None
    assert why_pause(limits, readings) is not None
