"""What a peer says that it will send is checked before any of it is read: nothing is allocated for what cannot be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from peerd.errors import BadMessageError
from peerd.link.links import CHUNK_BYTES
from peerd.link.traffic import Traffic
from peerd.table.record import PeerId, RawRecord
from peerd.wire.clients import StageClient
from peerd.wire.convert import MAX_PEER_CHARS
from peerd.wire.door import Door
from peerd.wire.handlers import Progress, Receive
from peerd.wire.messages import Call, CallResult, TensorBytes
from peerd.wire.services import StageServicer
from peerd.wire.tensors import encode
from tests.link.local_peers import serving
from tests.wire.callee import DOOR_PATIENCE_S, PATIENCE_S, RUN

LIAR = PeerId("liar")
HUGE = 1 << 50
MOST_GROWN = 8 * CHUNK_BYTES
ENDLESS = 64
"""Chunks that a liar has ready behind its header."""


class Answers:
    """A callee that gives a gradient of a shape of its own, whatever it is asked."""

    def __init__(self, gradient: TensorBytes) -> None:
        self._gradient = gradient

    async def backpropagate(self, _caller: PeerId, _call: Call, receive: Receive, _progress: Progress) -> CallResult:
        await receive()
        return CallResult(gradient=self._gradient, downstream_s=0.0, records=())

    def absorb(self, caller: PeerId, records: Sequence[RawRecord]) -> None: ...

    def cancel(self, caller: PeerId, call_id: bytes) -> None: ...


def call_of(*accumulate: int) -> Call:
    inputs, labels = encode(torch.zeros(4, 8)), encode(torch.zeros(4, dtype=torch.int32))
    return Call(call_id=bytes(16), stage=1, step=0, index=0, accumulate=frozenset(accumulate), inputs=inputs, labels=labels)


@pytest.mark.parametrize(
    ("accumulate", "words"), [((0, 1), r"float32\[16777216\] where float32\[4, 8\] is due"), ((1,), "that nobody asked for")]
)
async def test_a_gradient_of_another_shape_than_the_inputs_is_refused_before_its_first_chunk(accumulate: Any, words: str) -> None:
    liar: Any = Answers(encode(torch.zeros(1 << 24)))
    async with serving([StageServicer(Door(RUN, DOOR_PATIENCE_S, Traffic()), liar)]) as served:
        links = served.links_of("caller")
        with pytest.raises(BadMessageError, match=words):
            await StageClient(links, RUN).backpropagate(LIAR, call_of(*accumulate), (), PATIENCE_S, lambda _stage, _peer: None)
    assert links.traffic.received_bytes == 0


class Forwards(Answers):
    """Says that a microbatch went on to peers and stages that cannot be."""

    def __init__(self, stage: int, peer: str) -> None:
        super().__init__(encode(torch.zeros(4, 8)))
        self._hop = stage, PeerId(peer)

    async def backpropagate(self, caller: PeerId, call: Call, receive: Receive, progress: Progress) -> CallResult:
        progress(*self._hop)
        return await super().backpropagate(caller, call, receive, progress)


@pytest.mark.parametrize(("stage", "peer"), [(1, "a"), (0, "a"), ((1 << 32) - 1, "a"), (2, "a" * (MAX_PEER_CHARS + 1))])
async def test_a_peer_on_a_microbatchs_way_is_of_a_later_stage_and_has_a_peers_name(stage: int, peer: str) -> None:
    liar: Any = Forwards(stage, peer)
    async with serving([StageServicer(Door(RUN, DOOR_PATIENCE_S, Traffic()), liar)]) as served:
        told: list[PeerId] = []
        with pytest.raises(BadMessageError, match="no peer of a later stage"):
            await StageClient(served.links_of("caller"), RUN).backpropagate(
                LIAR, call_of(0, 1), (), PATIENCE_S, lambda _stage, peer: told.append(peer)
            )
    assert told == []
