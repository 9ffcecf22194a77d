"""What this machine tells about its owner's use of it. A sensor that is not there reads None and never pauses anybody."""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import psutil
import structlog
import torch

from peerd.policy.owner.governor import Limits, Readings

SMOOTHING = 0.5
"""Weight of the newest look in the share of other programs."""
POWER_SMOOTHING = 0.2
"""And in what the GPU draws: looks fall into work and into rest."""
GPU_BUSY_PERCENT = 10.0
"""What other programs take of the GPU before it counts as in use; a desktop that draws itself takes less."""
ASK_TIMEOUT_S = 2.0
SLOW_PERIOD_S = 30.0
"""Between questions that start a process."""
IDLE_AFTER_S = 300.0
DAEMON_MODULE = "peerd.daemon"
"""What a daemon's command line names."""
_METERED = ("1", "3")
"""NetworkManager's NM_METERED_YES and NM_METERED_GUESS_YES."""
LOG = structlog.get_logger()
T = TypeVar("T")


@dataclass(slots=True)
class Sensors:
    """Reads what the limits need, and no more. Not for the event loop: some questions start a process."""

    device: torch.device
    has_neighbours: bool = False
    """Daemons of this machine's other devices are not other programs."""
    _shares: tuple[float, float, dict[int, float]] | None = None
    """Clock, busy seconds of all cores without programs that give way (nice), of which mine by process."""
    _others: float | None = None
    _power: float | None = None
    _gpu_seen_us: int = 0
    """Time stamp of NVML's last sample."""
    _slow: dict[str, tuple[float, bool | None]] = field(default_factory=dict)
    _children: list[psutil.Process] = field(default_factory=list)
    _looked_s: float = float("-inf")
    _failed: set[str] = field(default_factory=set)
    """Sensors that have failed, each of which the log tells once."""

    @staticmethod
    def has_to_look(limits: Limits) -> bool:
        """Whether these limits need more than the time and what was moved."""
        return not (limits.while_used and limits.on_battery and limits.on_metered) or limits.max_temperature > 0 or limits.power > 0

    def read(self, limits: Limits, today: int, this_month: int) -> Readings:
        now = datetime.datetime.now()  # noqa: DTZ005 - the owner's own day
        watches = not limits.while_used
        return Readings(
            minute=60 * now.hour + now.minute,
            today=today,
            this_month=this_month,
            others_share=self._sensed("processor", self._others_share) if watches else None,
            gpu_shared=self._gpu_shared() if watches else None,
            input_idle=self._now_and_then("idle", _input_idle) if watches else None,
            on_battery=None if limits.on_battery else self._sensed("battery", _on_battery),
            on_metered=None if limits.on_metered else self._now_and_then("metered", _metered),
            temperature=self._temperature() if limits.max_temperature else None,
            power=self._power_draw() if limits.power else None,
        )

    def _sensed(self, name: str, ask: Callable[[], T | None]) -> T | None:
        """The answer of a sensor. One that fails tells nothing, and costs no other sensor and no other limit."""
        try:
            return ask()
        except Exception as error:  # the edge of what the platform tells
            if name not in self._failed:
                self._failed.add(name)
                LOG.warning("a sensor failed", sensor=name, error=repr(error))
            return None

    def _others_share(self) -> float | None:
        """The smoothed share of all cores that other programs took since the last look."""
        times = psutil.cpu_times()
        busy = sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        # Programs that gave way on purpose (nice) are nobody at work.
        busy -= getattr(times, "nice", 0.0)
        mine, now_s = self._own_cpu_s(), time.monotonic()
        before, self._shares = self._shares, (now_s, busy, mine)
        if before is None or now_s - before[0] < 0.5:
            return self._others
        spent = (busy - before[1]) - sum(spent_s - before[2].get(process, spent_s) for process, spent_s in mine.items())
        share = min(1.0, max(0.0, spent / ((now_s - before[0]) * (psutil.cpu_count() or 1))))
        self._others = share if self._others is None else SMOOTHING * share + (1 - SMOOTHING) * self._others
        return self._others

    def _own_cpu_s(self) -> dict[int, float]:
        """CPU seconds of this daemon, its children and its neighbours, by process, without those of threads that give way.

        The list is renewed if one is gone, and now and then.
        """
        known = self._children and all(child.is_running() for child in self._children)
        if not known or time.monotonic() - self._looked_s >= SLOW_PERIOD_S:
            daemons = [psutil.Process(), *(_neighbours() if self.has_neighbours else ())]
            self._looked_s, self._children = time.monotonic(), [*daemons[1:], *_children_of(daemons)]
        found = {}
        for process in (psutil.Process(), *self._children):
            with contextlib.suppress(psutil.Error):
                found[process.pid] = _usual_cpu_s(process)
        return found

    def _gpu_shared(self) -> bool | None:
        """True if other programs use the GPU. NVML tells, which the extra `gpu` brings."""
        if self.device.type != "cuda":
            return None
        with contextlib.suppress(Exception):  # no driver, no library, no permission: then it does not tell
            import pynvml

            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(self.device).uuid}")
            try:
                samples = pynvml.nvmlDeviceGetProcessUtilization(handle, self._gpu_seen_us)
            except pynvml.NVMLError as error:
                if error.value != pynvml.NVML_ERROR_NOT_FOUND:  # this GPU does not tell how much
                    return any(map(_is_other, (process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle))))
                samples = []
            self._gpu_seen_us = max((sample.timeStamp for sample in samples), default=self._gpu_seen_us)
            return taken_by_all((sample.pid, sample.smUtil) for sample in samples if _is_other(sample.pid)) > GPU_BUSY_PERCENT
        return None

    def _temperature(self) -> float | None:
        """The temperature of the hottest sensor, including the GPU's."""
        told = (self._sensed("temperature", _temperature), gpu_temperature(self.device))
        return max((found for found in told if found), default=None)

    def _power_draw(self) -> float | None:
        now = gpu_power(self.device)
        if now is None or self._power is None:
            self._power = now
        else:
            self._power += POWER_SMOOTHING * (now - self._power)
        return self._power

    def _now_and_then(self, name: str, ask: Callable[[], bool | None]) -> bool | None:
        asked_s, told = self._slow.get(name, (float("-inf"), None))
        if time.monotonic() - asked_s >= SLOW_PERIOD_S:
            told = self._sensed(name, ask)
            self._slow[name] = (time.monotonic(), told)
        return told


