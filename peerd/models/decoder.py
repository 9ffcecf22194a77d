"""The built-in language model: a decoder after SWARM section 4.3, with rotary embeddings and GeGLU.

Choices: LayerNorm before each sub-layer; no biases in the linear layers; dropout on the embedding and on each sub-layer's output
(as in GPT-2, but not on attention's weights); separate head and embedding unless they are tied, in which case the last stage holds a
copy of the embedding, under its name, and both stages sum their gradients of it. Layers that share weights lie in one stage.
Shapes in docstrings: B sequences, S tokens, D d_model, H heads, K = D / H, F d_ff, V vocabulary; R is the width of the residual
stream: D, or with the boundary "subspace" that of its coordinates; N tokens that a key-value cache holds, with the new ones.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from peerd.config.manifest import Manifest, ModelConfig
from peerd.models.boundary import narrow_of, widen_of
from peerd.models.dropout import Dropout
from peerd.models.module import StageModule
from peerd.models.prefix import Prefix
from peerd.models.subspace import NEEDS_TOKENS, Subspace, Widening
from peerd.models.weights import generator_of, give_memory
from peerd.planner.decoder import decoder_loads
from peerd.planner.workload import Load

ROTARY_BASE = 10000.0
VOCABULARY_STD = 0.02
"""For embedding and head. It is small, so that the first predictions are nearly uniform and the first loss is near log V."""


class KeyValues:
    """The keys and values of one attention for the tokens so far."""

    def __init__(self) -> None:
        self._held: tuple[Tensor, Tensor] | None = None

    def add(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add those of new tokens, each [B, H, S, K]. Returns all, each [B, H, N, K]."""
        if self._held is not None:
            key, value = (torch.cat([held, new], dim=2) for held, new in zip(self._held, (key, value), strict=True))
        self._held = key, value
        return self._held

    def cut(self, length: int) -> None:
        """Keep those of the first `length` tokens."""
        if self._held is not None:
            key, value = self._held
            self._held = key[:, :, :length], value[:, :, :length]

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in self._held or ())


