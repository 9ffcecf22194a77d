"""A text goes over peers of all stages: the same tokens as the whole model, whoever of a stage computes, though peers leave or forget."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
import torch

from peerd.asking.asker import MOST_ASKED
from peerd.errors import PeerGoneError, WrongStateError
from peerd.policy.inference.sampling import Sampling
from peerd.policy.inference.sessions import SessionLimits
from peerd.table.record import PeerId, Phase
from peerd.wire.tensors import encode
from peerd.wire.text_messages import Extended, TextCall
from tests.stage.text_peers import (
    NUM_STAGES,
    PROMPT,
    A,
    B,
    Peer,
    TextsHere,
    again,
    asker_of,
    due_tokens,
    next_token,
    peers_of,
    run,
    said,
)
from tests.tiny_run import tiny_manifest


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, top_p=0.8, seed=3)], ids=["greedy", "drawn"])
@pytest.mark.parametrize("model", [{}, {"boundary": "subspace", "boundary_rank": 8}], ids=["plain", "subspace"])
def test_the_stages_say_what_the_whole_model_says(model: dict[str, Any], sampling: Sampling) -> None:
    manifest = tiny_manifest(NUM_STAGES)
    manifest = dataclasses.replace(manifest, model=dataclasses.replace(manifest.decoder, **model))
    with peers_of(manifest) as peers:
        asker = asker_of(manifest, peers, sampling=sampling)
        assert run(said(asker, 8)) == due_tokens(manifest, 8, sampling)
        assert (asker.num_again, asker.num_rerouted, asker.steps) == (0, 0, [0])
        run(asker.close())
        assert not any(peer.texts.sessions.ids for stage in peers for peer in stage)


def test_another_peer_of_a_stage_goes_on_in_the_middle_of_a_text() -> None:
    """It knows nothing of the text: the asker sends it what went into that stage, and no other stage computes anything again."""
    manifest = tiny_manifest(NUM_STAGES)
    with peers_of(manifest, copies=2) as peers:
        asker = asker_of(manifest, peers)

        async def ask() -> list[int]:
            found = await said(asker, 3)
            again(asker, next(peer for peer in peers[1] if peer.name in asker.served))
            found += await said(asker, 3)
            again(asker, next(peer for peer in peers[0] if peer.name in asker.served))
            return found + await said(asker, 2)

        assert run(ask()) == due_tokens(manifest, 8)
        assert (asker.num_again, asker.num_rerouted, asker.steps) == (2, 2, [0])
        assert sorted(peer.texts.counts.tokens for stage in peers for peer in stage) == [6, 9, 11, 11]


def test_a_text_that_was_forgotten_is_sent_again() -> None:
    manifest = tiny_manifest(NUM_STAGES)
    with peers_of(manifest) as peers:
        asker = asker_of(manifest, peers)

        async def ask() -> list[int]:
            found = await said(asker, 3)
            await peers[0][0].texts.forget(A, asker._text)
            return found + await said(asker, 3)

        assert run(ask()) == due_tokens(manifest, 6)
        assert asker.num_again == 1


@pytest.mark.parametrize("stage", range(NUM_STAGES))
def test_a_pass_whose_answer_was_lost_is_asked_for_again(stage: int) -> None:
    """The peer then knows more than the asker has been told, and forgets that."""
    manifest = tiny_manifest(NUM_STAGES)
    with peers_of(manifest) as peers:
        asker = asker_of(manifest, peers)
        here, lost = asker._peers, [True]
        assert isinstance(here, TextsHere)
        plain = here.extend

        async def extend(peer: PeerId, call: TextCall) -> Extended:
            found = await plain(peer, call)
            if call.stage == stage and call.begin and lost:
                lost.clear()
                raise WrongStateError("the answer is lost")
            return found

        here.extend = extend  # type: ignore[method-assign]
        assert run(said(asker, 5)) == due_tokens(manifest, 5)
        assert (asker.num_again, lost) == (0, [])


def test_askers_have_texts_of_their_own_within_the_bytes_allowed() -> None:
    """Two take turns with the same number for their texts; a stage has room for one text of ten tokens, and not for two."""
    manifest = tiny_manifest(NUM_STAGES)
    limits = SessionLimits(most_bytes=9_000)
    with peers_of(manifest, limits=limits) as peers:
        askers = [asker_of(manifest, peers, me) for me in (A, B)]
        for asker in askers:
            asker._text = b"t" * 16

        async def ask() -> None:
            for _ in range(6):
                for asker in askers:
                    await next_token(asker)
                    assert all(peer.texts.sessions.num_bytes <= limits.most_bytes for stage in peers for peer in stage)

        run(ask())
        assert [asker.tokens[len(PROMPT) :] for asker in askers] == [due_tokens(manifest, 6)] * 2
        assert sum(asker.num_again for asker in askers) > 0


def trained_on(peer: Peer, step: int) -> None:
    """Let the peer be at another step, with other parameters."""
    with torch.no_grad():
        for parameter in peer.state.holdings.module.parameters():
            parameter.add_(0.1)
    peer.state.record = dataclasses.replace(peer.state.record, step=step)


def test_texts_of_an_evaluated_step_go_on_while_the_stage_trains() -> None:
    """The step is kept for the evaluation."""
    manifest = tiny_manifest(1, evaluation_fraction=0.1, evaluate_every_steps=10)
    with peers_of(manifest) as peers:
        peer, asker = peers[0][0], asker_of(manifest, peers)

        async def ask() -> list[int]:
            found = await said(asker, 2)
            peer.state.evaluated.set_aside(0, peer.state.holdings.module)
            assert peer.state.evaluated.num_bytes >= sum(each.nbytes for each in peer.state.holdings.module.parameters())
            trained_on(peer, 1)
            return found + await said(asker, 3)

        assert run(ask()) == due_tokens(manifest, 5)
        assert asker.num_again == 1  # what was computed with the module that trains on is of no more use
        assert asker.steps == [0]

        async def later() -> None:
            peer.state.evaluated.forget()
            await peer.texts.tidy()

        run(later())
        assert not peer.texts.sessions.ids


def test_a_text_takes_another_step_where_its_own_is_gone() -> None:
    """All stages compute the whole text again; until all hold one step, the asker waits."""
    manifest = tiny_manifest(NUM_STAGES)
    with peers_of(manifest) as peers:
        asker = asker_of(manifest, peers)

        async def ask() -> None:
            await said(asker, 2)
            trained_on(peers[0][0], 1)
            going_on = asyncio.create_task(said(asker, 2))
            while not asker.num_again and asker._path is not None:  # noqa: ASYNC110 - nothing tells that the asker has lost its path
                await asyncio.sleep(0.001)
            trained_on(peers[1][0], 1)
            await going_on

        run(ask())
        assert asker.steps == [0, 1]
        assert len(asker.tokens) == len(PROMPT) + 4


def test_where_nobody_goes_on_the_asker_says_which_stage_lacks() -> None:
    manifest = tiny_manifest(NUM_STAGES)
    with peers_of(manifest) as peers:
        asker = asker_of(manifest, peers, patience_s=0.05)
        peers[1][0].state.record = dataclasses.replace(peers[1][0].state.record, phase=Phase.JOINING)
        with pytest.raises(PeerGoneError, match="no peer of stage 1 goes on with texts"):
            run(said(asker, 1))


@pytest.mark.parametrize("copies", [1, MOST_ASKED + 2])
def test_where_all_owners_of_a_stage_let_nobody_ask_the_asker_hears_so_at_once(copies: int) -> None:
    manifest = tiny_manifest(NUM_STAGES)
    with peers_of(manifest, copies=copies) as peers:
        asker = asker_of(manifest, peers, patience_s=1000.0)
        for peer in peers[1]:
            peer.texts.turns.set_share(0.0)
        with pytest.raises(PeerGoneError, match="owners of all peers of stage 1 let nobody ask"):
            run(said(asker, 1))


def test_where_one_of_many_owners_lets_somebody_ask_that_peer_is_found() -> None:
    """The four nearest peers, which are asked first, do not answer."""
    manifest = tiny_manifest(NUM_STAGES)
    with peers_of(manifest, copies=MOST_ASKED + 1) as peers:
        for peer in peers[1][:2]:
            peer.texts.turns.set_share(0.0)
        for peer in peers[1][2:MOST_ASKED]:
            peer.state.record = dataclasses.replace(peer.state.record, phase=Phase.JOINING)
        asker = asker_of(manifest, peers)
        assert run(said(asker, 2)) == due_tokens(manifest, 2)
        assert asker.served[peers[1][MOST_ASKED].name] == 1


def test_an_owner_who_switches_off_in_the_middle_of_a_text_ends_it_at_once() -> None:
    manifest = tiny_manifest(NUM_STAGES)
    with peers_of(manifest) as peers:
        asker = asker_of(manifest, peers, patience_s=1000.0)

        async def ask() -> None:
            await said(asker, 2)
            peers[0][0].texts.turns.set_share(0.0)
            await said(asker, 1)

        with pytest.raises(PeerGoneError, match="stage 0 let nobody ask"):
            run(ask())


@pytest.mark.parametrize("liar", ["token", "shape", "not finite"])
def test_a_peer_that_answers_what_was_not_asked_is_left_out(liar: str) -> None:
    """Another one of its stage goes on."""
    manifest = tiny_manifest(NUM_STAGES)
    with peers_of(manifest, copies=2) as peers:
        asker = asker_of(manifest, peers)
        here = asker._peers
        assert isinstance(here, TextsHere)
        plain = here.extend

        async def extend(peer: PeerId, call: TextCall) -> Extended:
            found = await plain(peer, call)
            if not peer.startswith("0") or call.stage != (liar == "token"):
                return found
            if liar == "token":
                return Extended(chosen=(256,))
            outputs = torch.zeros(1, 3)
            if liar == "not finite":
                assert found.outputs is not None
                outputs = torch.full(found.outputs.shape, torch.nan)
            return Extended(outputs=encode(outputs))

        here.extend = extend  # type: ignore[method-assign]
        assert run(said(asker, 3)) == due_tokens(manifest, 3)
        assert f"0 of {int(liar == 'token')}" not in asker.served
