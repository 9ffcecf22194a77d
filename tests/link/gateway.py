"""A home in one network namespace: p2pd behind a router that speaks NAT-PMP (RFC 6886). Run under `unshare --user --map-root-user --net`.

The router is this process, at the default route's address. Prints p2pd's addresses as one JSON line as soon as the mapped one is
among them, with the requests that led to it.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

from peerd.link.p2pd import P2pdConfig, is_public, start_p2pd
from peerd.swarm.identity import Identity

ROUTER, PUBLIC, PORT = "10.9.0.1", "11.22.33.44", 4005
SET_UP = f"""
ip link set lo up; ip link add home0 type veth peer name home1; ip link set home1 up
ip addr add 10.9.0.2/24 dev home0; ip link set home0 up; ip route add default via {ROUTER} dev home0; ip addr add {ROUTER}/32 dev lo
"""
PATIENCE_S = 60.0


class Router(asyncio.DatagramProtocol):
    """Grants what it is asked for, at the port that is asked for: p2pd takes it for granted that it gets that."""

    def __init__(self) -> None:
        self.mappings: list[dict[str, int]] = []

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, address: Any) -> None:
        if data[1] == 0:
            self._transport.sendto(struct.pack("!BBHI4s", 0, 128, 0, 1, socket.inet_aton(PUBLIC)), address)
            return
        _, kind, _, inside, outside, life_s = struct.unpack("!BBHHHI", data)
        self.mappings.append({"inside": inside, "outside": outside, "life_s": life_s})
        self._transport.sendto(struct.pack("!BBHIHHI", 0, 128 + kind, 0, 1, inside, outside, life_s), address)


async def main(folder: Path) -> None:
    Identity.load_or_create(folder / "key")
    _, router = await asyncio.get_running_loop().create_datagram_endpoint(Router, local_addr=(ROUTER, 5351))
    config = P2pdConfig(identity_file=folder / "key", run_folder=folder, host="0.0.0.0", port=PORT, map_port=True)  # noqa: S104
    daemon = await start_p2pd(config)
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not is_public((addresses := await daemon.addresses())[0]):  # noqa: ASYNC110 - p2pd tells only what it is asked
                await asyncio.sleep(0.1)
        print(json.dumps({"addresses": addresses, "mappings": router.mappings}), flush=True)
    finally:
        await daemon.stop()


if __name__ == "__main__":
    subprocess.run(["sh", "-ec", SET_UP], check=True)
    asyncio.run(main(Path(sys.argv[1])))
