"""What a peer does for askers: after all training work, within the owner's share and each asker's ration."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
import torch

from peerd.config.codec import parse_codec
from peerd.errors import BadMessageError, BusyError, WrongStateError
from peerd.policy.inference.sampling import GREEDY
from peerd.stage.executor import Priority
from peerd.table.record import PeerId
from peerd.wire.messages import TensorBytes
from peerd.wire.tensors import encode
from peerd.wire.text_messages import Extended, TextCall
from tests.stage.text_peers import NUM_STAGES, PROMPT, STRANGER, A, Peer, TextsHere, asker_of, peers_of, run
from tests.tiny_run import tiny_manifest


def test_training_goes_first() -> None:
    """A pass of a text waits until no pass of training waits."""
    manifest = tiny_manifest(1)
    order: list[str] = []
    with peers_of(manifest) as peers:
        peer = peers[0][0]

        async def ask() -> None:
            async def text() -> None:
                await asker_of(manifest, peers).next_token()
                order.append("text")

            async def microbatch(name: str) -> None:
                await peer.executor.run(Priority.FORWARD, lambda: order.append(name))

            held = asyncio.Event()
            loop = asyncio.get_running_loop()
            first = asyncio.create_task(
                peer.executor.run(Priority.FORWARD, lambda: asyncio.run_coroutine_threadsafe(held.wait(), loop).result())
            )
            asking = asyncio.create_task(text())
            while not any(job[2] is Priority.IDLE for job in peer.executor._jobs):  # noqa: ASYNC110 - the executor tells nobody what waits
                await asyncio.sleep(0)
            others = [asyncio.create_task(microbatch(name)) for name in ("one", "two")]
            await asyncio.sleep(0)
            held.set()
            await asyncio.gather(first, asking, *others)

        run(ask())
    assert order == ["one", "two", "text"]


def call_of(**wrong: Any) -> TextCall:
    good = TextCall(text=b"t" * 16, stage=0, step=0, begin=0, inputs=tokens_of(PROMPT))
    return dataclasses.replace(good, **wrong)


def tokens_of(tokens: list[int]) -> TensorBytes:
    return encode(torch.tensor([tokens], dtype=torch.int32))


async def extended(peer: Peer, call: TextCall, asker: PeerId = A) -> Extended:
    return await TextsHere(asker, [[peer], [peer]]).extend(peer.name, call)


def test_an_owner_who_allows_nothing_or_little_is_obeyed() -> None:
    manifest = tiny_manifest(1)
    call = call_of(sampling=GREEDY)
    with peers_of(manifest, share=0.0) as peers:
        assert peers[0][0].texts.offer(0) == (frozenset(), 0.0)
        with pytest.raises(WrongStateError, match="goes on with no text"):
            run(extended(peers[0][0], call))
    with peers_of(manifest, share=0.01) as peers:
        peer = peers[0][0]

        async def after_much() -> None:
            peer.texts.turns.share.took(60.0, 0.0)
            await extended(peer, call)

        with pytest.raises(BusyError, match="no time for questions") as refused:
            run(after_much())
        assert refused.value.retry_after_s > 30


def test_one_asker_and_all_strangers_have_so_many_tokens_a_minute() -> None:
    """Strangers together have what one asker has that has a record."""
    manifest = tiny_manifest(1)
    whole = manifest.train.sequence_length
    call = call_of(sampling=GREEDY, inputs=tokens_of([1] * whole))
    with peers_of(manifest) as peers:
        peer = peers[0][0]
        peer.texts._ration.each = 2 * whole

        async def ask() -> None:
            for asker in (A, STRANGER):
                for _ in range(2):
                    await extended(peer, call, asker)
                with pytest.raises(BusyError, match="as many tokens") as refused:
                    await extended(peer, call, asker)
                assert 0 < refused.value.retry_after_s <= 60

        peer.texts._is_known = lambda asker: asker == A
        run(ask())
        with pytest.raises(BusyError, match="as many tokens"):
            run(extended(peer, call, PeerId("another stranger")))


WRONG: dict[str, dict[str, Any]] = {
    "no tokens": {"inputs": tokens_of([])},
    "two texts": {"inputs": encode(torch.zeros(2, 3, dtype=torch.int32))},
    "numbers": {"inputs": encode(torch.zeros(1, 3))},
    "no such token": {"inputs": tokens_of([1, 256])},
    "negative": {"inputs": tokens_of([-1])},
    "too long": {"begin": 16},
    "tokens told": {"tokens": tokens_of([0] * 4)},
    "a choice": {"sampling": GREEDY},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_no_asker_should_send_is_refused(wrong: str) -> None:
    manifest = tiny_manifest(NUM_STAGES)
    with peers_of(manifest) as peers:
        with pytest.raises(BadMessageError):
            run(extended(peers[0][0], call_of(**WRONG[wrong])))
        with pytest.raises(BadMessageError):  # the last stage has to choose, and takes activations
            run(extended(peers[1][0], call_of(stage=1)))
        lossy = encode(torch.zeros(1, *manifest.model.boundary_shape(1, 3)), parse_codec("int8"))
        with pytest.raises(BadMessageError, match="lossy"):
            run(extended(peers[1][0], call_of(stage=1, inputs=lossy, sampling=GREEDY)))
        with pytest.raises(WrongStateError, match="serves stage 0"):
            run(extended(peers[0][0], call_of(stage=1)))
        assert run(extended(peers[0][0], call_of())).outputs is not None
