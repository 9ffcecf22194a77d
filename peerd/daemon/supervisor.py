"""Watches p2pd, and rebuilds it, the DHT node and the tunnel when it ends or hangs. Stage and ledger are not touched."""

from __future__ import annotations

import asyncio

import structlog

from peerd.daemon.node import MAX_BOOTSTRAP, Node
from peerd.errors import PeerdError
from peerd.wire.p2pd import P2pd, watch

ANSWER_TIMEOUT_S = 3.0
CHECK_PERIOD_S = 2.0
PAUSES_S = (0.0, 1.0, 2.0, 5.0, 10.0)
"""Before each attempt in a row; after the last the daemon gives up."""
LOG = structlog.get_logger()


class Supervisor:
    """Runs for as long as the daemon does; PeerdError when p2pd cannot be brought back."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def run(self) -> None:
        while True:
            why = await _failure_of(self._node.network.p2pd)
            LOG.warning("p2pd is rebuilt", reason=why)
            await self._rebuild()
            self._node.p2pd_restarts += 1

    async def _rebuild(self) -> None:
        problem: Exception | None = None
        for pause_s in PAUSES_S:
            await asyncio.sleep(pause_s)
            try:
                await self._rebuild_once()
            except (PeerdError, TimeoutError, OSError) as error:
                problem = error
                LOG.warning("p2pd did not come back", error=str(error))
            else:
                return
        raise PeerdError(f"p2pd, the networking process, cannot be restarted: {problem}", "start the daemon again")

    async def _rebuild_once(self) -> None:
        node = self._node
        bootstrap = node.bootstrap(MAX_BOOTSTRAP)
        await node.network.revive(bootstrap)
        await node.directory.rebuild(node.network.p2pd.p2p, node.place.signed.run, bootstrap)
        node.reachability.look_again()
        node.announce()


async def _failure_of(p2pd: P2pd) -> str:
    """Returns when p2pd has ended or does not react twice in a row."""
    ended = asyncio.ensure_future(watch(p2pd))
    try:
        misses = 0
        while misses < 2:
            await asyncio.wait({ended}, timeout=CHECK_PERIOD_S)
            if ended.done():
                return "it has ended"
            misses = 0 if await p2pd.answers(ANSWER_TIMEOUT_S) else misses + 1
        return "it hangs"
    finally:
        ended.cancel()
