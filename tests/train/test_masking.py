"""Masking hides the same tokens on every peer, and hides each position equally often."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peerd.config.manifest import Manifest
from peerd.config.model_kinds import NOT_ASKED
from peerd.errors import BadMessageError
from peerd.reference import train_reference
from peerd.train.masking import Masking
from peerd.wire.tensors import encode
from tests.stage.test_wire_codecs import LABELS, TOKENS, Chain
from tests.tiny_run import corpus_of

MASK = 257
COUNTED = np.arange(1000, dtype=np.int64)


def bert_manifest(num_stages: int = 1, **changes: Any) -> Manifest:
    pytest.importorskip("transformers")
    from tests.models.hf_models import hf_manifest, hf_model

    model = hf_model("bert", vocab_size=MASK + 1)
    return hf_manifest(num_stages, replace(model, **({"masked_share": 0.15, "mask_token": MASK} | changes)))


@given(
    share=st.floats(0.01, 0.9),
    tokens=st.lists(st.integers(0, 255), min_size=1, max_size=200),
    place=st.tuples(*[st.integers(0, 2**64 - 1)] * 4),
)
def test_labels_are_the_hidden_tokens_and_the_rest_is_as_it_was(share: float, tokens: list[int], place: tuple[int, int, int, int]) -> None:
    given_tokens = np.array(tokens, dtype=np.int64)
    inputs, labels = Masking(share, MASK).apply(given_tokens, *place)
    asked = labels != NOT_ASKED
    assert asked.sum() == max(1, round(share * len(tokens)))
    assert (labels[asked] == given_tokens[asked]).all()
    assert (inputs[~asked] == given_tokens[~asked]).all()
    assert set(inputs.tolist()) <= {MASK, *tokens}


def test_of_those_asked_for_eight_of_ten_are_hidden_one_is_another_and_one_stays() -> None:
    """Over 15000 tokens, within five standard deviations."""
    hidden = stayed = total = 0
    for index in range(100):
        inputs, labels = Masking(0.15, MASK * 10).apply(COUNTED, 7, 0, index, 0)
        asked = labels != NOT_ASKED
        hidden += int((inputs[asked] == MASK * 10).sum())
        stayed += int((inputs[asked] == labels[asked]).sum())
        total += int(asked.sum())
    assert hidden / total == pytest.approx(0.8, abs=5 * (0.8 * 0.2 / total) ** 0.5)
    assert stayed / total == pytest.approx(0.1, abs=5 * (0.1 * 0.9 / total) ** 0.5)


def test_every_place_is_asked_for_alike_and_each_argument_matters() -> None:
    masking = Masking(0.15, MASK)
    found = [masking.apply(COUNTED, 7, 3, index, 0)[1] != NOT_ASKED for index in range(400)]
    assert np.stack(found).mean(0) == pytest.approx(0.15, abs=6 * (0.15 * 0.85 / 400) ** 0.5)
    first = masking.apply(COUNTED, 7, 3, 1, 0)[1]
    assert (masking.apply(COUNTED, 7, 3, 1, 0)[1] == first).all()
    for other in ((8, 3, 1, 0), (7, 4, 1, 0), (7, 3, 2, 0), (7, 3, 1, 1)):
        assert (masking.apply(COUNTED, *other)[1] != first).any()


def test_what_is_hidden_is_the_same_on_every_machine() -> None:
    """Frozen: after a change, trainers of different versions would disagree."""
    inputs, labels = Masking(0.25, 99).apply(np.arange(12, dtype=np.int64), 7, 0, 0, 0)
    assert inputs.tolist() == [0, 1, 11, 3, 4, 5, 6, 7, 99, 9, 10, 99]
    assert {place: label for place, label in enumerate(labels.tolist()) if label != NOT_ASKED} == {2: 2, 8: 8, 11: 11}


def test_a_masked_run_reads_the_windows_of_any_other_and_hides_some_of_their_tokens(tmp_path: Path) -> None:
    plain, masked = (corpus_of(bert_manifest(masked_share=share), tmp_path) for share in (0.0, 0.25))
    tokens, (inputs, labels) = plain.microbatch(3, 1)[0], masked.microbatch(3, 1)
    asked = labels != NOT_ASKED
    assert asked.sum(dim=1).tolist() == [4, 4]
    assert torch.equal(torch.where(asked, labels, inputs), tokens)
    assert torch.equal(masked.microbatch(3, 1)[0], inputs)


def test_a_small_bert_learns_what_is_hidden_whatever_the_split(tmp_path: Path) -> None:
    whole, split = (bert_manifest(stages) for stages in (1, 3))
    expected = [each.loss for each in train_reference(whole, corpus_of(whole, tmp_path), 12).history]
    assert expected[-1] < expected[0] - 0.5
    assert [each.loss for each in train_reference(split, corpus_of(split, tmp_path), 2).history] == expected[:2]


@pytest.fixture
def chain() -> Iterator[Chain]:
    made = Chain(bert_manifest(3))
    yield made
    for executor in made.executors:
        executor.close()


async def test_stages_take_labels_of_some_positions_and_refuse_those_of_none(chain: Chain) -> None:
    some = LABELS.clone()
    some[:, 3:] = NOT_ASKED
    call = replace(chain.launch(), labels=encode(some.int()))
    await chain.send(call, lambda _stage, _peer: None)
    assert chain.states[-1].record.done == 1
    for labels, said in ((torch.full_like(TOKENS, NOT_ASKED), "ask for no token"), (some - 1, "outside the vocabulary")):
        with pytest.raises(BadMessageError, match=said):
            await chain.send(replace(chain.launch(), index=1, labels=encode(labels.int())), lambda _stage, _peer: None)


def test_a_causal_model_hides_nothing() -> None:
    with pytest.raises(ValueError, match=r'model\.masked_share needs model\.objective "masked"'):
        bert_manifest(objective="causal")
