"""An asker whose calls go over the real services: it goes on with the same tokens when a peer's process ends in mid-sentence."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from peerd.asking.asker import Asker
from peerd.link.traffic import Traffic
from peerd.policy.inference.paths import TextOffer
from peerd.policy.inference.sampling import Sampling
from peerd.table.record import PeerId
from peerd.wire.door import Door
from peerd.wire.handlers import Receive
from peerd.wire.text_messages import Extended, TextCall
from peerd.wire.text_service import TextServicer
from peerd.wire.texts import TextClient
from tests.link.local_peers import Served, serving
from tests.stage.text_peers import NUM_STAGES, PROMPT, Peer, due_tokens, peers_of, said
from tests.tiny_run import tiny_manifest
from tests.wire.callee import DOOR_PATIENCE_S, PATIENCE_S, RUN


@dataclass
class Handler:
    """What a daemon's reception does with calls about texts."""

    peer: Peer

    def offer_text(self, caller: PeerId, stage: int) -> TextOffer:
        return self.peer.texts.offer(stage)

    async def extend_text(self, caller: PeerId, call: TextCall, receive: Receive) -> Extended:
        return await self.peer.texts.extend(caller, call, receive)

    async def forget_text(self, caller: PeerId, text: bytes) -> None:
        await self.peer.texts.forget(caller, text)


class Network:
    """Asks each peer at its own server."""

    def __init__(self, served: dict[PeerId, tuple[int, Served]]) -> None:
        self._stages = {peer: stage for peer, (stage, _) in served.items()}
        self._clients = {peer: TextClient(there.links_of("asker"), RUN) for peer, (_, there) in served.items()}

    def candidates(self, stage: int) -> Sequence[PeerId]:
        return [peer for peer, each in self._stages.items() if each == stage]

    async def offer(self, peer: PeerId, stage: int) -> TextOffer:
        return await self._clients[peer].offer(peer, stage, PATIENCE_S)

    async def extend(self, peer: PeerId, call: TextCall) -> Extended:
        return await self._clients[peer].extend(peer, call, PATIENCE_S)

    async def forget(self, peer: PeerId, text: bytes) -> None:
        await self._clients[peer].forget(peer, text, PATIENCE_S)

    async def changed(self, timeout_s: float) -> None:
        raise AssertionError("there is always a path")


async def test_a_text_goes_on_where_a_server_ends() -> None:
    manifest = tiny_manifest(NUM_STAGES)
    with peers_of(manifest, copies=2) as peers:
        async with contextlib.AsyncExitStack() as stack:
            ends, served = dict[PeerId, contextlib.AsyncExitStack](), dict[PeerId, tuple[int, Served]]()
            for stage, peer in ((stage, peer) for stage, mates in enumerate(peers) for peer in mates):
                ends[peer.name] = await stack.enter_async_context(contextlib.AsyncExitStack())
                there = serving([TextServicer(Door(RUN, DOOR_PATIENCE_S, Traffic()), Handler(peer))])
                served[peer.name] = stage, await ends[peer.name].enter_async_context(there)
            asker = Asker(manifest, Network(served), PROMPT, Sampling(), PATIENCE_S)
            found = await said(asker, 3)
            gone = next(peer for peer, stage in asker.served.items() if stage == 1)
            await ends[gone].aclose()
            found += await said(asker, 3)
            assert found == due_tokens(manifest, 6)
            assert asker.num_rerouted == 1
            assert sorted(asker.served.values()) == [0, 1, 1]
            await asker.close()
        assert not [peer for stage in peers for peer in stage if peer.texts.sessions.ids and peer.name != gone]
