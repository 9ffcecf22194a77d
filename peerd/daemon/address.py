"""The address that a volunteer pastes: a libp2p multiaddr that ends in /p2p/PEER, followed by #RUN-ID if that is known.

The address of a peer behind a relay is the relay's, followed by /p2p-circuit/p2p/PEER.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, replace

from peerd.errors import AddressError
from peerd.link.peer_keys import public_key_of
from peerd.table.record import PeerId, RunId

REMEDY = "paste the whole line that `peerd start` printed, like /ip4/203.0.113.5/tcp/4001/p2p/12D3KooW...#RUN-ID"


@dataclass(frozen=True, slots=True)
class Address:
    multiaddr: str
    peer: PeerId
    run: RunId | None

    @property
    def is_loopback(self) -> bool:
        return self.multiaddr.startswith("/ip4/127.")


def parse_address(text: str) -> Address:
    """Parse an address. Raises AddressError, which says what is wrong."""
    multiaddr, _, run = text.strip().partition("#")
    parts = multiaddr.split("/")
    is_plain, is_relayed = len(parts) == 7, len(parts) == 10 and parts[7:9] == ["p2p-circuit", "p2p"]
    if not (is_plain or is_relayed) or parts[0] or parts[1] not in ("ip4", "dns4") or parts[3] != "tcp" or parts[5] != "p2p":
        raise AddressError(f"{text!r} is not an address", REMEDY)
    try:
        if parts[1] == "ip4":
            ipaddress.IPv4Address(parts[2])
        if not 0 < int(parts[4]) < 65536:
            raise ValueError("a port is between 1 and 65535")
        for peer in parts[6::3]:
            public_key_of(peer)
    except ValueError as error:
        raise AddressError(f"{text!r} is not an address: {error}", REMEDY) from None
    if run and (len(run) != 32 or any(c not in "0123456789abcdef" for c in run)):
        raise AddressError(f"{run!r} after the # is not a run id", REMEDY)
    return Address(multiaddr, PeerId(parts[-1]), RunId(run) if run else None)


def of_one_run(contacts: Iterable[Address]) -> tuple[Address, ...]:
    """The addresses, those without a run's id with that which the others name, if it is one: else any run might answer there."""
    told = tuple(contacts)
    runs = {each.run for each in told if each.run is not None}
    return tuple(replace(each, run=each.run or next(iter(runs))) for each in told) if len(runs) == 1 else told
