"""Signs two records under one version each time, and tells one half of the peers the one and the other half the other."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from peerd.daemon.peer import Peer
from peerd.swarm.signed import sign_record
from scripts.benchmarks._liars import _speech

AHEAD = 1000
"""The versions are so far ahead that the liar's usual records do not count."""


async def lie(peer: Peer, _arguments: Mapping[str, Any]) -> None:
    version = 0
    while True:
        version += 1
        mine = replace(peer.seat.state.record, version=peer.membership.live().mine.version + AHEAD + version)  # type: ignore[union-attr]
        everything = (1 << peer.place.manifest.train.microbatches_per_step) - 1
        for number, other in enumerate(_speech.others(peer)):
            record = replace(mine, done=everything if number % 2 else 0)
            raw = sign_record(record, peer.membership.identity, peer.membership.run).raw
            await _speech.attempt(peer.swarm_client.gossip(other, [raw], _speech.TIMEOUT_S))
        await asyncio.sleep(0.2)
