"""Starts p2pd (hivemind's libp2p daemon), attaches to it and watches it.

p2pd runs under keeper.py, so it dies with this process even on SIGKILL. hivemind's own start-up code is not used, because after a
crash it leaves sockets in /tmp and an orphaned process.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import json
import os
import socket
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peerd.errors import PeerdError, PortTakenError, UnreachableError, system_error
from peerd.link.libp2p import P2P, P2PD, Multiaddr, PeerID
from peerd.link.small_child import SmallChild, start_small_child
from peerd.link.streams import Stream
from peerd.served_time import served_timeout

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 5.0
CONTROL_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class P2pdConfig:
    """How p2pd listens. The keeper deletes the folders in `remove`, and those in `prune` that are empty, when the daemon has ended."""

    identity_file: Path
    run_folder: Path
    host: str = "127.0.0.1"
    port: int = 0
    bootstrap: tuple[str, ...] = ()
    water_marks: tuple[int, int] = (256, 512)
    """Above the second number of connections p2pd closes some of them until the first number is left."""
    map_port: bool = False
    """Ask the router to forward the port (UPnP, NAT-PMP). p2pd renews this every 20 s, and it expires a minute after p2pd has ended."""
    remove: tuple[Path, ...] = ()
    prune: tuple[Path, ...] = ()


@dataclass(slots=True)
class P2pd:
    """A running p2pd with a client attached. `exited` is set when p2pd has ended, for whatever reason."""

    p2p: P2P
    process: SmallChild
    exited: asyncio.Event = field(default_factory=asyncio.Event)

    async def addresses(self) -> tuple[str, ...]:
        """Return this peer's multiaddrs, with its id: public ones first, loopback last."""
        async with served_timeout(CONTROL_TIMEOUT_S):
            found = [str(address) for address in await self.p2p.get_visible_maddrs(latest=True)]
        return tuple(sorted((address for address in found if "/tcp/" in address and "/ip4/" in address), key=_remoteness))

    async def connect(self, peer: str, addresses: Sequence[str]) -> None:
        """Make p2pd dial a peer at these addresses. Raises UnreachableError when none answers."""
        try:
            bare = [Multiaddr(address.split("/p2p/")[0]) for address in addresses]
            async with served_timeout(CONTROL_TIMEOUT_S):
                await self.p2p._client.connect(PeerID.from_base58(peer), bare)
        except Exception as error:  # hivemind does not document what it raises
            raise UnreachableError(f"{peer} does not answer: {str(error) or type(error).__name__}") from None

    async def disconnect(self, peer: str) -> None:
        """Close every connection to a peer, with the streams on it. The next one is dialled anew."""
        with contextlib.suppress(Exception):  # there was none, or p2pd does not answer, which the supervisor notices
            async with served_timeout(CONTROL_TIMEOUT_S):
                await self.p2p._client.disconnect(PeerID.from_base58(peer))

    async def is_connected(self, peer: str) -> bool:
        """Return whether there is a connection now, whichever side dialled."""
        try:
            async with served_timeout(CONTROL_TIMEOUT_S):
                return any(info.peer_id.to_base58() == peer for info in await self.p2p._client.list_peers())
        except Exception:  # any failure means no
            return False

    async def open_stream(self, peer: str, protocol: str) -> Stream:
        """Open a stream to a peer that is connected or whose addresses p2pd knows. Raises OSError if that fails."""
        try:
            _, reader, writer = await self.p2p.call_binary_stream_handler(PeerID.from_base58(peer), protocol)
        except Exception as error:  # hivemind does not document what it raises
            raise OSError(str(error)) from None
        return reader, writer

    async def answers(self, timeout_s: float) -> bool:
        """Return whether p2pd still answers; it can hang without ending. Where this process can open no socket, p2pd is not at fault."""
        try:
            async with served_timeout(timeout_s):
                await self.p2p._client.identify()
        except OSError as error:
            return system_error(error) is not None
        except Exception:  # any other failure means no
            return False
        return True

    async def discard(self) -> None:
        """End a p2pd that is to be replaced; the run folder and this daemon's sockets stay. TimeoutError if it does not end."""
        await self._detach()
        self.process.tell(b"x")
        async with served_timeout(STOP_TIMEOUT_S):
            await self.process.wait()

    async def stop(self) -> None:
        """Detach and end the keeper, which ends p2pd and removes the sockets."""
        await self._detach()
        self.process.close_input()
        try:
            async with served_timeout(STOP_TIMEOUT_S):
                await self.process.wait()
        except TimeoutError:
            self.process.kill()

    async def _detach(self) -> None:
        """Close the client. One whose p2pd is dead may never answer."""
        with contextlib.suppress(Exception):
            async with served_timeout(STOP_TIMEOUT_S):
                await self.p2p.shutdown()


