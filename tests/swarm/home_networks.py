"""Machines in network namespaces: one with a public address, and homes behind routers that masquerade and let nothing in.

public 11.22.33.1 ---+--- internet (a bridge) ---+--- router 11.22.33.11 --- home0 192.168.0.2
                                                 +--- router 11.22.33.12 --- home1 192.168.1.2
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

_RULES = """
table ip home {
  chain out { type nat hook postrouting priority 100; oifname "wan" masquerade; }
  chain in { type filter hook input priority 0; policy drop; iifname "lan" accept; ct state established,related accept; }
  chain through { type filter hook forward priority 0; policy drop; iifname "lan" accept; ct state established,related accept; }
}
"""


def why_not() -> str:
    """Why this machine cannot make them; empty where it can."""
    if sys.platform != "linux" or os.getuid() != 0:
        return "needs root on Linux for network namespaces"
    lacking = [program for program in ("ip", "nft") if shutil.which(program) is None]
    return f"needs the program {lacking[0]}" if lacking else ""


@dataclass(frozen=True, slots=True)
class Networks:
    """Names of namespaces."""

    public: str
    homes: tuple[str, ...]
    routers: tuple[str, ...]
    """Of the homes."""
    address: str = "11.22.33.1"
    """Of the public one."""

    def forward(self, home: int, port: int) -> None:
        """The router sends on to the home what comes in at a TCP port, as its owner would set it."""
        rules = f"""
            add chain ip home forwarded {{ type nat hook prerouting priority -100; }}
            add rule ip home forwarded iifname "wan" tcp dport {port} dnat to 192.168.{home}.2
            add rule ip home through tcp dport {port} ct status dnat accept
        """
        _nft(self.routers[home], rules)

    def lose_udp(self, home: int) -> None:
        """The router passes no UDP any more, in either direction."""
        _nft(self.routers[home], "insert rule ip home through meta l4proto udp drop")


@contextlib.contextmanager
def home_networks(num_homes: int) -> Iterator[Networks]:
    """Gone when the block ends, with all that runs in them having ended before."""
    mark = f"peerd-t{os.getpid()}"
    names = [f"{mark}-{name}" for name in ("net", "public", *(f"{kind}{home}" for home in range(num_homes) for kind in ("router", "home")))]
    made = []
    try:
        for name in names:
            _ip("netns", "add", name)
            made.append(name)
            _ip("-n", name, "link", "set", "lo", "up")
        net, public = names[:2]
        _ip("-n", net, "link", "add", "bridge", "type", "bridge")
        _ip("-n", net, "link", "set", "bridge", "up")
        _plug(net, public, "11.22.33.1/24")
        for home in range(num_homes):
            _make_home(net, names[2 + 2 * home], names[3 + 2 * home], home)
        yield Networks(public, tuple(names[3::2]), tuple(names[2::2]))
    finally:
        for name in made:
            _ip("netns", "del", name)


def _make_home(net: str, router: str, home: str, number: int) -> None:
    _plug(net, router, f"11.22.33.{11 + number}/24")
    _ip("-n", router, "link", "add", "lan", "type", "veth", "peer", "name", "lan0", "netns", home)
    for name, device, address in ((router, "lan", f"192.168.{number}.1/24"), (home, "lan0", f"192.168.{number}.2/24")):
        _ip("-n", name, "addr", "add", address, "dev", device)
        _ip("-n", name, "link", "set", device, "up")
    _ip("-n", home, "route", "add", "default", "via", f"192.168.{number}.1")
    _ip("netns", "exec", router, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
    _nft(router, _RULES)


def _plug(net: str, name: str, address: str) -> None:
    """Into the internet."""
    port = f"p{address.split('/')[0].rpartition('.')[2]}"
    _ip("-n", name, "link", "add", "wan", "type", "veth", "peer", "name", port, "netns", net)
    _ip("-n", net, "link", "set", port, "master", "bridge")
    _ip("-n", net, "link", "set", port, "up")
    _ip("-n", name, "addr", "add", address, "dev", "wan")
    _ip("-n", name, "link", "set", "wan", "up")


def _nft(name: str, rules: str) -> None:
    subprocess.run(["ip", "netns", "exec", name, "nft", "-f", "-"], input=rules, text=True, check=True, capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
