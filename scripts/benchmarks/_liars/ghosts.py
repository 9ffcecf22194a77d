"""Tells of peers that are not there: keys without a daemon, whose records say that they train and serve. Renews them each period."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from peerd.daemon.peer import Peer
from peerd.swarm.signed import sign_record
from peerd.table.record import Phase
from scripts.benchmarks._liars import _speech


async def lie(peer: Peer, arguments: Mapping[str, Any]) -> None:
    """`throughput` may be beyond what a record may say: then every other record says the most that it may."""
    names, throughput = _speech.made_up(int(arguments["peers"])), float(arguments.get("throughput", 1.0))
    version = 0
    while True:
        version += 1
        mine, raws = peer.seat.state.record, []
        for number, name in enumerate(names):
            ghost = replace(mine, peer=name.peer, version=version, stage=number % peer.place.manifest.train.num_stages)
            ghost = replace(ghost, phase=Phase.ACCUMULATING, done=0, trains=True, trains_from=0, asides=())
            ghost = replace(ghost, throughput=throughput if number % 2 else min(throughput, 1e9))
            raws.append(sign_record(ghost, name, peer.membership.run).raw)
            if number % 64 == 0:
                await asyncio.sleep(0)
        await _speech.push(peer, raws)
        await asyncio.sleep(peer.place.manifest.swarm.announce_period_s)
