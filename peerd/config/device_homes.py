"""The homes of a machine's daemons where each computes on a device of its own: the first has the home itself, the others a folder in it.

Each has its own identity, checkpoints and log. The owner's limits and what was used of the quotas belong to all of them together.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peerd.config.atomic import replace_file
from peerd.config.paths import Home
from peerd.errors import UsageError, disk_error

if TYPE_CHECKING:
    from peerd.config.settings import Settings

MOST_DEVICES = 64
"""Number of devices in one machine; more is a mistake."""


@dataclass(frozen=True, slots=True)
class DeviceHomes:
    """The home that the user names, and the devices of its daemons. One daemon without a device's name is the usual case."""

    root: Home
    devices: tuple[str, ...] = ("",)

    @property
    def are_several(self) -> bool:
        return len(self.devices) > 1

    @property
    def homes(self) -> tuple[Home, ...]:
        """One for each device, in the same order."""
        return tuple(map(self.root.of_device, range(len(self.devices))))


def homes_of(home: Home) -> DeviceHomes:
    """The homes of the daemons that were last started from a home."""
    try:
        names = json.loads(home.devices.read_text())["devices"]
        if isinstance(names, list) and 1 < len(names) <= MOST_DEVICES and all(isinstance(name, str) for name in names):
            return DeviceHomes(home, tuple(names))
    except (OSError, ValueError, KeyError, TypeError):
        pass  # absent, or damaged: the next start writes it anew
    return DeviceHomes(home)


def owner_home_of(home: Home) -> Home:
    """The home that holds the limits: this one, or, for the daemon of a further device, the home in which its own lies."""
    root = Home(home.folder.parent.parent)
    return root if home.folder in {each.folder for each in homes_of(root).homes[1:]} else home


def every_home(root: Home) -> list[Home]:
    """A home and those of all devices that it ever had daemons for."""
    folders = (root.folder / "devices").glob("*") if (root.folder / "devices").is_dir() else ()
    return [root, *(Home(folder) for folder in sorted(folders) if folder.name.isdigit())]


def note_devices(homes: DeviceHomes) -> None:
    """Write which devices a home has daemons for; one daemon is noted by no file. DiskError if that fails."""
    try:
        homes.root.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not homes.are_several:
            homes.root.devices.unlink(missing_ok=True)
            return
    except OSError as error:
        raise disk_error(homes.root.folder, error, "choose a folder you can write to with --home") from None
    replace_file(homes.root.devices, json.dumps({"devices": homes.devices}))


def settings_of_each(first: Settings, homes: DeviceHomes) -> list[Settings]:
    """The settings of each device's daemon, from those of the first.

    Ports that were named are the first daemon's, and the others take the ports after them. Only the first starts the run, relays and logs
    scalars. The others join where it does; a caller adds its address. UsageError if there are not enough ports.
    """
    count = len(homes.devices)
    _check_ports(first, count)
    organiser = str(Path(first.run_file).parent) if first.run_file else ""
    several = replace(first, owner_home=str(homes.root.folder), sharers=count, organiser=organiser)
    further = replace(several, run_file="", relay=False, relay_rate=0.0, relay_daily=0, tensorboard="", wandb="")
    found = []
    for number, (device, home) in enumerate(zip(homes.devices, homes.homes, strict=True)):
        ports: dict[str, Any] = {name: port and port + number for name, port in _ports(first).items()}
        found.append(replace(further if number else several, home=str(home.folder), device=device, **ports))
    return found


def _ports(settings: Settings) -> dict[str, int]:
    return {name: getattr(settings, name) for name in ("port", "direct_port", "quic_port", "dashboard_port")}


def _check_ports(settings: Settings, count: int) -> None:
    taken: set[int] = set()
    for name, port in _ports(settings).items():
        wanted = set(range(port, port + count)) if port else set()
        flag = "--" + name.replace("_", "-")
        if wanted and (max(wanted) > 65535 or wanted & taken):
            raise UsageError(
                f"{flag} {port}: {count} devices take the ports {port} to {port + count - 1}", "name ports that lie further apart"
            )
        taken |= wanted
