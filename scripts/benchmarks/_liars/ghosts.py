"""Tells of peers that are not there: keys without a daemon, whose records say that they train and serve. Renews them each period.

It pushes them to everybody, and gives them to whoever asks for its table or its news.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from peerd.daemon.peer import Peer
from peerd.policy.swarm.spreading import MOST_NEWS, PAGE_RECORDS, page
from peerd.swarm.gossip import Gossip
from peerd.swarm.signed import sign_record
from peerd.table.record import PeerId, Phase, RawRecord
from scripts.benchmarks._liars import _speech


async def lie(peer: Peer, arguments: Mapping[str, Any]) -> None:
    """`throughput` may be beyond what a record may say: then every other record says the most that it may."""
    names, throughput = _speech.made_up(int(arguments["peers"])), float(arguments.get("throughput", 1.0))
    version, told = 0, dict[PeerId, RawRecord]()
    _answer_with(peer.gossip, told)
    while True:
        version += 1
        mine, raws = peer.seat.state.record, []
        for number, name in enumerate(names):
            ghost = replace(mine, peer=name.peer, version=version, stage=number % peer.place.manifest.train.num_stages)
            ghost = replace(ghost, phase=Phase.ACCUMULATING, done=0, trains=True, trains_from=0, asides=())
            ghost = replace(ghost, throughput=throughput if number % 2 else min(throughput, 1e9))
            told[name.peer] = sign_record(ghost, name, peer.membership.run).raw
            raws.append(told[name.peer])
            if number % 64 == 0:
                await asyncio.sleep(0)
        await _speech.push(peer, raws)
        await asyncio.sleep(peer.place.manifest.swarm.announce_period_s)


def _answer_with(gossip: Gossip, told: Mapping[PeerId, RawRecord]) -> None:
    """Give these records with the table, after the true ones, and the first of them as news."""
    honest_table, honest_news = gossip.table, gossip.news

    def table(caller: PeerId, after: PeerId) -> tuple[list[RawRecord], PeerId]:
        true = [] if after else honest_table(caller, after)[0]
        rows, last = page(sorted(told.items()), after, PAGE_RECORDS - len(true))
        return true + rows, last

    def news(caller: PeerId, known: Collection[bytes]) -> list[RawRecord]:
        return [*honest_news(caller, known), *told.values()][:MOST_NEWS]

    for name, answer in (("table", table), ("news", news)):
        setattr(gossip, name, answer)
