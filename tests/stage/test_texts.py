"""What a peer does for askers: within the owner's share or in idle moments, and within each asker's ration."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from typing import Any

import pytest
import torch

from peerd.config.codec import parse_codec
from peerd.config.manifest import Manifest
from peerd.errors import BadMessageError, BusyError, WrongStateError
from peerd.policy.inference.sampling import Sampling
from peerd.policy.inference.turns import DEBT_S
from peerd.stage.executor import Pace, Priority
from peerd.table.record import PeerId
from peerd.wire.messages import TensorBytes
from peerd.wire.tensors import encode
from peerd.wire.text_messages import Extended, TextCall
from tests.stage.text_peers import LIMITS, NUM_STAGES, PROMPT, STRANGER, A, Peer, TextsHere, asker_of, next_token, peers_of, run
from tests.tiny_run import tiny_manifest


async def num_computed_before(manifest: Manifest, peers: list[list[Peer]]) -> int:
    """How many microbatches are computed before the pass of a text that comes while one runs, where another one always waits."""
    peer, num_before = peers[0][0], 0
    entered, release = threading.Event(), threading.Event()

    def microbatch() -> None:
        nonlocal num_before
        entered.set()
        release.wait(10)
        time.sleep(0.005)
        if not peer.texts.counts.tokens:
            num_before += 1
            peer.executor._add(Priority.FORWARD, microbatch)  # it waits before this one ends

    peer.executor._add(Priority.FORWARD, microbatch)
    await asyncio.to_thread(entered.wait, 10)
    asked = asyncio.create_task(next_token(asker_of(manifest, peers)))
    while not peer.executor._jobs:  # noqa: ASYNC110 - the executor tells nobody what waits
        await asyncio.sleep(0)
    peer.executor._add(Priority.FORWARD, microbatch)
    release.set()
    await asked
    return num_before


def test_within_the_owners_share_a_pass_goes_before_the_training_that_waits() -> None:
    manifest = tiny_manifest(1)
    with peers_of(manifest, share=0.02) as peers:
        assert run(num_computed_before(manifest, peers)) == 1
        counts = peers[0][0].texts.counts
        assert counts.held_up_s == pytest.approx(counts.busy_s, abs=0.05)


def owe(peer: Peer, seconds: float) -> None:
    """Let passes have held training up for so much more than the share allows."""
    share = peer.texts.turns.share
    share.charge(share._saved_s + seconds, time.monotonic())


def test_beyond_the_share_a_pass_waits_until_it_allows_one_where_training_never_rests() -> None:
    manifest = tiny_manifest(1)
    with peers_of(manifest, share=0.05) as peers:

        async def ask() -> tuple[int, float]:
            owe(peers[0][0], 0.01)
            began_s = time.monotonic()
            return await num_computed_before(manifest, peers), time.monotonic() - began_s

        num_before, took_s = run(ask())
        assert num_before > 1
        assert took_s >= 0.01 / 0.05


def test_beyond_the_share_a_pass_takes_an_idle_moment() -> None:
    manifest = tiny_manifest(1)
    with peers_of(manifest, share=0.001) as peers:

        async def ask() -> None:
            owe(peers[0][0], DEBT_S / 2)  # where training never rests it could begin in 50 s
            await next_token(asker_of(manifest, peers))

        run(ask())
        assert peers[0][0].texts.counts.held_up_s == 0


async def test_a_machine_rests_after_passes_as_its_owner_wants() -> None:
    """With a duty of a tenth it rests for nine times as long as it computed; training that waits is told the whole."""
    manifest, rested = tiny_manifest(1), list[float]()
    with peers_of(manifest) as peers:
        texts = peers[0][0].texts
        texts.pace = Pace(stand_in_s=0.0, duty=0.1, rest=rested.append)
        await next_token(asker_of(manifest, peers))
        assert sum(rested) == pytest.approx(9 * texts.counts.busy_s, rel=0.2)


def call_of(**wrong: Any) -> TextCall:
    good = TextCall(text=b"t" * 16, stage=0, step=0, begin=0, inputs=tokens_of(PROMPT))
    return dataclasses.replace(good, **wrong)


def tokens_of(tokens: list[int]) -> TensorBytes:
    return encode(torch.tensor([tokens], dtype=torch.int32))


async def extended(peer: Peer, call: TextCall, asker: PeerId = A) -> Extended:
    return await TextsHere(asker, [[peer], [peer]]).extend(peer.name, call)


def test_an_owner_who_allows_nothing_or_little_is_obeyed() -> None:
    manifest = tiny_manifest(1)
    call = call_of(sampling=Sampling())
    with peers_of(manifest, share=0.0) as peers:
        offer = peers[0][0].texts.offer(0)
        assert (offer.steps, offer.is_off) == (frozenset(), True)
        with pytest.raises(WrongStateError, match="goes on with no text"):
            run(extended(peers[0][0], call))
    with peers_of(manifest, share=0.01) as peers:
        peer = peers[0][0]

        async def after_much() -> None:
            peer.texts.turns.share.charge(60.0, time.monotonic())
            await extended(peer, call)

        with pytest.raises(BusyError, match="no time for questions") as refused:
            run(after_much())
        assert refused.value.retry_after_s > 30


def test_one_asker_and_all_strangers_have_so_many_tokens_a_minute() -> None:
    """Strangers together have what one asker has that has a record."""
    manifest = tiny_manifest(1)
    whole = manifest.train.sequence_length
    call = call_of(sampling=Sampling(), inputs=tokens_of([1] * whole))
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


def test_a_crowd_of_strangers_ends_no_other_askers_text() -> None:
    """Each of them has a text of its own; together they have as many as one asker."""
    manifest = tiny_manifest(1)
    call = call_of(sampling=Sampling())
    with peers_of(manifest, limits=dataclasses.replace(LIMITS, most=4, most_each=3)) as peers:
        texts = peers[0][0].texts
        texts._is_known = lambda asker: asker == A
        run(extended(peers[0][0], call, A))
        for number in range(6):
            run(extended(peers[0][0], call_of(sampling=Sampling(), inputs=tokens_of([1])), PeerId(f"stranger{number}")))
        run(texts.tidy())
        assert (A, call.text) in texts.sessions.ids
        assert len(texts.sessions.ids) == 1 + 3
        run(texts.forget(PeerId("stranger5"), call.text))
        assert len(texts.sessions.ids) == 1 + 2


WRONG: dict[str, dict[str, Any]] = {
    "no tokens": {"inputs": tokens_of([])},
    "two texts": {"inputs": encode(torch.zeros(2, 3, dtype=torch.int32))},
    "numbers": {"inputs": encode(torch.zeros(1, 3))},
    "no such token": {"inputs": tokens_of([1, 256])},
    "negative": {"inputs": tokens_of([-1])},
    "too long": {"begin": 16},
    "tokens told": {"tokens": tokens_of([0] * 4)},
    "a choice": {"sampling": Sampling()},
    "nothing but guesses": {"num_drafted": 4},
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
            run(extended(peers[1][0], call_of(stage=1, inputs=lossy, sampling=Sampling())))
        with pytest.raises(WrongStateError, match="serves stage 0"):
            run(extended(peers[0][0], call_of(stage=1)))
        assert run(extended(peers[0][0], call_of())).outputs is not None