async def start_p2pd(config: P2pdConfig) -> P2pd:
    """Start p2pd and attach to it. Raises PortTakenError, UnreachableError for the bootstrap peers, or PeerdError with p2pd's output."""
    check_port_free(config.host, config.port)
    control = config.run_folder / "p2pd.sock"
    control.unlink(missing_ok=True)
    order = {
        "command": _command(config, control),
        "remove": [str(folder) for folder in (config.run_folder, *config.remove)],
        "prune": [str(folder) for folder in config.prune],
    }
    keeper = Path(__file__).with_name("keeper.py")
    command = (sys.executable, "-I", "-S", str(keeper), json.dumps(order))
    process = await start_small_child(command, {**os.environ, "GOLOG_LOG_LEVEL": "error"})
    last_words: deque[str] = deque(maxlen=20)
    try:
        async with served_timeout(START_TIMEOUT_S):
            await _wait_until_ready(process, last_words, config.bootstrap)
    except TimeoutError:
        process.kill()
        raise PeerdError(f"p2pd did not start within {START_TIMEOUT_S:.0f} s: {' | '.join(last_words)}") from None
    # The client's own socket also goes into the run folder, where the keeper removes it.
    attached: Any = type("LocalP2P", (P2P,), {"_UNIX_SOCKET_PREFIX": f"/unix{config.run_folder}/"})
    return P2pd(await attached.replicate(Multiaddr(f"/unix{control}")), process)


async def watch(daemon: P2pd) -> None:
    """Drain p2pd's output until it ends, then set `exited`."""
    while await daemon.process.output.read(65536):
        pass
    await daemon.process.wait()
    daemon.exited.set()


def is_public(address: str) -> bool:
    """Return whether the IPv4 address of a multiaddr is a public one."""
    return _remoteness(address) == 0


def _remoteness(address: str) -> int:
    """Return 0 for a public address, 1 for one of a private network, 2 for loopback."""
    host = ipaddress.IPv4Address(address.split("/")[2])
    return 2 if host.is_loopback else 0 if host.is_global else 1


def _command(config: P2pdConfig, control: Path) -> list[str]:
    command = [
        str(P2PD), f"-id={config.identity_file}", f"-listen=/unix{control}",
        f"-hostAddrs=/ip4/{config.host}/tcp/{config.port}", "-dhtServer=1", "-relay=1", "-relayService=0", "-autonat=0",
        f"-natPortMap={int(config.map_port)}", "-autoRelay=0", "-connManager=1", f"-connLo={config.water_marks[0]}",
        f"-connHi={config.water_marks[1]}", "-idleTimeout=0s", "-persistentConnMaxMsgSize=4194304",
    ]  # fmt: skip
    if config.bootstrap:
        command += ["-b=1", "-bootstrapPeers=" + ",".join(config.bootstrap)]
    return command


async def _wait_until_ready(process: SmallChild, last_words: deque[str], bootstrap: Sequence[str]) -> None:
    while line := await process.output.readline():
        text = line.decode(errors="replace").strip()
        last_words.append(text)
        if text.startswith("Peer ID:"):
            return
    said = " | ".join(last_words)
    if "address already in use" in said:
        raise PortTakenError("the port is in use", "choose another one with --port, or leave it out")
    if "failed to connect to bootstrap peers" in said:
        remedy = "check the address, that its daemon is running, and your network"
        raise UnreachableError(f"nobody answers at {' or '.join(bootstrap)}", remedy)
    raise PeerdError(f"p2pd ended while it started: {said or 'without output'}")


def check_port_free(host: str, port: int) -> None:
    """Raise PortTakenError if the port cannot be bound. libp2p would share it with another process of the user, which peerd must not."""
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closing connections of an earlier daemon do not count
        try:
            probe.bind((host, port))
        except PermissionError:
            raise PortTakenError(f"port {port} needs more rights than this user has", "choose one above 1023 with --port") from None
        except OSError as error:
            in_use = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used on {host}: {error.strerror}"
            raise PortTakenError(f"port {port} {in_use}", "choose another one with --port, or leave it out") from None
