"""Watches p2pd, and rebuilds it, the DHT node and the tunnel when it fails or its address is gone. Stage and ledger stay as they are."""

from __future__ import annotations

import asyncio
import math
from itertools import chain, repeat

import structlog

from peerd.background import start
from peerd.daemon.peer import Peer
from peerd.errors import PeerdError, PeerGoneError, RemoteError
from peerd.link.own_address import OwnAddress
from peerd.link.p2pd import watch
from peerd.policy.swarm.reaching import all_gone_silent
from peerd.policy.swarm.suspicion import Patience
from peerd.served_time import served_timeout
from peerd.swarm.clock import clock_s
from peerd.table.circuit import host_in
from peerd.table.record import PeerId

ANSWER_TIMEOUT_S = 3.0
CHECK_PERIOD_S = 2.0
PAUSES_S = (0.0, 1.0, 2.0, 5.0, 10.0)
"""Pauses before the attempts in a row; the last one also precedes every later attempt."""
REBUILD_TIMEOUT_S = 120.0
"""Time for one attempt: to end the old p2pd, start the new one, and join the DHT."""
MOST_ASKED = 3
FORGIVEN_S = 60.0
ENDED, MOVED = "it has ended", "this machine has another address now"
LOG = structlog.get_logger()


class Supervisor:
    """Runs while the daemon runs. It tries to bring p2pd back until it succeeds."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._rebuilt_at_s = -math.inf
        self._patience = Patience(FORGIVEN_S)
        self._own_address = OwnAddress()

    async def run(self) -> None:
        while True:
            why = await self._failure()
            LOG.warning("p2pd is rebuilt", reason=why)
            if why == MOVED:  # no connection knows of it: each would wait for its keepalive
                self._peer.network.links.cut_all()
            elif why != ENDED:  # after several rebuilds in a row, the machine was slow and not p2pd
                self._patience = self._patience.after_mistake(clock_s())
            await self._rebuild()
            self._rebuilt_at_s = clock_s()
            self._peer.p2pd_restarts += 1

    async def _rebuild(self) -> None:
        for pause_s in chain(PAUSES_S, repeat(PAUSES_S[-1])):
            await asyncio.sleep(pause_s)
            try:
                async with served_timeout(REBUILD_TIMEOUT_S):
                    await self._rebuild_once()
            except (PeerdError, TimeoutError, OSError) as error:
                self._peer.p2pd_problem = str(error) or "no answer in time"
                LOG.warning("p2pd did not come back", error=self._peer.p2pd_problem)
            else:
                self._peer.p2pd_problem = ""
                return

    async def _rebuild_once(self) -> None:
        peer = self._peer
        bootstrap = peer.bootstrap()
        await peer.network.revive(bootstrap)
        await peer.directory.rebuild(peer.network.p2pd.p2p, peer.place.signed.run, bootstrap)
        peer.reachability.look_again()
        if not peer.is_resting:
            peer.announce()

    async def _failure(self) -> str:
        """Wait until p2pd has ended, its address is gone, or twice in a row it does not react or reaches no peer. Returns which."""
        p2pd = self._peer.network.p2pd
        ended = start(watch(p2pd))
        try:
            misses = alone = 0
            while max(misses, alone) < 2:
                await asyncio.wait({ended}, timeout=CHECK_PERIOD_S)
                if ended.done():
                    return ENDED
                if self._has_moved():
                    return MOVED
                misses = 0 if await p2pd.answers(self._patience_s) else misses + 1
                alone = 0 if await self._reaches_somebody() else alone + 1
            return "it hangs" if misses else "it reaches nobody"
        finally:
            ended.cancel()

    def _has_moved(self) -> bool:
        """Whether a new p2pd would find another address than the one that this machine has used. One given by the owner stays."""
        return self._peer.network.is_open_to_all and self._own_address.is_lost(filter(None, map(host_in, self._peer.bootstrap())))

    @property
    def _patience_s(self) -> float:
        return ANSWER_TIMEOUT_S * self._patience.factor(clock_s())

    async def _reaches_somebody(self) -> bool:
        """Ask peers only if all fell silent at once, and not again before one was heard: another new p2pd would not help."""
        if self._peer.is_resting:
            return True
        silent = all_gone_silent(self._peer.membership.view, clock_s(), self._rebuilt_at_s)
        return not silent or any(await asyncio.gather(*map(self._answers, silent[:MOST_ASKED])))

    async def _answers(self, peer: PeerId) -> bool:
        try:
            await self._peer.swarm_client.describe(peer, self._patience_s)
        except PeerGoneError:
            return False
        except RemoteError:
            return True  # any answer counts
        return True
