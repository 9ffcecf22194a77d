"""Peers go on with texts, stage by stage: the same tokens as the whole model, whoever of a stage computes, within bounds."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from peerd.config.manifest import Manifest
from peerd.errors import BadMessageError, BusyError, WrongStateError
from peerd.models.prefix import RecomputedPrefix
from peerd.models.sampling import GREEDY, Sampling, choose
from peerd.models.stages import build_stage
from peerd.policy.inference.sessions import SessionLimits
from peerd.stage.executor import Executor, Priority
from peerd.stage.state import StageState
from peerd.stage.text_turns import TextTurns
from peerd.stage.texts import StageTexts, TextPass, UnknownPrefixError
from peerd.table.record import PeerId, PeerRecord
from tests.strategies import view_of
from tests.tiny_run import tiny_manifest

A, B = PeerId("a"), PeerId("b")
NUM_STAGES, PROMPT = 2, [5, 9, 200, 31]
LIMITS = SessionLimits(most_bytes=1 << 20)
Value = TypeVar("Value")


class Peer:
    """A peer of one stage, with an executor of its own."""

    def __init__(self, manifest: Manifest, stage: int, limits: SessionLimits = LIMITS, share: float = 1.0) -> None:
        record = PeerRecord(peer=PeerId(f"peer of {stage}"), incarnation=1, stage=stage)
        self.state = StageState(manifest, record, torch.device("cpu"), lambda: view_of(self.state.record))
        self.state.serve()
        self.executor = Executor()
        self.texts = StageTexts(manifest, self.state, self.executor, limits, TextTurns(share))


class Asker:
    """Goes on with one text. It keeps what went into each stage, and sends a peer that does not know a text what came before."""

    def __init__(self, manifest: Manifest, me: PeerId, peers: list[Peer], sampling: Sampling = GREEDY, step: int = 0) -> None:
        self.manifest, self.me, self.peers, self.sampling, self.step = manifest, me, peers, sampling, step
        self.tokens = [*PROMPT]
        self.given: list[Tensor | None] = [None] * len(peers)
        """By stage, all inputs so far."""
        self.num_again = 0

    async def next_token(self) -> int:
        hidden = torch.tensor([self.tokens[self._known() :]])
        for stage, peer in enumerate(self.peers):
            before = self.given[stage]
            known = 0 if before is None else before.shape[1]
            self.given[stage] = hidden if before is None else torch.cat([before, hidden], dim=1)
            found = await self._ask(stage, peer, known)
            if isinstance(found, int):
                self.tokens.append(found)
                return found
            hidden = found[:, -hidden.shape[1] :]
        raise AssertionError("the last stage returns a token")

    def _known(self) -> int:
        first = self.given[0]
        return 0 if first is None else first.shape[1]

    async def _ask(self, stage: int, peer: Peer, begin: int) -> Tensor | int:
        inputs = self.given[stage]
        assert inputs is not None
        told = torch.tensor([self.tokens[: inputs.shape[1]]]) if self.manifest.model.tells_tokens and stage else None
        asked = TextPass(
            text=b"t" * 16,
            step=self.step,
            begin=begin,
            inputs=inputs[:, begin:],
            tokens=None if told is None else told[:, begin:],
            sampling=self.sampling if stage == len(self.peers) - 1 else None,
        )
        try:
            return await peer.texts.extend(self.me, asked)
        except UnknownPrefixError as error:
            assert error.known != begin
            self.num_again += 1
            return await self._ask(stage, peer, error.known)


@contextmanager
def peers_of(manifest: Manifest, copies: int = 1, **settings: Any) -> Iterator[list[list[Peer]]]:
    """By stage, peers that have the first weights of the run."""
    torch.set_num_threads(1)
    peers = [[Peer(manifest, stage, **settings) for _ in range(copies)] for stage in range(manifest.train.num_stages)]
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


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.9, top_p=0.8, seed=3)], ids=["greedy", "drawn"])
@pytest.mark.parametrize("model", [{}, {"boundary": "subspace", "boundary_rank": 8}], ids=["plain", "subspace"])
def test_the_stages_say_what_the_whole_model_says(model: dict[str, Any], sampling: Sampling) -> None:
    manifest = tiny_manifest(NUM_STAGES)
    manifest = dataclasses.replace(manifest, model=dataclasses.replace(manifest.decoder, **model))
    with peers_of(manifest) as peers:
        asker = Asker(manifest, A, [stage[0] for stage in peers], sampling)

        async def ask() -> list[int]:
            return [await asker.next_token() for _ in range(8)]

        assert run(ask()) == due_tokens(manifest, 8, sampling)
        assert asker.num_again == 0


def test_another_peer_of_a_stage_goes_on_in_the_middle_of_a_text() -> None:
    """It knows nothing of the text: the asker sends it what went into that stage, and no other stage computes anything again."""
    manifest = tiny_manifest(NUM_STAGES)
    with peers_of(manifest, copies=2) as peers:
        asker = Asker(manifest, A, [stage[0] for stage in peers])

        async def ask() -> list[int]:
            found = [await asker.next_token() for _ in range(3)]
            asker.peers[1] = peers[1][1]
            found += [await asker.next_token() for _ in range(3)]
            asker.peers[0] = peers[0][1]
            return found + [await asker.next_token() for _ in range(2)]

        assert run(ask()) == due_tokens(manifest, 8)
        assert asker.num_again == 2


def test_a_text_that_was_forgotten_is_sent_again() -> None:
    manifest = tiny_manifest(NUM_STAGES)
    with peers_of(manifest) as peers:
        asker = Asker(manifest, A, [stage[0] for stage in peers])

        async def ask() -> list[int]:
            found = [await asker.next_token() for _ in range(3)]
            await peers[0][0].texts.end(A, b"t" * 16)
            return found + [await asker.next_token() for _ in range(3)]

        assert run(ask()) == due_tokens(manifest, 6)
        assert asker.num_again == 1


def test_askers_have_texts_of_their_own_within_the_bytes_allowed() -> None:
    """Two take turns with the same number for their texts; a stage has room for one text of ten tokens, and not for two."""
    manifest = tiny_manifest(NUM_STAGES)
    limits = SessionLimits(most_bytes=9_000)
    with peers_of(manifest, limits=limits) as peers:
        chain = [stage[0] for stage in peers]
        askers = [Asker(manifest, me, chain) for me in (A, B)]

        async def ask() -> None:
            for _ in range(6):
                for asker in askers:
                    await asker.next_token()
                    assert all(peer.texts.sessions.num_bytes <= limits.most_bytes for peer in chain)

        run(ask())
        assert [asker.tokens[len(PROMPT) :] for asker in askers] == [due_tokens(manifest, 6)] * 2
        assert sum(asker.num_again for asker in askers) > 0


def test_texts_of_an_evaluated_step_go_on_while_the_stage_trains() -> None:
    """The step is kept for the evaluation. A text of the present step ends with it, because its parameters change."""
    manifest = tiny_manifest(1, evaluation_fraction=0.1, evaluate_every_steps=1)
    with peers_of(manifest) as peers:
        peer = peers[0][0]
        old, new = Asker(manifest, A, [peer]), Asker(manifest, B, [peer])

        async def ask() -> list[int]:
            found = [await old.next_token(), await old.next_token()]
            peer.state.evaluated.set_aside(0, peer.state.holdings.module)
            with torch.no_grad():
                for parameter in peer.state.holdings.module.parameters():
                    parameter.add_(0.1)
            peer.state.record = dataclasses.replace(peer.state.record, step=1)
            found += [await old.next_token() for _ in range(3)]
            new.step = 7
            with pytest.raises(WrongStateError, match="does not hold the parameters of step 7"):
                await new.next_token()
            return found

        assert run(ask()) == due_tokens(manifest, 5)
        assert old.num_again == 1  # what was computed with the module that trains on is of no more use

        async def later() -> None:
            peer.state.evaluated.forget()
            await peer.texts.tidy()

        run(later())
        assert not peer.texts.sessions.ids


def test_training_goes_first() -> None:
    """A pass of a text waits until no pass of training waits."""
    manifest = tiny_manifest(1)
    order: list[str] = []
    with peers_of(manifest) as peers:
        peer = peers[0][0]

        async def ask() -> None:
            async def text() -> None:
                await Asker(manifest, A, [peer]).next_token()
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


def test_an_owner_who_allows_nothing_or_little_is_obeyed() -> None:
    manifest = tiny_manifest(1)
    with peers_of(manifest, share=0.0) as peers, pytest.raises(BusyError, match="owner lets nobody"):
        run(Asker(manifest, A, [peers[0][0]]).next_token())
    with peers_of(manifest, share=0.01) as peers:
        peer = peers[0][0]

        async def after_much() -> None:
            peer.texts._turns.share.took(60.0, 0.0)
            await Asker(manifest, A, [peer]).next_token()

        with pytest.raises(BusyError, match="no time for questions") as refused:
            run(after_much())
        assert refused.value.retry_after_s > 30


WRONG: dict[str, dict[str, Any]] = {
    "no tokens": {"inputs": torch.zeros(1, 0, dtype=torch.int64)},
    "two texts": {"inputs": torch.zeros(2, 3, dtype=torch.int64)},
    "numbers": {"inputs": torch.zeros(1, 3)},
    "no such token": {"inputs": torch.tensor([[1, 256]])},
    "negative": {"inputs": torch.tensor([[-1]])},
    "too long": {"begin": 16},
    "before the beginning": {"begin": -1},
    "tokens told": {"tokens": torch.zeros(1, 4, dtype=torch.int64)},
    "a choice": {"sampling": GREEDY},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_no_asker_should_send_is_refused(wrong: str) -> None:
    manifest = tiny_manifest(NUM_STAGES)
    good = TextPass(text=b"t" * 16, step=0, begin=0, inputs=torch.tensor([PROMPT]))
    with peers_of(manifest) as peers:
        with pytest.raises(BadMessageError):
            run(peers[0][0].texts.extend(A, dataclasses.replace(good, **WRONG[wrong])))
        with pytest.raises(BadMessageError):  # the last stage has to choose, and takes activations
            run(peers[1][0].texts.extend(A, good))
        assert isinstance(run(peers[0][0].texts.extend(A, good)), Tensor)
