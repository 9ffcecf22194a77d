"""A residual stream of a few coordinates in a transformers model of the Llama family, by other shapes of its own modules.

The embedding and the last linear module of each sub-layer give coordinates; each norm gets hidden states, which a hook makes of them. The
layers' own code adds coordinates up and never looks at their width. models/subspace.py says what coordinates are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from peerd.config.model_kinds import HuggingFaceConfig
from peerd.models.subspace import NEEDS_TOKENS, WRITERS, Subspace, Widening
from peerd.models.weights import Uninitialised

STREAM_NORMS = ("input_layernorm", "post_attention_layernorm")
"""The norms of a layer that read the residual stream. Others, such as those of queries and keys, read something else."""


class Coordinates(Subspace):
    """A `Subspace` that knows the tokens of the microbatch under way."""

    def __init__(self, config: HuggingFaceConfig, seed: int) -> None:
        super().__init__(config, seed)
        self._widen: Widening = _without_tokens

    def take_over(self, whole: Any) -> None:
        """Change a (partial) model without memory: its stream becomes coordinates. Names stay."""
        base = whole.base_model
        readers = [base.norm, *(getattr(block, name) for block in base.layers for name in STREAM_NORMS if hasattr(block, name))]
        for norm in readers:
            if next(norm.parameters(), None) is not None:  # not another stage's
                norm.register_forward_pre_hook(self._widened)
        rank = self.basis.shape[1]
        if isinstance(base.embed_tokens, nn.Embedding):
            base.embed_tokens = _without_memory(nn.Embedding, base.embed_tokens.num_embeddings, rank, base.embed_tokens.padding_idx)
        for path, module in list(base.layers.named_modules()):
            parent, _, name = path.rpartition(".")
            if name in WRITERS:
                has_bias = module.bias is not None
                setattr(base.layers.get_submodule(parent), name, _without_memory(nn.Linear, module.in_features, rank, has_bias))

    @contextmanager
    def of_tokens(self, tokens: Tensor) -> Iterator[None]:
        """Within it, hidden states are made for these tokens, [B, S]."""
        self._widen = self.of(tokens)
        try:
            yield
        finally:
            self._widen = _without_tokens

    def _widened(self, _norm: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """A hook before a norm: coordinates [B, S, K] become hidden states [B, S, D]."""
        return (self._widen(arguments[0]), *arguments[1:])


def _without_tokens(_coordinates: Tensor) -> Tensor:
    raise ValueError(NEEDS_TOKENS)


def _without_memory(kind: type[nn.Module], *arguments: Any) -> nn.Module:
    with torch.device("meta"), Uninitialised():
        return kind(*arguments)