class Attention(nn.Module):
    """Causal self-attention with rotary position embeddings (RoFormer, arXiv 2104.09864)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.query_key_value = nn.Linear(config.d_model, 3 * config.d_model, bias=False)
        self.output = nn.Linear(config.d_model, config.stream_width, bias=False)

    def forward(self, hidden: Tensor, rotary: Tensor, past: KeyValues | None = None) -> Tensor:
        """hidden [B, S, D], rotary [2, S, K / 2] -> [B, S, R]. With a `past` the tokens follow those that it holds, and are added to it."""
        microbatch, sequence, width = hidden.shape
        projected = self.query_key_value(hidden).view(microbatch, sequence, 3, self.num_heads, width // self.num_heads)
        query, key, value = projected.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, H, S, K]
        query, key = rotate(query, rotary), rotate(key, rotary)
        if past is not None:
            key, value = past.add(key, value)
        if key.shape[2] == sequence:
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=_seen_by_last(sequence, key.shape[2], key.device))
        attended: Tensor = self.output(mixed.transpose(1, 2).reshape(microbatch, sequence, width))
        return attended


def _seen_by_last(sequence: int, total: int, device: torch.device) -> Tensor:
    """Which of all tokens each of the last ones sees: bool [S, N]."""
    return torch.ones(sequence, total, dtype=torch.bool, device=device).tril(total - sequence)


class FeedForward(nn.Module):
    """GeGLU (arXiv 2002.05202): the hidden layer is GELU(gate) times a second projection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_and_value = nn.Linear(config.d_model, 2 * config.d_ff, bias=False)
        self.output = nn.Linear(config.d_ff, config.stream_width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, R]."""
        gate, value = self.gate_and_value(hidden).chunk(2, dim=-1)
        transformed: Tensor = self.output(functional.gelu(gate) * value)
        return transformed


class DecoderLayer(nn.Module):
    """One layer: attention and feed-forward, each behind a LayerNorm and added to the residual stream."""

    def __init__(self, config: ModelConfig, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.d_model)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.LayerNorm(config.d_model)
        self.feed_forward = FeedForward(config)
        self.attention_dropout, self.feed_forward_dropout = Dropout(dropout), Dropout(dropout)

    def forward(self, hidden: Tensor, rotary: Tensor, widen: Widening, past: KeyValues | None = None) -> Tensor:
        """hidden [B, S, R], rotary [2, S, K / 2] -> [B, S, R]. `widen` makes [B, S, D] of [B, S, R]."""
        hidden = hidden + self.attention_dropout(self.attention(self.attention_norm(widen(hidden)), rotary, past))
        summed: Tensor = hidden + self.feed_forward_dropout(self.feed_forward(self.feed_forward_norm(widen(hidden))))
        return summed


class DecoderStage(StageModule):
    """The decoder's layers `layers`. The first stage also has the embedding, the last the final norm, the head and the loss."""

    rotary: Tensor

    def __init__(self, manifest: Manifest, stage: int, layers: range) -> None:
        super().__init__(stage, manifest.train.num_stages)
        config = self.config = manifest.decoder
        self.dropout, self._precision = manifest.train.dropout, manifest.train.precision
        if self.is_first or (self.is_last and config.tie_word_embeddings):
            self.embedding = nn.Embedding(config.vocab_size, config.stream_width)
        if self.is_first:
            self.embedding_dropout = Dropout(self.dropout)
        # Dictionaries, not lists: the keys are the layers' indices in the whole model, so names do not depend on the split.
        self.blocks = nn.ModuleDict({str(layer): DecoderLayer(config, self.dropout) for layer in layers[:: config.layers_per_group]})
        narrowed = narrowed_before(config, layers)
        self.narrow = nn.ModuleDict({str(layer): narrow_of(config) for layer in narrowed if layer > layers.start})
        self.widen = nn.ModuleDict({str(layer): widen_of(config) for layer in narrowed if layer < layers.stop})
        if self.is_last:
            self.final_norm = nn.LayerNorm(config.d_model)
            if not config.tie_word_embeddings:
                self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.subspace = Subspace(config, manifest.seed) if config.tells_tokens else None
        head_width = config.d_model // config.num_heads
        self.register_buffer("rotary", torch.empty(2, manifest.train.sequence_length, head_width // 2), persistent=False)

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Tensor:
        told = None if self.subspace is None or labels is None else labels[:, :-1]
        output = self.compute(inputs, told)
        if not self.is_last or labels is None:
            return output
        following = labels if self.subspace is None else labels[:, 1:]
        return functional.cross_entropy(output.flatten(0, 1).float(), following.flatten())

    def compute(self, inputs: Tensor, tokens: Tensor | None, past: DecoderPrefix | None = None) -> Tensor:
        """Activations, or from the last stage logits. With a subspace the stages after the first need the tokens [B, S]."""
        hidden = self.embedding_dropout(self.embedding(inputs)) if self.is_first else inputs
        begin = past.length if past is not None else 0
        rotary, widen = self.rotary[:, begin : begin + hidden.shape[1]], self._widening(inputs if self.is_first else tokens)
        kept = iter(past.kept) if past is not None else itertools.repeat(None)
        for layer, block in self.blocks.items():
            if layer in self.widen:
                hidden = self.widen[layer](hidden)
            for _ in range(self.config.layers_per_group):
                hidden = block(hidden, rotary, widen, next(kept))
            after = str(int(layer) + self.config.layers_per_group)
            if after in self.narrow:
                hidden = self.narrow[after](hidden)
        if not self.is_last:
            return hidden
        weight = self.embedding.weight if self.config.tie_word_embeddings else self.head.weight
        return functional.linear(self.final_norm(widen(hidden)), weight)

    def without_loss(self, inputs: Tensor, tokens: Tensor | None) -> Tensor:
        return self.compute(inputs, tokens)

    def prefix(self) -> Prefix:
        return DecoderPrefix(self)

    @property
    def needs_labels(self) -> bool:
        return self.is_last or self.subspace is not None

    def _widening(self, tokens: Tensor | None) -> Widening:
        """The map from the residual stream to hidden states, for these tokens [B, S]."""
        if self.subspace is None:
            return _as_it_is
        if tokens is None:
            raise ValueError(NEEDS_TOKENS)
        return self.subspace.of(tokens)

    @property
    def tied_names(self) -> tuple[str, ...]:
        tied = self.config.tie_word_embeddings and self.is_first != self.is_last
        return ("embedding.weight",) if tied else ()

    def initialise(self, seed: int, device: torch.device) -> None:
        give_memory(self, device)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(self.initial_value(name, parameter.shape, generator_of(seed, name)))
            if self.subspace is not None:
                self.subspace.draw()
                self._open_projections(self.subspace.basis)
            self.rotary.copy_(rotary_table(self.rotary.shape[1], 2 * self.rotary.shape[2]))

    def _open_projections(self, basis: Tensor) -> None:
        """The ends of "token-residual" boundaries begin as U^T and U."""
        if self.config.boundary == "token-residual":
            for end, value in ((self.narrow, basis.T), (self.widen, basis)):
                for parameter in end.parameters():
                    parameter.copy_(value)

    def initial_value(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """The first value of a parameter: uniform, with the usual standard deviations.

        It is not normal, because integer draws scaled by exactly rounded operations have the same bits on every processor, while
        normal draws use a vectorised logarithm and cosine that differ between instruction sets.
        """
        if len(shape) == 1:
            return torch.ones(shape) if name.endswith("norm.weight") else torch.zeros(shape)
        std = VOCABULARY_STD if name in ("embedding.weight", "head.weight") else 1 / math.sqrt(shape[1])
        if name.endswith(".output.weight"):
            std /= math.sqrt(2 * self.config.num_layers)  # the residual stream sums 2 such outputs per layer (GPT-2)
        return torch.rand(shape, generator=generator).mul_(2).sub_(1).mul_(std * math.sqrt(3))

    def graph_bytes(self, num_tokens: int) -> int:
        masks = 8 * self.config.d_model * len(self.blocks) * self.config.layers_per_group if self.dropout else 0
        return self._load(1, num_tokens).graph_bytes + masks * num_tokens

    def forward_flops(self, microbatch: int, sequence: int) -> int:
        return self._load(microbatch, sequence).forward_flops

    def _load(self, microbatch: int, sequence: int) -> Load:
        """The load according to the planner, for the parts that this stage has."""
        loads = decoder_loads(self.config, microbatch, sequence, self._precision)
        parts = [loads.groups[0]] * len(self.blocks) + [loads.narrowing] * len(self.narrow) + [loads.widening] * len(self.widen)
        return sum([*parts, *[loads.first] * self.is_first, *[loads.last] * self.is_last], Load())


class DecoderPrefix(Prefix):
    """The keys and values of a stage's layers. Where a group of layers shares its weights, each application has its own."""

    def __init__(self, stage: DecoderStage) -> None:
        super().__init__()
        self._stage = stage
        self.kept = [KeyValues() for _ in range(len(stage.blocks) * stage.config.layers_per_group)]

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self.kept)

    def _extend(self, inputs: Tensor, tokens: Tensor | None) -> Tensor:
        most = self._stage.rotary.shape[1]
        if self.length + inputs.shape[1] > most:
            raise ValueError(f"the text is longer than the {most} tokens of the model")
        return self._stage.compute(inputs, tokens, self)

    def _cut(self, length: int) -> bool:
        for each in self.kept:
            each.cut(length)
        return True


def _as_it_is(hidden: Tensor) -> Tensor:
    return hidden


def narrowed_before(config: ModelConfig, layers: range) -> list[int]:
    """The layers among these, and the one after them, that follow a narrow boundary: at a stage's ends, or where the config says."""
    if config.boundary in ("none", "subspace"):
        return []
    points = config.boundary_layers or (layers.start, layers.stop)
    return [layer for layer in points if layers.start <= layer <= layers.stop and 0 < layer < config.num_layers]


def rotary_table(sequence: int, head_width: int) -> Tensor:
    """Cosines and sines of every position's rotations, float32 [2, S, K / 2].

    Computed in float64: rounding to float32 then hides the last-bit differences between maths libraries.
    """
    rates = ROTARY_BASE ** (-torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)
    angles = torch.outer(torch.arange(sequence, dtype=torch.float64), rates)
    return torch.stack([angles.cos(), angles.sin()]).float()


def rotate(heads: Tensor, rotary: Tensor) -> Tensor:
    """Turn each pair (k, k + K / 2) of [B, H, S, K] by its position's angle; rotary is [2, S, K / 2]."""
    cosine, sine = rotary.unbind(0)
    left, right = heads.chunk(2, dim=-1)
    return torch.cat([left * cosine - right * sine, right * cosine + left * sine], dim=-1)