def _usual_cpu_s(process: psutil.Process) -> float:
    """CPU seconds of a process, without what the machine counts apart: the work of threads that give way, outside of the kernel."""
    spent = process.cpu_times()
    if not hasattr(psutil.cpu_times(), "nice"):
        return spent.user + spent.system
    if sys.platform != "linux":
        return spent.system + (spent.user if process.nice() <= 0 else 0.0)
    niced = sum(thread.user_time for thread in process.threads() if os.getpriority(os.PRIO_PROCESS, thread.id) > 0)
    return spent.user + spent.system - niced


def _neighbours() -> Iterator[psutil.Process]:
    """This user's other daemons."""
    user = os.getuid()
    for process in psutil.process_iter(["cmdline", "uids"]):
        command, users = process.info["cmdline"] or (), process.info["uids"]
        if DAEMON_MODULE in command[:5] and users is not None and users.real == user and process.pid != os.getpid():
            yield process


def _children_of(daemons: Iterable[psutil.Process]) -> Iterator[psutil.Process]:
    for daemon in daemons:
        with contextlib.suppress(psutil.Error):  # a neighbour may end meanwhile
            yield from daemon.children(recursive=True)


def _on_battery() -> bool | None:
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    return None if battery is None or battery.power_plugged is None else not battery.power_plugged


def taken_by_all(samples: Iterable[tuple[int, float]]) -> float:
    """The percentage of the GPU that all processes take together. Each counts with the mean of its samples."""
    shares: dict[int, list[float]] = {}
    for process, share in samples:
        shares.setdefault(process, []).append(share)
    return sum(sum(each) / len(each) for each in shares.values())


def _is_other(pid: int) -> bool:
    """Another program's process. In a container this one has another number outside, so a number unknown here is nobody's."""
    return pid != os.getpid() and psutil.pid_exists(pid)


def gpu_power(device: torch.device) -> float | None:
    """Watts that it draws."""
    return _told_by_gpu(device, lambda: torch.cuda.power_draw(device) / 1000)


def gpu_temperature(device: torch.device) -> float | None:
    """Degrees Celsius."""
    return _told_by_gpu(device, lambda: torch.cuda.temperature(device))


def _told_by_gpu(device: torch.device, ask: Callable[[], float]) -> float | None:
    """Ask NVML, which the extra `gpu` brings, or AMD's library. None if there is no answer."""
    if device.type == "cuda":
        with contextlib.suppress(Exception):  # no driver, no library, no permission: then it does not tell
            return float(ask())
    return None


def _temperature() -> float | None:
    sensors = psutil.sensors_temperatures() if hasattr(psutil, "sensors_temperatures") else {}
    return max((float(each.current) for entries in sensors.values() for each in entries if each.current), default=None)


def _metered() -> bool | None:
    """NetworkManager's word for the connection in use."""
    name = "org.freedesktop.NetworkManager"
    told = _bus_property(name, "/org/freedesktop/NetworkManager", name, "Metered")
    return None if told is None else told in _METERED


def _input_idle() -> bool | None:
    """Whether keyboard and mouse have rested: logind's word on Linux, the HID system's on macOS."""
    if sys.platform == "darwin":
        told = _told_by("ioreg", "-c", "IOHIDSystem", "-d", "4")
        lines = [line.rpartition("=")[2] for line in (told or "").splitlines() if "HIDIdleTime" in line]
        return int(lines[0]) / 1e9 > IDLE_AFTER_S if lines and lines[0].strip().isdigit() else None
    name = "org.freedesktop.login1"
    told = _bus_property(name, "/org/freedesktop/login1", f"{name}.Manager", "IdleHint")
    return None if told is None else told == "true"


def _bus_property(service: str, path: str, interface: str, name: str) -> str | None:
    told = _told_by("busctl", "get-property", service, path, interface, name)
    return told.split()[-1] if told and told.split() else None


def _told_by(*command: str) -> str | None:
    """Its standard output; None where the program is not there or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
