"""Somebody without a place in the swarm who talks to its daemons over the real wire, and looks at the bits that come back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import torch

from peerd.config.manifest import Manifest
from peerd.config.paths import Home
from peerd.config.settings import Settings
from peerd.daemon.address import parse_address
from peerd.daemon.network import Network, ask_for_run, open_network
from peerd.link.p2pd import watch
from peerd.swarm.identity import Identity
from peerd.table.record import PeerId, RunId
from peerd.wire.clients import StageClient
from peerd.wire.messages import Call, CallResult, Snapshot, StateRequest
from peerd.wire.state_client import StateClient
from peerd.wire.tensors import encode
from tests.tiny_run import corpus_of
from tests.wire.lent import whole_of

PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class Visitor:
    network: Network
    run: RunId
    manifest: Manifest
    folder: Path
    """Of its own, for the run's text as tokens."""

    async def snapshot(self, peer: PeerId, stage: int) -> tuple[Snapshot, bytes]:
        """What the peer gives a joiner."""
        client = StateClient(self.network.links, self.run)
        async with client.open(peer, StateRequest(stage=stage), PATIENCE_S) as opened:
            return opened.header, await whole_of(opened)

    async def send(self, peer: PeerId, call: Call) -> CallResult:
        return await StageClient(self.network.links, self.run).backpropagate(peer, call, (), PATIENCE_S, lambda _stage, _peer: None)

    def call(self, stage: int, step: int) -> Call:
        """A microbatch for a later stage that only the first lacks: it gives the gradient and adds nothing. Its labels are the text's."""
        train, model = self.manifest.train, self.manifest.decoder
        rows = (train.microbatch_size, train.sequence_length)
        chance = torch.Generator().manual_seed(0)
        return Call(
            call_id=os.urandom(16),
            stage=stage,
            step=step,
            index=0,
            accumulate=frozenset({0}),
            inputs=encode(torch.randn((*rows, model.d_model), generator=chance)),
            labels=encode(corpus_of(self.manifest, self.folder).microbatch(step, 0)[1].int()),
        )


@contextlib.asynccontextmanager
async def visiting(*texts: str) -> AsyncIterator[Visitor]:
    """A visitor at the peer of the first address who knows where the others live, with a throw-away identity."""
    known = {found.peer: found for found in map(parse_address, texts)}
    text, address = texts[0], parse_address(texts[0])
    home = Home(Path(tempfile.mkdtemp(prefix="peerd-t-", dir="/tmp")))
    Identity.load_or_create(home.identity)
    settings = Settings(home=str(home.folder), join=text, host="127.0.0.1", ephemeral=True)
    network = await open_network(settings, home, (address.multiaddr,), lambda peer: (known[peer].multiaddr,) if peer in known else ())
    ended = asyncio.ensure_future(watch(network.p2pd))
    try:
        signed = await ask_for_run(network, address)
        yield Visitor(network, signed.run, signed.manifest, home.folder)
    finally:
        await network.close()
        await ended
