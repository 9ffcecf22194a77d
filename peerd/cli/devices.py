"""Daemons of several devices under one home: which devices, and one request to all of them."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from peerd.errors import IdentityInUseError, NoDaemonError, PeerdError, UsageError

if TYPE_CHECKING:
    from peerd.config.device_homes import DeviceHomes
    from peerd.config.paths import Home
    from peerd.config.settings import Settings
    from peerd.control.client import ControlClient

ALL = "all"
COUNT_SILENCE_S = 120.0
"""Importing torch for the first time takes long where the disk is slow."""
_NAMES = "name auto, all, cpu, cuda, cuda:N or mps, or several with commas between"
_ONE_OF_SEVERAL = re.compile(r"cpu(:[0-9]{1,2})?|mps|cuda:[0-9]{1,3}")
"""`cpu:0,cpu:1` are two daemons on the processor, such as for the two stages of a run."""


def check_devices(text: str) -> None:
    """Raise a UsageError if the value of --device names no device and no list of devices."""
    names = text.split(",")
    if len(names) > 1:
        wrong = next((name for name in names if not _ONE_OF_SEVERAL.fullmatch(name)), None)
        if wrong is not None:
            raise UsageError(f"--device {text}: {wrong or 'an empty name'} cannot be one of several", "name cpu, cuda:N or mps, each once")
        if len(set(names)) < len(names):
            raise UsageError(
                f"--device {text}: a device stands there twice", "name each once; two daemons on the processor are cpu:0,cpu:1"
            )
    elif text not in ("auto", ALL, "cuda") and not _ONE_OF_SEVERAL.fullmatch(text):
        raise UsageError(f"--device {text}: unknown", _NAMES)


def devices_of(text: str) -> tuple[str, ...]:
    """The devices that a checked value of --device names. For `all` a child process looks what is here."""
    if text != ALL:
        return tuple(text.split(","))
    from peerd.cli.launch import run_child

    return tuple(run_child("peerd.daemon.devices_here", {}, what="looking for devices", silence_s=COUNT_SILENCE_S)["devices"])


def plan_devices(settings: Settings, home: Home) -> tuple[DeviceHomes, list[Settings]]:
    """The homes and the settings of the daemons to start; the homes remember them. Raises IdentityInUseError if one of them runs."""
    from peerd.config.device_homes import DeviceHomes, homes_of, note_devices, settings_of_each

    before, devices = homes_of(home), devices_of(settings.device)
    if len(devices) == 1:
        homes, each = DeviceHomes(home), [replace(settings, device=devices[0])]
    else:
        homes = DeviceHomes(home, devices)
        each = settings_of_each(settings, homes)
    if homes.are_several or before.are_several:
        for one in {**dict.fromkeys(homes.homes), **dict.fromkeys(before.homes)}:
            _check_is_free(one)
        note_devices(homes)
    return homes, each


def _check_is_free(home: Home) -> None:
    from peerd.control.client import ControlClient

    try:
        process = ControlClient(home).request("status")["pid"]
    except NoDaemonError:
        return
    raise IdentityInUseError(
        f"a daemon runs from {home.folder} already (process {process})", "end it with `peerd leave`, or choose another folder with --home"
    )


@dataclass(frozen=True, slots=True)
class Answer:
    """What the daemon of one device said."""

    device: str
    home: Home
    reply: dict[str, Any] | None
    error: PeerdError | None


def ask_each(home: Home, verb: str, on_progress: Callable[[str], None] | None = None, **arguments: Any) -> list[Answer]:
    """Ask the daemons of all devices of a home at once. Raises the first's NoDaemonError if none of them runs."""
    from peerd.config.device_homes import homes_of

    homes = homes_of(home)
    answers: dict[str, Answer] = {}

    def ask(device: str, one: Home) -> None:
        def tell(text: str) -> None:
            if on_progress is not None:
                on_progress(f"{device}: {text}" if homes.are_several else text)

        answers[device] = _ask(device, one, verb, on_progress=tell, **arguments)

    if not homes.are_several:
        ask("", home)
    else:
        asking = [threading.Thread(target=ask, args=pair, daemon=True) for pair in zip(homes.devices, homes.homes, strict=True)]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
    in_order = [answers[device] for device in homes.devices]
    if all(isinstance(answer.error, NoDaemonError) for answer in in_order) and in_order[0].error is not None:
        raise in_order[0].error
    return in_order


def _ask(device: str, home: Home, verb: str, **arguments: Any) -> Answer:
    from peerd.control.client import ControlClient

    try:
        return Answer(device, home, ControlClient(home).request(verb, **arguments), None)
    except PeerdError as error:
        return Answer(device, home, None, error)


def first_of(answers: Sequence[Answer]) -> dict[str, Any]:
    """The first reply. Raises the first error other than that a daemon does not run."""
    for answer in answers:
        if answer.error is not None and not isinstance(answer.error, NoDaemonError):
            raise answer.error
    return next(answer.reply for answer in answers if answer.reply is not None)


def running_client(home: Home) -> ControlClient:
    """A client of the first daemon of a home that has a control socket; of the home's own one if none has."""
    from peerd.config.device_homes import homes_of
    from peerd.control.client import ControlClient

    running = [one for one in homes_of(home).homes if one.control_socket.exists()]
    return ControlClient(running[0] if running else home)


def all_clients(home: Home) -> list[ControlClient]:
    """A client for each device's daemon."""
    from peerd.config.device_homes import homes_of
    from peerd.control.client import ControlClient

    return [ControlClient(one) for one in homes_of(home).homes]


def further_clients(home: Home, first: ControlClient) -> dict[str, ControlClient]:
    """Clients of the daemons besides the first one, by device."""
    from peerd.config.device_homes import homes_of

    devices = homes_of(home).devices
    return {device: client for device, client in zip(devices, all_clients(home), strict=True) if client.home != first.home}


def status_of_all(answers: Sequence[Answer]) -> dict[str, Any]:
    """One status: that of the first daemon, and, if there are several, all of them by device."""
    reply = next((answer.reply for answer in answers if answer.reply is not None), None)
    if reply is None or len(answers) == 1:
        return first_of(answers)
    return {**reply, "devices": [_device_info(answer) for answer in answers]}


def _device_info(answer: Answer) -> Mapping[str, Any]:
    told = "" if answer.error is None else answer.error.message
    return {"device": answer.device, "home": str(answer.home.folder), "status": answer.reply, "error": told}
