"""Does its work, and sends the next stage noise besides, of microbatches that nobody gave it: it signs itself as their trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import torch

from peerd.daemon.peer import Peer
from peerd.policy.step.receipts import AskedPass, SignedAsk
from peerd.stage.state import StageState
from peerd.wire.messages import Call
from peerd.wire.receipts import tensor_hash
from peerd.wire.tensors import encode
from scripts.benchmarks._liars import _speech


async def lie(peer: Peer, _arguments: Mapping[str, Any]) -> None:
    """In each step it has done every fourth microbatch itself before others have launched it."""
    done = -1
    while True:
        seat = peer.seat
        if peer.data.tokens is None or seat.state.record.step == done:
            await asyncio.sleep(_speech.LOOK_S)
            continue
        done = seat.state.record.step
        indices = range(0, peer.place.manifest.train.microbatches_per_step, 4)
        calls = [_call(peer, seat.state, done, index) for index in indices]
        await asyncio.gather(*(_speech.attempt(seat.dispatcher.send(call, lambda *_: None)) for call in calls))


def _call(peer: Peer, state: StageState, step: int, index: int) -> Call:
    """To the stage after this peer's own."""
    assert peer.data.tokens is not None
    manifest, identity, stage = peer.place.manifest, peer.membership.identity, state.record.stage
    tokens, labels = (encode(each.int()) for each in peer.data.tokens.microbatch(step, index))
    shape = (*tokens.shape, manifest.decoder.d_model)
    asked = AskedPass(stage, step, index, identity.peer, identity.peer, tensor_hash(tokens), tensor_hash(labels))
    run = peer.membership.run
    lineage = peer.seat.witness.lineage_at(step) if peer.seat.witness is not None else b""
    above, inputs = SignedAsk(asked, identity.sign(asked.text(run))), encode(torch.randn(shape))
    place: dict[str, Any] = {"stage": stage + 1, "step": step, "index": index, "accumulate": frozenset({stage + 1})}
    return Call(**place, inputs=inputs, labels=labels, above=above, lineage=lineage)
