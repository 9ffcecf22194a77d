"""Peers that go on with texts, and askers that call them without a network."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from peerd.asking.asker import Asker
from peerd.config.manifest import Manifest
from peerd.errors import PeerGoneError
from peerd.models.prefix import RecomputedPrefix
from peerd.models.sampling import choose
from peerd.models.stages import build_stage
from peerd.policy.inference.paths import TextOffer
from peerd.policy.inference.sampling import Sampling
from peerd.policy.inference.sessions import SessionLimits
from peerd.stage.executor import Executor
from peerd.stage.state import StageState
from peerd.stage.text_turns import TextTurns
from peerd.stage.texts import StageTexts
from peerd.table.record import PeerId, PeerRecord
from peerd.wire.text_messages import Extended, TextCall
from tests.strategies import view_of

STRANGER = PeerId("stranger")
A, B = PeerId("a"), PeerId("b")
NUM_STAGES, PROMPT = 2, [5, 9, 200, 31]
LIMITS = SessionLimits(most_bytes=1 << 20)
GREEDY = Sampling()
Value = TypeVar("Value")


class Peer:
    """A peer of one stage, with an executor of its own."""

    def __init__(self, manifest: Manifest, stage: int, name: PeerId, limits: SessionLimits = LIMITS, share: float = 1.0) -> None:
        self.name = name
        record = PeerRecord(peer=name, incarnation=1, stage=stage)
        self.state = StageState(manifest, record, torch.device("cpu"), lambda: view_of(self.state.record))
        self.state.serve()
        self.executor = Executor()
        self.texts = StageTexts(manifest, self.state, self.executor, limits, TextTurns(share), lambda peer: peer != STRANGER)


class TextsHere:
    """All peers, called without a network. The asker takes the first one of each stage that does not refuse."""

    def __init__(self, me: PeerId, peers: list[list[Peer]]) -> None:
        self.me, self.peers = me, peers
        self.gone: set[PeerId] = set()

    def _peer(self, stage: int, name: PeerId) -> Peer:
        if name in self.gone:
            raise PeerGoneError("dead")
        return next(peer for peer in self.peers[stage] if peer.name == name)

    def candidates(self, stage: int) -> list[PeerId]:
        return [peer.name for peer in self.peers[stage]]

    async def offer(self, peer: PeerId, stage: int) -> TextOffer:
        return self._peer(stage, peer).texts.offer(stage)

    async def extend(self, peer: PeerId, call: TextCall) -> Extended:
        async def receive() -> list[Any]:
            return [chunk for each in call.tensors for chunk in each.chunks]

        bare = dataclasses.replace(call, inputs=call.inputs.with_chunks(()), tokens=call.tokens and call.tokens.with_chunks(()))
        return await self._peer(call.stage, peer).texts.extend(self.me, bare, receive)

    async def forget(self, peer: PeerId, text: bytes) -> None:
        stage = next(number for number, peers in enumerate(self.peers) if peer in [each.name for each in peers])
        await self._peer(stage, peer).texts.forget(self.me, text)

    async def changed(self, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)


def asker_of(manifest: Manifest, peers: list[list[Peer]], me: PeerId = A, sampling: Sampling = GREEDY, patience_s: float = 5.0) -> Asker:
    return Asker(manifest, TextsHere(me, peers), PROMPT, sampling, patience_s)


@contextmanager
def peers_of(manifest: Manifest, copies: int = 1, **settings: Any) -> Iterator[list[list[Peer]]]:
    """By stage, peers that have the first weights of the run."""
    torch.set_num_threads(1)
    names = [[PeerId(f"{copy} of {stage}") for copy in range(copies)] for stage in range(manifest.train.num_stages)]
    peers = [[Peer(manifest, stage, name, **settings) for name in each] for stage, each in enumerate(names)]
    try:
        yield peers
    finally:
        for peer in (peer for stage in peers for peer in stage):
            peer.executor.close()


def run(work: Coroutine[Any, Any, Value]) -> Value:
    return asyncio.run(asyncio.wait_for(work, 60))


def due_tokens(manifest: Manifest, count: int, sampling: Sampling = GREEDY) -> list[int]:
    """What the whole model says, computed anew for each token."""
    stages = [build_stage(manifest, stage, "cpu") for stage in range(manifest.train.num_stages)]
    tokens = [*PROMPT]
    for _ in range(count):
        hidden = torch.tensor([tokens])
        for number, stage in enumerate(stages):
            told = torch.tensor([tokens]) if manifest.model.tells_tokens and number else None
            hidden = RecomputedPrefix(stage.without_loss).extend(hidden, told)
        tokens.append(choose(hidden[0, -1], sampling, len(tokens)))
    return tokens[len(PROMPT) :]


async def next_token(asker: Asker) -> int:
    """Without any guess."""
    [token] = await asker.next_tokens(1)
    return token


async def said(asker: Asker, count: int) -> list[int]:
    return [await next_token(asker) for _ in range(count)]


def again(asker: Asker, *peers: Peer) -> None:
    """Let these peers be gone, as far as this asker can tell."""
    here = asker._peers
    assert isinstance(here, TextsHere)
    here.gone |= {peer.name for peer in peers}
