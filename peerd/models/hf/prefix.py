"""The key-value cache of one stage of a transformers model.

The library's cache has an entry for each layer of the whole model, and its models ask the first entry how long the text is. In a stage
the first layer may be elsewhere: entries of layers that the stage does not hold stand for those of a held layer of the same kind.

Whether an architecture continues correctly in this way is found by computing with a tiny copy, not from names. Where it does not, its
stages compute the whole text for each new token, which is right and slower.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from peerd.config.manifest import Manifest, TrainConfig
from peerd.config.model_kinds import HuggingFaceConfig
from peerd.models.hf.tiny import tiny_copy
from peerd.models.prefix import Prefix, RecomputedPrefix

if TYPE_CHECKING:
    from peerd.models.hf.stage import HuggingFaceStage

PROBED_LAYERS = 4
PROBED_PIECES = [5, 1, 1, 4, 1, 3]
"""Lengths of the pieces in which the tiny copy computes a text. Together they are longer than the windows of tiny copies."""
WEIGHTS_FACTOR = 8.0
"""First weights are so small that layers hardly change what the next ones get. Multiplied by this, a wrong key or value shows."""
SMALL_SHARE = 1e-3
"""A cache is right if its error is below this share of what another first token changes."""


class StageCache(DynamicCache):  # type: ignore[misc]
    """The library's cache, for a stage that holds `layers`."""

    def __init__(self, config: Any, layers: range) -> None:
        super().__init__(config=config)
        self.length = 0
        for number, entry in enumerate(self.layers):
            held = next((self.layers[layer] for layer in layers if type(self.layers[layer]) is type(entry)), None)
            if number not in layers and held is not None:
                self.layers[number] = held
        self._held = [self.layers[layer] for layer in layers]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of tokens before those that are computed now, whichever layer is asked for."""
        return self.length

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for entry in self._held for tensor in _tensors_in(vars(entry)))

    def cut(self, length: int) -> bool:
        """Keep the first `length` tokens; False where a layer has more than keys and values of each token, or has dropped some."""
        if any(type(entry) is not DynamicLayer or entry.keys is None for entry in self._held):
            return False
        for entry in self._held:
            entry.keys, entry.values = entry.keys[..., :length, :], entry.values[..., :length, :]
        return True


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for each in inner for tensor in _tensors_in(each)]


class HuggingFacePrefix(Prefix):
    """A text in a stage, or a whole model, whose architecture continues correctly from the library's cache."""

    def __init__(self, compute: Callable[..., Tensor], config: Any, layers: range) -> None:
        """`compute` takes inputs, tokens where it computes with them, and the library's arguments for its cache."""
        super().__init__()
        self._compute = compute
        self._cache = StageCache(config, layers)

    @property
    def num_bytes(self) -> int:
        return self._cache.num_bytes

    def _extend(self, inputs: Tensor, tokens: Tensor | None) -> Tensor:
        self._cache.length = self.length
        return self._compute(inputs, tokens, past_key_values=self._cache, use_cache=True)

    def _cut(self, length: int) -> bool:
        return self._cache.cut(length)


def prefix_of_stage(stage: HuggingFaceStage, layers: range) -> Prefix:
    return HuggingFacePrefix(stage.compute, stage.whole.config, layers)


def prefix_of_whole(model: Any) -> Prefix:
    """An empty text in a PreTrainedModel."""

    def compute(inputs: Tensor, _tokens: Tensor | None, **cache: Any) -> Tensor:
        logits: Tensor = model(input_ids=inputs, **cache).logits
        return logits

    if model._is_stateful or "past_key_values" not in inspect.signature(model.forward).parameters:  # its cache has another form
        return RecomputedPrefix(lambda inputs, tokens: compute(inputs, tokens, use_cache=False))
    return HuggingFacePrefix(compute, model.config, range(model.config.num_hidden_layers))


@functools.lru_cache(maxsize=4)
def continues_from_cache(model: HuggingFaceConfig) -> bool:
    """Whether stages of this model that continue from their caches compute what they compute from the whole text."""
    from peerd.models.hf.stage import HuggingFaceStage

    tiny = tiny_copy(model, PROBED_LAYERS)
    train = TrainConfig(num_stages=tiny.num_layers, microbatch_size=1, sequence_length=sum(PROBED_PIECES))
    manifest = Manifest(seed=0, model=tiny, train=train)
    stages = [HuggingFaceStage(manifest, layer, range(layer, layer + 1)) for layer in range(tiny.num_layers)]
    tokens = torch.arange(1, sum(PROBED_PIECES) + 1)[None] * 7 % tiny.vocab_size
    other = tokens.clone()
    other[0, 0] += 1
    try:
        for stage in stages:
            stage.initialise(0, torch.device("cpu"))
            _make_strong(stage)
        whole, changed = (_logits([RecomputedPrefix(stage.without_loss) for stage in stages], [text]) for text in (tokens, other))
        prefixes = [prefix_of_stage(stage, range(number, number + 1)) for number, stage in enumerate(stages)]
        cached = _logits(prefixes, torch.split(tokens, PROBED_PIECES, dim=1))
    except Exception:  # the library's models may fail in any way
        return False
    effect = (changed - whole)[:, 1:].abs().amax(dim=(0, 2)).min()
    return bool((cached - whole).abs().max() < SMALL_SHARE * effect)


@torch.no_grad()
def _make_strong(stage: nn.Module) -> None:
    for parameter in stage.parameters():
        if parameter.dim() > 1:
            parameter.mul_(WEIGHTS_FACTOR)


def _logits(prefixes: Sequence[Prefix], pieces: Sequence[Tensor]) -> Tensor:
    """The logits of a text, which the stages compute piece by piece."""
    outputs = []
    for piece in pieces:
        hidden = piece
        for prefix in prefixes:
            hidden = prefix.extend(hidden)
        outputs.append(hidden)
    return torch.cat(outputs, dim=1)
