"""Daemons of several devices under one home: one word of the owner counts for all, and rates and quotas for all together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from peerd.config.device_homes import DeviceHomes
from peerd.config.limits import load_wishes
from peerd.config.paths import Home
from peerd.owner.governor import Governor
from peerd.owner.usage import Usage
from peerd.policy.owner.governor import Limits

CPU = torch.device("cpu")


@pytest.fixture
def homes(tmp_path: Path) -> tuple[Home, ...]:
    return DeviceHomes(Home(tmp_path / "home"), ("cuda:0", "cuda:1")).homes


@pytest.fixture
def governors(homes: tuple[Home, ...]) -> list[Governor]:
    return [Governor(home, CPU, homes[0], sharers=2) for home in homes]


def pauses(*governors: Governor) -> list[bool]:
    return [governor.pause is not None for governor in governors]


async def test_what_one_is_told_the_other_obeys_after_a_look(homes: tuple[Home, ...], governors: list[Governor]) -> None:
    one, other = governors
    await one.obey("pause", {"wait": False})
    assert pauses(one, other) == [True, False]
    await other.look()
    assert pauses(one, other) == [True, True]
    await other.obey("resume", {})
    await one.look()
    assert pauses(one, other) == [False, False]
    assert not load_wishes(homes[0]).paused
    assert not homes[1].limits.exists()


async def test_rates_are_divided_and_told_as_the_owner_set_them(governors: list[Governor]) -> None:
    one, other = governors
    change = {"upload": 4e6, "download": 8e6, "power": 300.0, "disk": 10**9 + 1, "memory": 6 * 10**9, "duty": 0.5}
    await one.obey("limits", {"change": change})
    await other.look()
    for governor in governors:
        assert (governor.throttles.upload.rate, governor.throttles.download.rate) == (2e6, 4e6)
        assert (governor.limits.power, governor.limits.disk) == (150.0, 500_000_001)
        assert (governor.limits.memory, governor.limits.duty) == (6 * 10**9, 0.5), "those of each device"
        assert governor.fields()["limits"] == {**governor.fields()["limits"], **change}


async def test_a_change_at_one_keeps_what_another_was_told_before(governors: list[Governor]) -> None:
    one, other = governors
    await one.obey("limits", {"change": {"upload": 4e6}})
    await other.obey("limits", {"change": {"download": 8e6}})
    await one.look()
    limits = one.fields()["limits"]
    assert (limits["upload"], limits["download"]) == (4e6, 8e6)


async def test_what_is_usual_here_holds_until_the_owner_sets_something_else(tmp_path: Path) -> None:
    governor = Governor(Home(tmp_path / "home"), CPU, usual=Limits(on_battery=False, while_used=False))
    assert (governor.limits.on_battery, governor.limits.while_used) == (False, False)
    await governor.obey("limits", {"change": {"while_used": True}})
    await governor.look()
    assert governor.fields()["limits"]["on_battery"] is False
    assert governor.fields()["limits"]["while_used"] is True


async def test_a_file_that_cannot_be_understood_changes_nothing(homes: tuple[Home, ...], governors: list[Governor]) -> None:
    one, _ = governors
    await one.obey("limits", {"change": {"upload": 4e6}})
    homes[0].limits.write_text("{")
    await one.look()
    assert one.fields()["limits"]["upload"] == 4e6


def test_quotas_count_what_all_have_moved(homes: tuple[Home, ...]) -> None:
    first, second = homes
    one, other = Usage(first, [second]), Usage(second, [first])
    one.add(100)
    other.add(20)
    other.save()
    one.read_others()
    assert (one.today, one.this_month, other.today) == (120, 120, 20)
    one.save()
    assert Usage(first).today == 100, "each notes its own alone"
    assert Usage(second, [first]).today == 120
