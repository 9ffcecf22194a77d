"""The homes of several devices' daemons, and their settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from peerd.config.device_homes import DeviceHomes, every_home, homes_of, note_devices, owner_home_of, settings_of_each
from peerd.config.paths import Home
from peerd.config.settings import Settings
from peerd.errors import UsageError

THREE = ("cuda:0", "cuda:1", "cpu")


@pytest.fixture
def homes(tmp_path: Path) -> DeviceHomes:
    found = DeviceHomes(Home(tmp_path / "h"), THREE)
    note_devices(found)
    return found


def test_the_first_device_has_the_home_and_the_others_folders_in_it(homes: DeviceHomes) -> None:
    folder = homes.root.folder
    assert [home.folder for home in homes.homes] == [folder, folder / "devices" / "1", folder / "devices" / "2"]
    assert homes_of(homes.root) == homes
    assert [owner_home_of(home) for home in homes.homes] == [homes.root] * 3


def test_a_home_that_was_last_started_with_one_device_has_one(homes: DeviceHomes) -> None:
    homes.homes[1].folder.mkdir(parents=True)
    note_devices(DeviceHomes(homes.root))
    assert not homes_of(homes.root).are_several
    assert owner_home_of(homes.homes[1]) == homes.homes[1]
    assert every_home(homes.root) == list(homes.homes[:2]), "its traffic still counts"


@pytest.mark.parametrize("content", ["", "[]", '{"devices": 7}', '{"devices": ["a"]}', '{"devices": ["a", 7]}', '{"devices": null}'])
def test_a_damaged_note_means_one_device(homes: DeviceHomes, content: str) -> None:
    homes.root.devices.write_text(content)
    assert homes_of(homes.root) == DeviceHomes(homes.root)


def test_a_home_in_a_folder_called_devices_is_a_home_of_its_own(tmp_path: Path) -> None:
    home = Home(tmp_path / "devices" / "1")
    assert owner_home_of(home) == home


def test_the_first_starts_the_run_and_relays_and_each_has_its_ports(homes: DeviceHomes) -> None:
    given = Settings(home="h", run_file="run.toml", port=4000, dashboard_port=5000, relay=True, relay_daily=9, wandb="project", stage=1)
    first, *others = settings_of_each(given, homes)
    assert (first.run_file, first.relay, first.relay_daily, first.wandb) == ("run.toml", True, 9, "project")
    for number, other in enumerate(others, 1):
        assert (other.run_file, other.relay, other.relay_daily, other.wandb) == ("", False, 0, "")
        assert (other.port, other.direct_port, other.dashboard_port) == (4000 + number, 0, 5000 + number)
    for settings, home, device in zip([first, *others], homes.homes, THREE, strict=True):
        assert (settings.home, settings.device, settings.stage) == (str(home.folder), device, 1)
        assert (settings.owner_home, settings.sharers) == (str(homes.root.folder), 3)


@pytest.mark.parametrize("ports", [{"port": 65534}, {"port": 4000, "direct_port": 4002}, {"port": 4000, "dashboard_port": 4000}])
def test_ports_that_do_not_suffice_are_refused(homes: DeviceHomes, ports: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="3 devices take the ports"):
        settings_of_each(Settings(home="h", join="a", **ports), homes)  # type: ignore[arg-type]
