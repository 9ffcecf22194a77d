"""Tokens that the asker guesses take one way through the stages together: the text is the same, right or wrong, and ways are fewer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from peerd.asking.asker import Asker
from peerd.models.prefix import Prefix
from peerd.policy.inference.sampling import Sampling
from tests.stage.text_peers import NUM_STAGES, PROMPT, again, asker_of, due_tokens, peers_of, run
from tests.tiny_run import tiny_manifest

COUNT = 10
DRAWN = Sampling(temperature=0.9, top_p=0.8, seed=3)


def guessing(asker: Asker, due: Sequence[int], right: int, wrong: int) -> list[int]:
    """Let the asker guess so many tokens right and then so many wrong ones. Returns the ways that it has made, by the tokens of each."""
    ways: list[int] = []

    def guess(tokens: Sequence[int], most: int) -> list[int]:
        come = [*due[len(tokens) - len(PROMPT) :]]
        return [*come[:right], *((token + 1) % 256 for token in come[right : right + wrong])][:most]

    asker._drafts.guess = guess  # type: ignore[method-assign]
    return ways


async def all_said(asker: Asker, count: int, ways: list[int]) -> list[int]:
    found = list[int]()
    while len(found) < count:
        come = await asker.next_tokens(count - len(found))
        assert 1 <= len(come) <= count - len(found)
        ways.append(len(come))
        found += come
    return found


@pytest.mark.parametrize("sampling", [Sampling(), DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("model", [{}, {"boundary": "subspace", "boundary_rank": 8}], ids=["plain", "tells tokens"])
@pytest.mark.parametrize(("right", "wrong"), [(4, 0), (2, 2), (0, 3)])
def test_the_text_is_the_same_however_many_guesses_are_right(model: dict[str, Any], sampling: Sampling, right: int, wrong: int) -> None:
    manifest = tiny_manifest(NUM_STAGES)
    manifest = dataclasses.replace(manifest, model=dataclasses.replace(manifest.decoder, **model))
    with peers_of(manifest) as peers:
        asker, due = asker_of(manifest, peers, sampling=sampling), due_tokens(manifest, COUNT, sampling)
        ways = guessing(asker, due, right, wrong)
        assert run(all_said(asker, COUNT, ways)) == due
        assert ways == [right + 1] * (COUNT // (right + 1)) + [COUNT % (right + 1)] * (COUNT % (right + 1) > 0)
        assert (asker.num_again, asker.num_right) == (0, COUNT - len(ways))
        assert [hop.calls for hop in asker.hops] == [len(ways)] * NUM_STAGES


def test_a_peer_that_takes_over_gets_no_wrong_guess() -> None:
    manifest = tiny_manifest(NUM_STAGES)
    with peers_of(manifest, copies=2) as peers:
        asker, due = asker_of(manifest, peers), due_tokens(manifest, COUNT)
        ways = guessing(asker, due, 1, 2)

        async def ask() -> list[int]:
            found = await all_said(asker, 4, ways)
            again(asker, next(peer for peer in peers[1] if peer.name in asker.served))
            return found + await all_said(asker, COUNT - 4, ways)

        assert run(ask()) == due
        assert (asker.num_again, asker.num_rerouted) == (1, 1)


def test_where_a_peer_cannot_take_tokens_back_the_asker_guesses_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first wrong guess each stage computes the text once more."""
    manifest = tiny_manifest(NUM_STAGES)
    monkeypatch.setattr(Prefix, "cut", lambda self, length: length == self.length)
    with peers_of(manifest) as peers:
        asker, due = asker_of(manifest, peers), due_tokens(manifest, COUNT)
        ways = guessing(asker, due, 0, 2)
        assert run(all_said(asker, COUNT, ways)) == due
        assert asker.num_again <= 2 * NUM_STAGES
        assert asker.num_guessed <= 4


def test_a_text_ends_at_the_models_context() -> None:
    manifest = tiny_manifest(NUM_STAGES)
    room = manifest.train.sequence_length - len(PROMPT)
    with peers_of(manifest) as peers:
        asker, due = asker_of(manifest, peers), due_tokens(manifest, room)
        assert run(all_said(asker, room, guessing(asker, [*due, *[0] * 9], 8, 0))) == due


def test_what_the_text_says_before_is_guessed() -> None:
    """The asker's own guesses: a model that repeats itself takes fewer ways than tokens."""
    manifest = tiny_manifest(1)
    with peers_of(manifest) as peers:
        asker, ways = asker_of(manifest, peers), list[int]()
        asker.tokens = [7, 8, 9, 7, 8, 9]
        asker._drafts.guess([*asker.tokens], 0)
        before = asker._drafts.guess(asker.tokens, 8)
        assert before == [7, 8, 9, 7]
        run(all_said(asker, 8, ways))
        assert asker.num_guessed >= 4
