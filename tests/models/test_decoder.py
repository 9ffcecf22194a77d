"""The decoder is a language model: attention looks back only, and depends on distance."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peerd.models.decoder import rotary_table, rotate
from peerd.models.stages import build_stage
from tests.tiny_run import tiny_manifest


@pytest.mark.parametrize("changed", [0, 5, 15])
def test_a_token_changes_nothing_before_it_and_everything_after(changed: int) -> None:
    model = build_stage(tiny_manifest(1), 0, "cpu")
    tokens = torch.arange(32).view(2, 16)
    other = tokens.clone()
    other[0, changed] = 200
    with torch.no_grad():
        before, after = model(tokens), model(other)
    same = (before == after).all(dim=-1)
    assert same[0].tolist() == [position < changed for position in range(16)]
    assert bool(same[1].all()), "one sequence of a microbatch reached another"


def test_the_order_of_earlier_tokens_matters() -> None:
    """Without positions, the attention over a set would be the same."""
    model = build_stage(tiny_manifest(1), 0, "cpu")
    with torch.no_grad():
        forwards, swapped = model(torch.tensor([[1, 2, 3]])), model(torch.tensor([[2, 1, 3]]))
    assert not torch.allclose(forwards[0, 2], swapped[0, 2])


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 23))
def test_rotated_products_depend_on_the_distance_only(query_at: int, key_at: int, shift: int) -> None:
    rotary = rotary_table(64, 8)
    query, key = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unbind(0)

    def product(query_position: int, key_position: int) -> float:
        turned = [rotate(vector, rotary[:, at : at + 1].double()) for vector, at in ((query, query_position), (key, key_position))]
        return float((turned[0] * turned[1]).sum())

    # The table is rounded to float32: 6e-8 per factor.
    assert product(query_at, key_at) == pytest.approx(product(query_at + shift, key_at + shift), abs=2e-6)


def test_rotation_keeps_lengths() -> None:
    heads = torch.randn(2, 3, 64, 8, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(rotate(heads, rotary_table(64, 8)).norm(dim=-1), heads.norm(dim=-1), rtol=1e-5)


def test_the_loss_is_the_mean_cross_entropy_of_the_logits() -> None:
    model = build_stage(tiny_manifest(1), 0, "cpu")
    tokens, labels = torch.arange(64).view(2, 2, 16).unbind(0)
    with torch.no_grad():
        loss, logits = model(tokens, labels), model(tokens)
    assert logits.shape == (2, 16, 256)
    by_hand = -logits.log_softmax(dim=-1).gather(-1, labels[..., None]).mean()
    assert float(loss) == pytest.approx(float(by_hand), rel=1e-6)
    assert float(loss) == pytest.approx(math.log(256), abs=0.1), "the first predictions should be near uniform"
