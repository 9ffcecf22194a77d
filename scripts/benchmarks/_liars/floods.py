"""Sends messages of one kind to everybody, without a pause."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from secrets import token_bytes
from typing import Any

from peerd.daemon.peer import Peer
from peerd.policy.step.roster import Roster, entry_of
from peerd.policy.swarm.spreading import MOST_TAGS, TAG_BYTES
from peerd.table.record import AverageId, PeerId
from peerd.wire.clients import AveragingClient, StageClient
from scripts.benchmarks._liars import _speech

Kind = Callable[[PeerId], Awaitable[Any]]


async def lie(peer: Peer, arguments: Mapping[str, Any]) -> None:
    await _speech.flood(_speech.others(peer), int(arguments["at_once"]), _kinds(peer)[str(arguments["kind"])])


def _kinds(peer: Peer) -> dict[str, Kind]:
    client, links, run = peer.swarm_client, peer.network.links, peer.membership.run
    rounds, stages = AveragingClient(links, run), StageClient(links, run)

    async def whole_table(other: PeerId) -> None:
        async for _page in client.table(other, _speech.TIMEOUT_S):
            pass

    async def propose(other: PeerId) -> None:
        mine = peer.seat.state.record
        roster = Roster(mine.stage, mine.step, int.from_bytes(token_bytes(4), "big"), mine.peer, (entry_of(mine),))
        await rounds.propose(other, roster, _speech.TIMEOUT_S)

    return {
        "gossip": lambda other: client.gossip(other, [raw.raw for raw in peer.membership.raws.values()][:64], _speech.TIMEOUT_S),
        "news": lambda other: client.ask_for_news(other, [token_bytes(TAG_BYTES) for _ in range(MOST_TAGS)], _speech.TIMEOUT_S),
        "want_all": whole_table,
        "aborts": lambda other: rounds.abort(other, AverageId(token_bytes(16)), "", "", _speech.TIMEOUT_S),
        "proposals": propose,
        "cancels": lambda other: stages.cancel(other, token_bytes(16), _speech.TIMEOUT_S),
    }
