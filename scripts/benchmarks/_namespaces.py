"""Simulates machines on home connections: network namespaces joined by links of a chosen rate and round trip. Needs root.

Each namespace has its own loopback and a device `link0`; all devices are connected by one switch in user space (`_switch.py`), because
not every kernel has netem. Names contain this process's id, so that benchmarks do not collide. The context removes everything at its end.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType

from peerd.cli.launch import module_command
from peerd.errors import PeerdError
from scripts.benchmarks._switch import Links

SUBNET = "10.99.0"
DEVICE = "link0"
NAMESPACES = Path("/run/netns")


def require_root() -> None:
    """Raise PeerdError, with a remedy, if namespaces cannot be made here."""
    if os.geteuid() != 0:
        raise PeerdError("network namespaces need root", "run this as root, on a machine that may be disturbed")
    if shutil.which("ip") is None:
        raise PeerdError("the command `ip` is not installed", "install iproute2")
    if not Path("/dev/net/tun").exists():
        raise PeerdError("this kernel gives no TUN devices (/dev/net/tun)", "load the module tun, or run this elsewhere")


@dataclass(slots=True)
class Network:
    """Network namespaces, numbered from 0; a context manager."""

    num_machines: int
    links: Links
    offload: bool = True
    """True: the devices segment. False: each segment is a packet, which costs more time and makes `sent_bytes` exact."""
    _switch: subprocess.Popen[str] | None = None
    _made: list[str] = field(default_factory=list)

    def __enter__(self) -> Network:
        require_root()
        try:
            self._make()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._switch is not None:
            assert self._switch.stdin is not None
            assert self._switch.stdout is not None
            self._switch.stdin.close()
            self._switch.wait(10)
            self._switch.stdout.close()
        for name in self._made:
            _ip("netns", "del", name)
        self._made.clear()

    def address(self, machine: int) -> str:
        return f"{SUBNET}.{machine + 1}"

    def command(self, machine: int) -> tuple[str, ...]:
        """The command prefix that runs a command in a namespace."""
        return ("ip", "netns", "exec", self._made[machine])

    def change(self, links: Links) -> None:
        """Change the links from now on."""
        self.links = links
        assert self._switch is not None
        assert self._switch.stdin is not None
        self._switch.stdin.write(json.dumps(asdict(links)) + "\n")
        self._switch.stdin.flush()

    def sent_bytes(self, machine: int) -> int:
        """Bytes that a machine's device has sent, headers included."""
        counted = subprocess.run(
            [*self.command(machine), "cat", f"/sys/class/net/{DEVICE}/statistics/tx_bytes"], capture_output=True, check=True
        )
        return int(counted.stdout)

    def _make(self) -> None:
        devices = {f"pd{os.getpid() % 1_000_000}-{machine}": self.address(machine) for machine in range(self.num_machines)}
        self._switch = subprocess.Popen(
            module_command(
                "scripts.benchmarks._switch", json.dumps({"devices": devices, "links": asdict(self.links), "offload": self.offload})
            ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._switch.stdout is not None
        if self._switch.stdout.readline() != "ready\n":
            raise PeerdError("the switch between the namespaces did not start")
        for number, (device, address) in enumerate(devices.items()):
            name = f"peerd-{os.getpid()}-{number}"
            _ip("netns", "add", name)
            self._made.append(name)
            _ip("link", "set", device, "netns", name)
            _ip("-n", name, "link", "set", device, "name", DEVICE)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", DEVICE)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", DEVICE, "up", "txqueuelen", "10000")


def _ip(*arguments: str) -> None:
    told: Sequence[str] = arguments
    found = subprocess.run(["ip", *told], capture_output=True, text=True, check=False)
    if found.returncode:
        raise PeerdError(f"`ip {' '.join(told)}` failed: {found.stderr.strip()}", "run this as root, on a machine that may be disturbed")
