"""`python -m peerd.daemon.visit ADDRESS`: who is in the swarm at an address, asked without joining it.

Prints one PeersReply on standard output, or one error line on standard error and its exit code. Runs under an identity
of its own that is thrown away.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("HIVEMIND_LOGLEVEL", "CRITICAL")

import asyncio
import json
import shutil
import tempfile
from pathlib import Path

import uvloop

from peerd.config.paths import Home
from peerd.config.settings import Settings
from peerd.daemon.address import parse_address
from peerd.daemon.enter import first_look
from peerd.daemon.network import ask_for_run, open_network
from peerd.daemon.swarm_replies import TableReport
from peerd.errors import PeerdError
from peerd.swarm.identity import Identity
from peerd.swarm.membership import Membership
from peerd.table.view import TTL_PERIODS


async def visit(text: str, home: Home) -> dict[str, object]:
    """The swarm's table as the peer at the address has it. AddressError, UnreachableError, SignatureError, ClockError."""
    address = parse_address(text)
    host = "127.0.0.1" if address.is_loopback else "0.0.0.0"  # noqa: S104 - the answer may come in anywhere
    settings = Settings(home=str(home.folder), join=text, host=host, port_mapping=False, ephemeral=True)
    identity = Identity.load_or_create(home.identity)
    network = await open_network(settings, home, (address.multiaddr,), lambda _peer: (address.multiaddr,))
    try:
        signed = await ask_for_run(network, address)
        membership = Membership(identity, signed.run, TTL_PERIODS * signed.manifest.swarm.announce_period_s)
        await first_look(network, membership, signed, address.peer)
        return dict(TableReport(signed, membership).peers(tokens_per_second=0.0))
    finally:
        await network.close()


def main(arguments: list[str]) -> int:
    folder = Path(tempfile.mkdtemp(prefix="peerd-visit-"))
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.get_loop().set_exception_handler(lambda _loop, _context: None)
            print(json.dumps(runner.run(visit(arguments[0], Home(folder)))))
    except PeerdError as error:
        print(f"peerd: error: {error}", file=sys.stderr)
        return error.exit_code
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
