"""A text that stages compute piece by piece has the logits of the whole text, to rounding."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peerd.config.manifest import Manifest
from peerd.models.hf.manifest_model import choose_model
from peerd.models.module import StageModule
from peerd.models.prefix import Prefix, RecomputedPrefix
from peerd.models.stages import build_stage
from tests.models.hf_models import hf_manifest, hf_model
from tests.tiny_run import tiny_manifest

MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "narrow": {"boundary": "bottleneck", "boundary_factor": 2},
    "shared layers": {"num_layers": 6, "layers_per_group": 2},
    "tied": {"tie_word_embeddings": True},
    "subspace": {"boundary": "subspace", "boundary_rank": 8},
    "token-residual": {"boundary": "token-residual", "boundary_rank": 8},
}
TOKENS = torch.randint(0, 256, (1, 16), generator=torch.Generator().manual_seed(3))


def manifest_of(name: str, num_stages: int) -> Manifest:
    manifest = tiny_manifest(num_stages)
    return dataclasses.replace(manifest, model=dataclasses.replace(manifest.decoder, **MODELS[name]))


def stages_of(manifest: Manifest) -> list[StageModule]:
    """With strong weights: first ones hardly let an earlier token show."""
    stages = [build_stage(manifest, stage, "cpu") for stage in range(manifest.train.num_stages)]
    with torch.no_grad():
        for stage in stages:
            for parameter in stage.parameters():
                parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)
    return stages


def logits_of(manifest: Manifest, prefixes: Sequence[Prefix], pieces: Sequence[Tensor]) -> Tensor:
    outputs = []
    for piece in pieces:
        hidden = piece
        for number, prefix in enumerate(prefixes):
            told = piece if manifest.model.tells_tokens and number else None
            hidden = prefix.extend(hidden, told)
        outputs.append(hidden)
    return torch.cat(outputs, dim=1)


def pieces_of(cuts: Sequence[int]) -> list[Tensor]:
    edges = sorted({0, TOKENS.shape[1], *cuts})
    return [TOKENS[:, begin:end] for begin, end in itertools.pairwise(edges)]


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=8, deadline=None)
@given(cuts=st.sets(st.integers(1, 15)))
def test_any_pieces_give_the_logits_of_the_whole_text(name: str, cuts: set[int]) -> None:
    manifest = manifest_of(name, 2)
    stages = stages_of(manifest)
    whole = logits_of(manifest, [RecomputedPrefix(stage.without_loss) for stage in stages], [TOKENS])
    prefixes = [stage.prefix() for stage in stages]
    assert not any(isinstance(prefix, RecomputedPrefix) for prefix in prefixes)
    assert torch.allclose(logits_of(manifest, prefixes, pieces_of(sorted(cuts))), whole, rtol=1e-4, atol=1e-4)
    assert all(prefix.length == TOKENS.shape[1] for prefix in prefixes)


def after_a_detour(manifest: Manifest, prefixes: Sequence[Prefix]) -> Tensor:
    """The logits of the text where other tokens came in the middle of it, and were taken back."""
    before = logits_of(manifest, prefixes, pieces_of([5])[:1])
    logits_of(manifest, prefixes, [(TOKENS[:, 5:9] + 1) % 256])
    assert all(prefix.cut(7) and prefix.cut(5) and prefix.cut(5) for prefix in prefixes)
    assert all(prefix.length == 5 for prefix in prefixes)
    return torch.cat([before, logits_of(manifest, prefixes, [TOKENS[:, 5:6], TOKENS[:, 6:]])], dim=1)


@pytest.mark.parametrize("name", MODELS)
def test_tokens_that_are_taken_back_leave_nothing(name: str) -> None:
    manifest = manifest_of(name, 2)
    stages = stages_of(manifest)
    whole = logits_of(manifest, [RecomputedPrefix(stage.without_loss) for stage in stages], [TOKENS])
    for prefixes in ([stage.prefix() for stage in stages], [RecomputedPrefix(stage.without_loss) for stage in stages]):
        assert torch.allclose(after_a_detour(manifest, prefixes), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_stages_of_transformers_take_tokens_back(name: str) -> None:
    pytest.importorskip("transformers")
    manifest = hf_manifest(3, hf_model(name))
    stages = stages_of(manifest)
    whole = logits_of(manifest, [RecomputedPrefix(stage.without_loss) for stage in stages], [TOKENS])
    assert torch.allclose(after_a_detour(manifest, [stage.prefix() for stage in stages]), whole, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_a_layer_that_sees_a_window_takes_nothing_back() -> None:
    """It has dropped the tokens that would come into the window again."""
    pytest.importorskip("transformers")
    stage = stages_of(hf_manifest(1, hf_model("gemma2")))[0]
    prefix = stage.prefix()
    prefix.extend(TOKENS)
    assert not prefix.cut(9)
    assert prefix.length == TOKENS.shape[1]


def test_a_prefix_without_a_cache_gives_the_same() -> None:
    for name in ("plain", "subspace"):
        manifest = manifest_of(name, 2)
        stages = stages_of(manifest)
        whole = logits_of(manifest, [RecomputedPrefix(stage.without_loss) for stage in stages], [TOKENS])
        again = logits_of(manifest, [RecomputedPrefix(stage.without_loss) for stage in stages], pieces_of([5, 6, 9]))
        assert torch.allclose(again, whole, rtol=1e-4, atol=1e-4)


def test_the_bytes_kept_are_keys_and_values_of_each_layer_and_token() -> None:
    """A stage of layers [0, 2) of width 32 keeps 2 x 2 vectors of 32 float32 numbers a token."""
    manifest = tiny_manifest(2, cut=(2, 3))
    prefix = build_stage(manifest, 0, "cpu").prefix()
    assert prefix.num_bytes == 0
    prefix.extend(TOKENS[:, :5])
    prefix.extend(TOKENS[:, 5:6])
    assert prefix.num_bytes == 6 * 2 * 2 * 32 * 4
    recomputed = RecomputedPrefix(build_stage(manifest, 0, "cpu").without_loss)
    recomputed.extend(TOKENS[:, :5])
    assert recomputed.num_bytes == 5 * 8


def test_a_text_ends_where_the_models_positions_end() -> None:
    prefix = build_stage(tiny_manifest(1), 0, "cpu").prefix()
    prefix.extend(TOKENS)
    with pytest.raises(ValueError, match="longer than the 16 tokens"):
        prefix.extend(TOKENS[:, :1])


@pytest.mark.parametrize(
    ("name", "boundary"),
    [("gpt2", {}), ("llama", {"boundary": "subspace", "boundary_rank": 8}), pytest.param("gemma2", {}, marks=pytest.mark.slow)],
)
def test_stages_of_transformers_continue_from_their_caches(name: str, boundary: dict[str, Any]) -> None:
    """Learned positions; rotary ones, and a subspace between stages; layers of two kinds, one of which sees a window."""
    pytest.importorskip("transformers")
    manifest = hf_manifest(3, dataclasses.replace(hf_model(name), **boundary))
    stages = stages_of(manifest)
    whole = logits_of(manifest, [RecomputedPrefix(stage.without_loss) for stage in stages], [TOKENS])
    prefixes = [stage.prefix() for stage in stages]
    assert not any(isinstance(prefix, RecomputedPrefix) for prefix in prefixes)
    assert torch.allclose(logits_of(manifest, prefixes, pieces_of([5, 6, 7, 11])), whole, rtol=1e-3, atol=1e-3)
    assert all(prefix.num_bytes > 0 for prefix in prefixes)


@pytest.mark.parametrize("name", ["mamba", "bert"])
def test_what_does_not_continue_from_a_cache_is_found_by_computing(name: str) -> None:
    """A state of another form; tokens that see later ones."""
    pytest.importorskip("transformers")
    from peerd.models.hf.prefix import continues_from_cache

    assert not continues_from_cache(choose_model(name, {}, {}))


def test_a_stage_without_a_cache_of_its_own_computes_the_whole_text() -> None:
    pytest.importorskip("transformers")
    assert isinstance(build_stage(hf_manifest(3, hf_model("bert")), 0, "cpu").prefix(), RecomputedPrefix)


def test_a_stage_refuses_tokens_that_it_does_not_compute_with() -> None:
    pytest.importorskip("transformers")
    stage = build_stage(hf_manifest(3), 1, "cpu")
    with pytest.raises(ValueError, match="computes with no tokens"):
        stage.without_loss(torch.zeros(1, 2, 32), TOKENS[:, :2])
