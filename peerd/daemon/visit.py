"""Asks a peer for the swarm's table without joining the swarm, under an identity that is thrown away."""

from __future__ import annotations

import asyncio
from typing import Any

import uvloop

from peerd.daemon.address import parse_address
from peerd.daemon.enter import first_look, membership_for
from peerd.daemon.network import ask_for_run, visitor
from peerd.daemon.swarm_replies import TableReport


async def visit(text: str) -> dict[str, Any]:
    """The swarm's table as the peer at the address has it. AddressError, UnreachableError, SignatureError."""
    asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
    address = parse_address(text)
    async with visitor([address]) as (network, identity, book):
        signed = await ask_for_run(network, address)
        membership = membership_for(identity, signed, book)
        await first_look(network, membership, address.peer)
        return dict(TableReport(signed, membership).peers(tokens_per_second=0.0))


def run(request: str) -> dict[str, Any]:
    """The request is the address."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(visit(request))
