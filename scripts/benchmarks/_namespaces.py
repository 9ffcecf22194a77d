"""Simulates machines on home connections: network namespaces joined by links of a chosen rate and round trip. Needs root.

Each namespace has its own loopback and a device `link0`; all devices are connected by one switch in user space (`_switch.py`), because
not every kernel has netem. A machine may stand behind a router that translates its address (`_nat.py`). Names contain this process's id, so
that benchmarks do not collide. The context removes everything at its end.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType

from peerd.cli.launch import module_command
from peerd.errors import PeerdError
from scripts.benchmarks._switch import Links

SUBNET, HOMES = "10.99.0", "192.168"
"""Addresses of machines, and of those behind routers."""
FIRST_NEW = 128
"""The last number of the first address that a machine gets later."""
DEVICE = "link0"
PACKET_BYTES = 1500
"""Of a full packet."""
QUEUE_BYTES = 4_000_000
"""Queue of an uplink that the kernel slows down: 1.6 s at 20 Mbit/s, as in a modem with too large a buffer."""
CONGESTION_CONTROL = "cubic"
"""What Linux, macOS and Windows do at homes, whatever this machine does itself."""


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
    behind_routers: Collection[int] = ()
    """Machines that have a router each, which lets nothing in that they did not ask for."""
    _addresses: list[str] = field(default_factory=list)
    _num_new: int = 0
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
        """The address at which others see the machine."""
        return self._addresses[machine]

    def command(self, machine: int) -> tuple[str, ...]:
        """The command prefix that runs a command in a namespace."""
        return ("ip", "netns", "exec", self._made[machine])

    def change(self, links: Links) -> None:
        """Change the links from now on."""
        self.links = links
        self._order(links=asdict(links))

    def readdress(self, machine: int) -> None:
        """Take a machine's address away and give it another one, as a new lease does. What is sent to the old one reaches nothing."""
        old, new = self.address(machine), f"{SUBNET}.{FIRST_NEW + self._num_new}"
        self._num_new += 1
        self._order(address=new, of=old)
        _ip("-n", self._made[machine], "addr", "del", f"{old}/24", "dev", DEVICE)
        _ip("-n", self._made[machine], "addr", "add", f"{new}/24", "dev", DEVICE)
        self._addresses[machine] = new

    def rebind(self, machine: int) -> None:
        """Let a machine's router forget all its flows, and give those that go on new ports."""
        self._order(rebind=self.address(machine))

    def let_udp(self, machine: int, passes: bool) -> None:
        """Let a machine's router pass UDP, or lose all of it, from now on."""
        self._order(udp=passes, of=self.address(machine))

    def slow_down(self, machine: int, mbit_per_s: float) -> None:
        """Let the machine's own kernel send no faster than this. Packets wait in one queue."""
        shape = ("tbf", "rate", f"{mbit_per_s:g}mbit", "burst", "128kb", "limit", str(QUEUE_BYTES))
        command = [*self.command(machine), "tc", "qdisc", "replace", "dev", DEVICE, "root", *shape]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise PeerdError(f"`{' '.join(command[4:])}` failed: {done.stderr.strip()}", "the kernel needs the scheduler tbf")

    def _order(self, **order: object) -> None:
        assert self._switch is not None
        assert self._switch.stdin is not None
        self._switch.stdin.write(json.dumps(order) + "\n")
        self._switch.stdin.flush()

    def sent_bytes(self, machine: int) -> int:
        """Bytes that a machine's device has sent, headers included."""
        counted = subprocess.run(
            [*self.command(machine), "cat", f"/sys/class/net/{DEVICE}/statistics/tx_bytes"], capture_output=True, check=True
        )
        return int(counted.stdout)

    def resent_bytes(self, machine: int) -> int:
        """Bytes that a machine's TCP has sent once more, because they were lost or late; `sent_bytes` has them, too."""
        counted = subprocess.run([*self.command(machine), "cat", "/proc/net/snmp"], capture_output=True, check=True, text=True)
        names, values = (line.split() for line in counted.stdout.splitlines() if line.startswith("Tcp:"))
        return PACKET_BYTES * int(values[names.index("RetransSegs")])

    def _make(self) -> None:
        self._addresses = [f"{SUBNET}.{machine + 1}" for machine in range(self.num_machines)]
        devices = {f"pd{os.getpid() % 1_000_000}-{machine}": address for machine, address in enumerate(self._addresses)}
        inside = {machine: f"{HOMES}.{machine}.2" for machine in self.behind_routers}
        routers = {self.address(machine): address for machine, address in inside.items()}
        order = {"devices": devices, "routers": routers, "links": asdict(self.links), "offload": self.offload}
        self._switch = subprocess.Popen(
            module_command("scripts.benchmarks._switch", json.dumps(order)),
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
            _ip("-n", name, "addr", "add", f"{inside.get(number, address)}/24", "dev", DEVICE)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", DEVICE, "up", "txqueuelen", "10000")
            if number in inside:
                _ip("-n", name, "route", "add", "default", "dev", DEVICE)
            _ip("-n", name, "route", "replace", f"{SUBNET}.0/24", "dev", DEVICE, "congctl", CONGESTION_CONTROL)


def _ip(*arguments: str) -> None:
    told: Sequence[str] = arguments
    found = subprocess.run(["ip", *told], capture_output=True, text=True, check=False)
    if found.returncode:
        raise PeerdError(f"`ip {' '.join(told)}` failed: {found.stderr.strip()}", "run this as root, on a machine that may be disturbed")
